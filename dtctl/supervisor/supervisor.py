"""The supervisor: starts a run's processes on one node, watches them, and leaves nothing behind.

It is not a daemon and needs no root: it lives as long as one run, is started over SSH (or by srun), talks over its own
standard input and output, and listens on no port. Whatever happens to the other end - Ctrl-C, kill -9, a lost link - it
notices, ends the run's processes and itself. With `keep` it goes on alone instead and takes a new link through a unix
socket in the run's folder. Stdlib only, Python 3.8.

One thread, one poll loop; every wait has a deadline. What is said in both directions stands in messages/attempt.py.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time

from dtctl import folders, node_facts
from dtctl.schema import InvalidMessage
from dtctl.supervisor import environment, exit_cause, facts, frames, processes, progress, work
from dtctl.supervisor.fork_server import ForkServer, ForkServerUnavailable
from dtctl.supervisor.group import AGENT, Group, Process, exit_facts
from dtctl.supervisor.link import CHUNK, ControlLink
from dtctl.supervisor.live import LIVE, LIVE_EPOCH, Live, end_session
from dtctl.supervisor.messages.attempt import (
    Attach,
    AttemptStopped,
    Cold,
    Heal,
    Join,
    LogGap,
    OutputSummary,
    Ping,
    Pong,
    PortProbed,
    ProbePorts,
    ProgressReport,
    Stacks,
    StacksEnd,
    StandBy,
    StartAttempt,
    Started,
    StopAttempt,
    StopRequested,
    WorkerExit,
    WorkerProgress,
)
from dtctl.supervisor.messages.base import Message, Quit, Refusal
from dtctl.supervisor.metrics import MetricsTail
from dtctl.supervisor.records import (
    EXIT_RECORD,
    RECORD_BYTES,
    STOP_REQUEST,
    reserve,
    write_atomically,
    write_reserved,
)
from dtctl.supervisor.rendezvous import RendezvousPort
from dtctl.supervisor.worker_start import WorkerStart

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from dtctl.supervisor.output_log import Log
    from dtctl.supervisor.stacks import StackDump

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a worker to end: who is ended by one is not lost."""
STRAY_GRACE_S = 1.0
"""Seconds that processes which outlived the workers get between SIGTERM and SIGKILL."""
FORK_SERVER_TRIES = 3
"""Fork servers in a row that have ended before they were ready: another one would, too."""


class Supervisor:
    """One run on one node, over any number of attempts."""

    def __init__(
        self, start: StartAttempt, run_dir: str, link: ControlLink | None, listener_fd: int | None, guard: int
    ) -> None:
        """Serve the run of the first StartAttempt; `listener_fd` takes new links (`keep`), `guard` is our parent."""
        self.guard = guard
        self.run_dir = run_dir
        self.token = start.token
        self.grace_s = start.grace_s
        self.keep = start.keep
        self.link_timeout_s = start.link_timeout_s
        self.link: ControlLink | None = link
        self.listener_fd = listener_fd
        self.group: Group | None = None
        self.attempt_dir = ""
        self.put_out: OutputSummary | None = None
        self.outputs = start.outputs
        self.exits: list[WorkerExit] = []
        self.metrics = MetricsTail(self.run_dir)
        self.progress_dir = ""
        self.rendezvous_port = RendezvousPort(0)
        self.stack_dump: StackDump | None = None
        self.memory: exit_cause.OomCounters | None = None
        self.deadline: float | None = None  # of the SIGTERM phase, while an attempt is being ended
        self.stray_deadline: float | None = None
        self.stopped: AttemptStopped | None = None  # goes out when all output has
        self.stopped_sent = False
        self.leaving = False
        self.is_killing = False
        """Whether the processes of the attempt were sent SIGKILL."""
        self._signals: list[int] = []
        """That have arrived and are to be acted on."""
        self.wake_fd, write_end = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Acted on in the loop: not while a worker is being started, which could not be told.
            signal.signal(number, lambda number, _: self._signals.append(number))
        # How batch systems warn, often all processes at once: for the workers, who answer it with a snapshot.
        signal.signal(signal.SIGUSR1, lambda *_: None)
        self.adopts = processes.become_subreaper()
        self.worker_start: WorkerStart | None = None
        self.live: Live | None = None
        self.fork_server: ForkServer | None = None
        self.fork_server_ends = 0  # in a row, of those that have never been ready
        self.cold_reason = ""  # why no fork server is used any more

    @property
    def helpers(self) -> frozenset[int]:
        """Processes that serve the run and are not part of it."""
        warm = (self.fork_server.pid, self.fork_server.standby_pid) if self.fork_server is not None else ()
        # Whoever adopts us when the guard is killed has other children, such as all of the node's services.
        guard = (self.guard,) if os.getppid() == self.guard else ()
        return frozenset((os.getpid(), *guard, *warm)) - {0}

    def _act_on_signals(self) -> None:
        while self._signals:
            self._act_on_signal(self._signals.pop(0))

    def _act_on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self.keep:
            return
        if number == signal.SIGTERM and os.path.exists(os.path.join(self.run_dir, STOP_REQUEST)):
            with open(os.path.join(self.run_dir, STOP_REQUEST), encoding="utf-8") as file:
                self.send(StopRequested(by=file.read(1000)))
        self.leaving = True
        self.end_attempt()

    # -- one attempt ------------------------------------------------------------------------------------------------

    def start(self, message: StartAttempt) -> None:
        """Start the processes of an attempt, as the message says.

        Raises:
            OSError: a file could not be written or a process not be made.
        """
        self._identify(message)
        interface = node_facts.interface_towards(message.peer) if message.peer else ""
        self.attempt_dir = os.path.join(self.run_dir, f"attempt-{message.attempt}")
        script, base = self._write_script(message, self.attempt_dir, interface)
        self.progress_dir = base["DTCTL_PROGRESS"]
        os.makedirs(self.progress_dir, mode=0o700, exist_ok=True)
        self.memory = exit_cause.OomCounters()
        self.exits, self.stopped, self.stopped_sent, self.deadline, self.stray_deadline = [], None, False, None, None
        self.is_killing = False
        self.metrics.sent = 0
        self.rendezvous_port = RendezvousPort(message.meeting_port)
        reserve(os.path.join(self.attempt_dir, EXIT_RECORD), RECORD_BYTES)
        group = Group(self.attempt_dir, message.split_ranks, message.log_bytes)
        self.group = group
        cwd = work.folder_of(self.run_dir)
        self.live = None
        if message.live:
            self.live = Live(os.path.join(self.attempt_dir, "live"), [worker.rank for worker in message.workers])
            base[LIVE] = self.live.folder
            if message.live_epoch:
                base[LIVE_EPOCH] = str(message.live_epoch)
                for log in self._own_logs(group):
                    log.sent = log.size  # what is there was sent by the supervisor before this one, or is asked for
        workers = [environment.with_error_file(worker, self.progress_dir) for worker in message.workers]
        self.worker_start = WorkerStart(group, script, cwd, base, workers)
        self._start_workers(message.preload)
        self.send(Started(interface=interface))

    def stand_by(self, message: StandBy) -> None:
        """Have a fork server for an attempt that this node may come to later.

        Raises:
            OSError: a file could not be written or a process not be made.
        """
        self._identify(message)
        if not message.preload or self.fork_server is not None or self.group is not None:
            return
        folder = os.path.join(self.run_dir, "standby")
        interface = node_facts.interface_towards(message.peer) if message.peer else ""
        script, base = self._write_script(message, folder, interface)
        start = WorkerStart(Group(folder, False), script, work.folder_of(self.run_dir), base, [])
        start.modules = message.preload
        self.fork_server = ForkServer(self.run_dir)
        start.warm_up(self.fork_server)

    def _write_script(self, message: StartAttempt, folder: str, interface: str) -> tuple[str, dict[str, str]]:
        """What workers are started by: the path of the node script in a folder, and the variables for it."""
        os.makedirs(folder, mode=0o700, exist_ok=True)
        script = os.path.join(folder, "node.sh")
        fd = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(message.script)
        env = environment.of_workers(message, self.run_dir, interface)
        return script, {**environment.without_step(os.environ), **env, processes.TOKEN: self.token}

    def _identify(self, message: StartAttempt) -> None:
        """Write down who supervises the run here, for whoever has to end it."""
        write_atomically(
            os.path.join(self.run_dir, processes.RECORD),
            frames.encode(
                {
                    "pid": os.getpid(),
                    "identity": processes.identity(os.getpid()),
                    "attempt": message.attempt,
                    "keep": self.keep,
                    "token": self.token,
                    "origin": message.origin,
                }
            ),
        )

    def _start_workers(self, modules: list[str]) -> None:
        if self.worker_start is None:
            return
        try:
            if self.fork_server is not None:
                self.fork_server.poll()
        except ForkServerUnavailable as exc:  # since the attempt before
            self._lose_fork_server(exc)
        if not modules or self.cold_reason:
            self.worker_start.start_fresh()
            return
        if self.fork_server is None:
            self.fork_server = ForkServer(self.run_dir)
        self.worker_start.start_warm(self.fork_server, modules)

    def _continue_worker_start(self, worker_start: WorkerStart, fork_server: ForkServer) -> None:
        try:
            worker_start.step(fork_server)
        except ForkServerUnavailable as exc:
            self._lose_fork_server(exc)
            self.send(Cold(why=str(exc)))
        except OSError as exc:
            self._abort(exc)

    def _lose_fork_server(self, exc: ForkServerUnavailable) -> None:
        """The fork server is of no use any more; whether another one would be is noted."""
        server, self.fork_server = self.fork_server, None
        if server is None:
            return
        server.close()
        self.fork_server_ends = 0 if server.ready else self.fork_server_ends + 1
        if exc.is_final or self.fork_server_ends >= FORK_SERVER_TRIES:
            self.cold_reason = str(exc)

    def _keep_warm(self, start: WorkerStart) -> None:
        """Have a fork server for the next lost worker, which would have to import everything itself without one."""
        if start.waiting or not start.modules or self.cold_reason:
            return
        if self.fork_server is not None:
            try:
                self.fork_server.poll()
                self.fork_server.keep_standby()
            except ForkServerUnavailable as exc:
                self._lose_fork_server(exc)
        if self.fork_server is None and not self.cold_reason:
            self.fork_server = ForkServer(self.run_dir)
            start.warm_up(self.fork_server)

    def try_start(self, message: StartAttempt) -> None:
        """Start an attempt, or stand by for it, or say why that cannot be, and leave."""
        try:
            if isinstance(message, StandBy):
                self.stand_by(message)
            else:
                self.start(message)
        except OSError as exc:
            self._abort(exc)

    def _abort(self, exc: OSError) -> None:
        self.send(Refusal(code=facts.code_of(exc), message=facts.describe(exc)))
        self.leaving = True
        self.end_attempt()

    def end_attempt(self) -> None:
        """Ask the started processes to end; the loop sees to it that they do."""
        if self.group is None or self.deadline is not None or self.stopped is not None:
            return
        self.deadline = time.monotonic() + self.grace_s
        if self.live is not None:
            self.live.end()
        if self.worker_start is not None:
            self.worker_start.cancel(self.fork_server)
        # Only those that we started: torchrun passes it on, and a worker needs its data loaders for the last snapshot.
        processes.send([process.pid for process in self.group.running()], signal.SIGTERM)

    def watch(self) -> None:
        """Collect what has ended, and carry the ending of an attempt one step further."""
        group = self.group
        if group is None or self.stopped is not None:
            processes.reap()
            return
        if self.worker_start is not None and self.worker_start.waiting and self.fork_server is not None:
            self._continue_worker_start(self.worker_start, self.fork_server)
        ended = group.collect()
        self.rendezvous_port.check_port(at_once=bool(ended))
        for process in ended:
            group.drain(process)
            if self._report_exit(process) and not self._may_be_replaced(process):
                self.end_attempt()
        self._replace_lost(group)
        now = time.monotonic()
        if self.live is not None and (self.live.undecided or self.live.missing):
            return
        if group.running() or (self.worker_start is not None and self.worker_start.waiting):
            if self.deadline is not None and now >= self.deadline:
                self._close_attempt(self._kill())
            return
        self.end_attempt()
        strays = self._strays()
        if not strays:
            self._close_attempt(0)
        elif self.stray_deadline is None:
            self.stray_deadline = now + STRAY_GRACE_S
            processes.send(strays, signal.SIGTERM)
        elif now >= self.stray_deadline:
            self._close_attempt(self._kill())

    def _kill(self) -> int:
        """End all processes of the attempt; the number of those that are still there."""
        self.is_killing = True
        return processes.kill(self.token, self.helpers)

    def _may_be_replaced(self, process: Process) -> bool:
        """Whether the launcher is to say what follows from the end of a worker; until it does, nothing is ended."""
        live = self.live
        killed = os.WIFSIGNALED(process.status or 0) and os.WTERMSIG(process.status or 0) not in STOPS
        if live is None or self.link is None or self.deadline is not None or not killed:
            return False
        if process.rank not in live.missing:
            live.undecided.add(process.rank)
        return True

    def _replace_lost(self, group: Group) -> None:
        """Start workers in the places of lost ones that have ended, as soon as nothing of those is left."""
        live, start = self.live, self.worker_start
        if live is None or start is None:
            return
        for report in live.read():
            self.send(report)
        if self.deadline is not None:
            return
        try:
            self._keep_warm(start)
            self._start_missing(group, live, start)
        except OSError as exc:
            self._abort(exc)

    def _start_missing(self, group: Group, live: Live, start: WorkerStart) -> None:
        running = {process.rank: process for process in group.running()}
        for rank in list(live.missing):
            if rank in running:
                processes.send([running[rank].pid], signal.SIGKILL)  # frozen, or cut off: it is not to write any more
                continue
            server = self.fork_server
            if server is not None and not server.ready:
                continue  # it imports, and a fresh worker would take as long for that
            for process in group.processes:
                if process.rank == rank:
                    end_session(process.pid, self.token, self.helpers)
            try:
                start.start_again(rank, live.environment(), server)
            except ForkServerUnavailable as exc:
                self._lose_fork_server(exc)
                continue  # as soon as there is another one
            live.missing.remove(rank)
            # What has ended for good is told at the end of the attempt once more; this one has not.
            self.exits = [worker_exit for worker_exit in self.exits if worker_exit.rank != rank]
            if server is None and start.modules:
                self.send(Cold(why=self.cold_reason))

    def _report_exit(self, process: Process) -> int:
        """Report how a process ended, and what the node knows about the cause; its exit code."""
        code, number = exit_facts(process.status or 0)
        ended_at, reason = time.time(), ""
        killed = self.is_killing and number == signal.SIGKILL
        self.send(ProgressReport(workers=self._progress()))
        if code and self.deadline is None:  # a process that we ended needs no explanation
            if number == signal.SIGKILL and self.memory is not None:
                reason = self.memory.reason(process.pid)
            reason = reason or exit_cause.LIMITS.get(number or 0, "") or exit_cause.full_disk(self.run_dir)
        elif killed:
            reason = "it did not end when it was asked to, so dtctl killed it"
        self.exits.append(
            WorkerExit(
                rank=process.rank,
                code=code,
                signal=number,
                why=reason,
                # From outside, to a worker that does not listen to it.
                asked=number in (signal.SIGTERM, signal.SIGUSR1) and self.deadline is None,
                told=self.deadline is not None,  # it may have ended because it was asked to
                killed=killed,
                time=ended_at,
            )
        )
        self.send(self.exits[-1])
        return code

    def _progress(self) -> list[WorkerProgress]:
        """How far the workers of the attempt are, as far as they tell."""
        return progress.read(self.progress_dir) if self.group is not None and self.stopped is None else []

    def _begin_stack_dump(self) -> None:
        from dtctl.supervisor.stacks import StackDump  # seldom needed

        self.stack_dump = StackDump(self.progress_dir, self.token)

    def _send_stacks(self) -> None:
        """Send the stacks as soon as all workers have written theirs."""
        if self.stack_dump is None or not self.stack_dump.ready():
            return
        for answer in self.stack_dump.answers():
            self.send(answer)
        self.send(StacksEnd())
        self.stack_dump = None

    def _strays(self) -> list[int]:
        """Processes of the run that outlived its workers."""
        if self.adopts and not processes.has_children():
            return []  # whatever a worker left behind would be our child by now
        return processes.find(self.token, self.helpers)

    def _close_attempt(self, left_behind: int) -> None:
        group = self.group
        if group is None:
            return
        for process in group.collect():
            self._report_exit(process)
        group.close()
        if self.live is not None:
            self.live.close()
            self.live = None
        self.put_out = work.summary(self.run_dir, self.outputs)
        segments = {str(rank): log.segments for rank, log in group.logs.items() if log.unstored or log.cut}
        record = self._ended(group, left_behind, segments=segments)
        unrecorded = ""
        try:
            write_reserved(os.path.join(self.attempt_dir, EXIT_RECORD), frames.encode(record))
        except OSError as exc:
            unrecorded = f"exit record not written: {exc.strerror}"
        self.stopped = self._ended(group, left_behind, record=unrecorded)

    def _ended(self, group: Group, left_behind: int, **more) -> AttemptStopped:  # type: ignore[no-untyped-def]
        logs = group.logs.values()
        return AttemptStopped(
            left=left_behind,
            exits=self.exits,
            log_bytes_lost=sum(log.lost(is_linked=self.link is not None) for log in logs),
            log_bytes_unstored=sum(log.unstored for log in logs),
            outputs=self.put_out,
            met=self.rendezvous_port.opened,
            **more,
        )

    # -- the link ---------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queue a message for the control machine, if it is there."""
        if self.link is not None:
            self.link.out += frames.pack_json(message)

    def queue_output(self) -> None:
        """Queue output that was not sent yet, as much as the link can take, and then the message about the end."""
        link = self.link
        if link is None or not link.is_synced:
            return
        logs = list(self.group.logs.items()) if self.group else []
        for rank, log in logs:
            while log.sent < log.size and len(link.out) < CHUNK:
                missing, data = log.take(CHUNK)
                if missing:
                    self.send(LogGap(rank=rank, bytes=missing))
                if not (missing or data):
                    break  # somebody has made the file shorter
                link.out += frames.pack(frames.LOG, data, rank)
        self.metrics.feed(link)
        if self.stopped is not None and not self.stopped_sent and all(log.sent >= log.size for _, log in logs):
            self.send(self.stopped)
            self.stopped_sent = True

    def receive(self) -> None:
        """Act on the control machine's messages; if it is silent for too long, the link counts as lost."""
        link = self.link
        if link is None:
            return
        try:
            requests = link.read()
        except (frames.BrokenFrame, InvalidMessage):
            requests = None
        if requests is None or time.monotonic() - link.last_heard > self.link_timeout_s:
            self.lose_link()
            return
        for request in requests:
            self._answer(request, link)

    def _answer(self, request: Message, link: ControlLink) -> None:
        if isinstance(request, Ping):
            self.send(Pong(workers=self._progress()))
        elif isinstance(request, StartAttempt):
            self.try_start(request)
        elif isinstance(request, StopAttempt):
            self.send(ProgressReport(workers=self._progress(), before_stop=True))
            self.end_attempt()
            if request.now and self.deadline is not None:
                self.deadline = time.monotonic()
        elif isinstance(request, Heal) and self.live is not None and self.deadline is None:
            self.live.heal(request)
        elif isinstance(request, Join) and self.live is not None:
            self.live.join(request)
        elif isinstance(request, ProbePorts):
            self.send(PortProbed(port=node_facts.first_free(request.ports)))
        elif isinstance(request, Stacks):
            self._begin_stack_dump()
        elif isinstance(request, Attach):
            link.is_synced = True
            self._rewind(request.offsets)
        elif isinstance(request, Quit):
            self.leaving = True
            self.end_attempt()

    def _rewind(self, offsets: dict[str, int]) -> None:
        """A new link says how much of each log it has; it is given the rest, and the end again if there was one."""
        if self.group is not None:
            self._own_logs(self.group)
            for rank, log in self.group.logs.items():
                log.rewind(offsets.get(str(rank), 0))
        self.metrics.sent = 0
        self.stopped_sent = False

    def _own_logs(self, group: Group) -> list[Log]:
        """The logs that the attempt's folder has, opened."""
        names = [name for name in os.listdir(self.attempt_dir) if name.endswith(".log")]
        return [group.log(AGENT if name == "agent.log" else int(name[5:-4])) for name in names]

    def lose_link(self) -> None:
        """Go on alone if the run is to be kept; end it otherwise."""
        self.link = None
        if not self.keep or (self.live is not None and (self.live.undecided or self.live.missing)):
            self.leaving = True
            self.end_attempt()

    def take_link(self) -> None:
        """Talk to whoever connected to the unix socket last."""
        listener = socket.socket(fileno=self.listener_fd)
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return  # it has gone again
        finally:
            listener.detach()
        fd = connection.detach()
        self.link = ControlLink(fd, fd)
        self.link.is_synced = False  # until it has said what it knows already

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to quit, or until the run has ended and no control machine is connected."""
        while True:
            self._act_on_signals()
            self.watch()
            self._send_stacks()
            self.queue_output()
            if self.link is not None and not self.link.flush():
                self.lose_link()
            if self._finished():
                if self.fork_server is not None:
                    self.fork_server.close()
                folders.remove_tree(folders.memory_folder(self.run_dir))
                return
            self._wait()
            self.receive()

    def _finished(self) -> bool:
        ended = self.group is None or self.stopped is not None
        if self.keep and self.link is None and self.stopped is not None:
            return True  # the exit record and the logs on disk say the rest
        heard_out = self.link is None or (not self.link.out and (self.stopped is None or self.stopped_sent))
        return self.leaving and ended and heard_out

    def _workers_words(self) -> list[int]:
        """Where workers that start or are replaced say how far they are."""
        server, start = self.fork_server, self.worker_start
        waited_for = server is not None and start is not None and (start.waiting or not server.ready)
        fds = server.descriptors() if server is not None and waited_for else []
        return fds + ([self.live.reports] if self.live is not None else [])

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self.wake_fd, select.POLLIN)
        pipes: dict[int, Process] = {}
        if self.group is not None:
            self.group.is_linked = self.link is not None and self.link.is_synced
            pipes = self.group.readable()
            for fd in pipes:
                poll.register(fd, select.POLLIN)
        if self.link is not None:
            poll.register(self.link.read_fd, select.POLLIN)
            if self.link.out:
                poll.register(self.link.write_fd, select.POLLIN | select.POLLOUT)
        if self.listener_fd is not None:
            poll.register(self.listener_fd, select.POLLIN)
        for fd in self._workers_words():
            poll.register(fd, select.POLLIN)
        ending = self.deadline is not None and self.stopped is None
        for fd, _ in poll.poll(50 if ending or self.stack_dump is not None else 500):
            if fd == self.wake_fd:
                os.read(self.wake_fd, 512)
            elif fd == self.listener_fd:
                self.take_link()
            elif fd in pipes and self.group is not None:
                self.group.drain(pipes[fd])
