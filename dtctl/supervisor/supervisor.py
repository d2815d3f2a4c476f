"""The supervisor, which starts a run's processes on one node, watches them, and leaves no process behind.

The supervisor is not a daemon and needs no root: it runs as long as one run, is started over SSH (or by srun),
communicates over its standard input and output, and listens on no port. It detects the loss of the other end (Ctrl-C,
kill -9, a lost link), ends the run's processes and exits. With `keep` it continues alone instead and accepts a new link
through a unix socket in the run's folder. Stdlib only, Python 3.8.

It has one thread with one poll loop, and every wait has a deadline. The messages in both directions are in
messages/attempt.py.
"""

from __future__ import annotations

import os
import select
import signal

from dtctl import node_facts
from dtctl.supervisor import facts, processes
from dtctl.supervisor.attempt import NodeAttempt, SupervisedRun
from dtctl.supervisor.frames import FdLink
from dtctl.supervisor.link import ControlLink
from dtctl.supervisor.messages.attempt import (
    Attach,
    Heal,
    Join,
    Ping,
    Pong,
    PortProbed,
    ProbePorts,
    ProgressReport,
    RequestStacks,
    StacksEnd,
    StandBy,
    StartAttempt,
    StopAttempt,
    StopRequested,
)
from dtctl.supervisor.messages.base import Message, Quit, Refusal
from dtctl.supervisor.records import STOP_REQUEST

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from dtctl.supervisor.stacks import StackDump


class Supervisor:
    """Supervisor of one run on one node: a loop over messages of the control machine and events of the processes."""

    def __init__(
        self, start: StartAttempt, run_dir: str, setup_link: FdLink | None, listener_fd: int | None, guard: int
    ) -> None:
        """Serve the run of the first StartAttempt; `listener_fd` accepts new links (`keep`), `guard` is the parent."""
        self.link = ControlLink(setup_link, listener_fd, start.link_timeout_s)
        self.leaving = False
        self._signals: list[int] = []
        """Received signals that were not handled yet."""
        self._wake_fd, write_end = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # The loop acts on the signal, since a worker that is just being started cannot be stopped yet.
            signal.signal(number, lambda number, _: self._signals.append(number))
        # Batch systems send this warning, often to all processes at once. The workers save a snapshot upon it.
        signal.signal(signal.SIGUSR1, lambda *_: None)
        self.run = SupervisedRun(start, run_dir, guard)
        self.attempt: NodeAttempt | None = None
        """The newest attempt, also after its end."""
        self.stack_dump: StackDump | None = None

    def serve(self) -> None:
        """Serve until a request to quit, or until the run has ended and no control machine is connected."""
        while True:
            while self._signals:
                self._act_on_signal(self._signals.pop(0))
            self._advance_attempt()
            self._send_stacks()
            if self.attempt is not None:
                self.attempt.queue_output()
            if not self.link.flush():
                self._lose_link()
            if self._is_supervisor_finished():
                self.run.close()
                return
            self._wait_for_events()
            self._receive_requests()

    def start(self, message: StartAttempt) -> None:
        """Start an attempt, or stand by for it; if this fails, report the reason and exit."""
        try:
            self.run.write_record(message)
            if isinstance(message, StandBy):
                self._stand_by(message)
            else:
                self.attempt = NodeAttempt(message, self.run, self.link)
                self.attempt.start()
        except OSError as exc:
            self._abort_attempt(exc)

    def _stand_by(self, message: StandBy) -> None:
        """Start a fork server for an attempt that this node may join later.

        Raises:
            OSError: a file could not be written or a process not be made.
        """
        if message.preload and self.run.fork_servers.server is None and self.attempt is None:
            interface = node_facts.find_interface_towards(message.peer) if message.peer else ""
            self.run.prepare_workers(message, os.path.join(self.run.folder, "standby"), interface).warm_up()

    def _abort_attempt(self, exc: OSError) -> None:
        self.link.send(Refusal(code=facts.choose_hint_code(exc), message=facts.describe_os_error(exc)))
        self._end_attempt_and_leave()

    def _end_attempt_and_leave(self) -> None:
        """End the attempt; the loop ends after the end was reported to the control machine."""
        self.leaving = True
        if self.attempt is not None:
            self.attempt.end()

    def _act_on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self.run.keep:
            return
        if number == signal.SIGTERM and self.attempt is not None:  # `dtctl stop` sends it if there is no launcher.
            self.attempt.is_stop_requested = True
        request = os.path.join(self.run.folder, STOP_REQUEST)
        if number == signal.SIGTERM and os.path.exists(request):
            with open(request, encoding="utf-8") as file:
                self.link.send(StopRequested(by=file.read(1000)))
        self._end_attempt_and_leave()

    def _advance_attempt(self) -> None:
        """Collect ended processes, start pending ones, and take the next step of the attempt's end."""
        attempt = self.attempt
        if attempt is None or attempt.stopped is not None:
            processes.reap_children()
            return
        attempt.collect()
        try:
            attempt.start_workers()
        except OSError as exc:
            self._abort_attempt(exc)
        attempt.advance_end()

    def _receive_requests(self) -> None:
        """Act on the control machine's messages."""
        requests = self.link.read()
        if requests is None:
            self._lose_link()
            return
        for request in requests:
            self._handle_control_request(request)

    def _handle_control_request(self, request: Message) -> None:
        attempt = self.attempt
        workers = attempt.read_progress() if attempt is not None and isinstance(request, (Ping, StopAttempt)) else []
        if isinstance(request, Ping):
            self.link.send(Pong(workers=workers))
        elif isinstance(request, StartAttempt):
            self.start(request)
        elif isinstance(request, StopAttempt):
            self.link.send(ProgressReport(workers=workers, before_stop=True))
            if attempt is not None:
                attempt.is_stop_requested |= request.requested
                attempt.end(at_once=request.now)
        elif isinstance(request, Heal) and attempt is not None:
            attempt.heal(request)
        elif isinstance(request, Join) and attempt is not None and attempt.live is not None:
            attempt.live.join(request)
        elif isinstance(request, ProbePorts):
            self.link.send(PortProbed(port=node_facts.find_free_port(request.ports)))
        elif isinstance(request, RequestStacks):
            from dtctl.supervisor.stacks import StackDump  # Few runs need this module.

            self.stack_dump = StackDump(attempt.progress_dir if attempt is not None else "", self.run.token)
        elif isinstance(request, Attach):
            self.link.is_synced = True
            if attempt is not None:
                attempt.rewind(request.offsets)
        elif isinstance(request, Quit):
            self._end_attempt_and_leave()

    def _send_stacks(self) -> None:
        """Send the stacks once all workers have written theirs."""
        if self.stack_dump is None or not self.stack_dump.ready():
            return
        for answer in self.stack_dump.answers():
            self.link.send(answer)
        self.link.send(StacksEnd())
        self.stack_dump = None

    def _lose_link(self) -> None:
        """Continue without a link if the run is kept; end it otherwise."""
        self.link.drop()
        live = self.attempt.live if self.attempt is not None else None
        if not self.run.keep or (live is not None and live.is_open):
            self._end_attempt_and_leave()

    def _is_supervisor_finished(self) -> bool:
        attempt, link = self.attempt, self.link
        if attempt is not None and attempt.stopped is None:
            return False
        if self.run.keep and not link.is_up and attempt is not None:
            return True  # The exit record and the logs on the disk have all results.
        heard_out = not link.is_up or (not link.out and (attempt is None or attempt.is_end_sent))
        return self.leaving and heard_out

    def _wait_for_events(self) -> None:
        """Wait for the next event; read workers' output, and accept a new link."""
        attempt = self.attempt
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        self.link.register(poll)
        pipes = attempt.readable() if attempt is not None else {}
        for fd in pipes:
            poll.register(fd, select.POLLIN)
        is_ending = attempt is not None and attempt.deadline is not None and attempt.stopped is None
        for fd, _ in poll.poll(50 if is_ending or self.stack_dump is not None else 500):
            if fd == self._wake_fd:
                os.read(self._wake_fd, 512)
            elif fd == self.link.listener_fd:
                self.link.accept()
            else:
                process = pipes.get(fd)
                if attempt is not None and process is not None:
                    attempt.group.drain(process)
