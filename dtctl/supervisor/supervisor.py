"""The supervisor: starts a run's processes on one node, watches them, and leaves nothing behind.

It is not a daemon and needs no root: it lives as long as one run, is started over SSH (or by srun), talks over its own
standard input and output, and listens on no port. Whatever happens to the other end - Ctrl-C, kill -9, a lost link - it
notices, ends the run's processes and itself. With `keep` it goes on alone instead and takes a new link through a unix
socket in the run's folder. Stdlib only, Python 3.8.

One thread, one poll loop; every wait has a deadline. Messages are JSON with the key `op`:

    from the control machine             to the control machine
    hello    who are you                 hello    facts about the node
    push ... bring the code (receive.py) push     ...
    start    run this                    started  process ids, interface
    stop     end the attempt             exit     rank, code, signal, time      (at once)
    quit     and end yourself            stopped  processes left                (after all output)
    probe    which port is free          probed   port
                                         progress as in pong, before an exit and a stop
    attach   I know logs up to here      log frames from there on
    stacks   where do the workers stand  stack    of one worker, then stacks-end
    ping     are you there               pong     how far the workers are (progress.py)
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time

from dtctl import folders, node_facts
from dtctl.supervisor import environment, exit_cause, facts, frames, processes, progress
from dtctl.supervisor.fork_server import ForkServer
from dtctl.supervisor.group import AGENT, Group, Process, exit_facts
from dtctl.supervisor.link import CHUNK, ControlLink
from dtctl.supervisor.metrics import MetricsTail
from dtctl.supervisor.worker_start import WorkerStart

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from dtctl.supervisor.stacks import StackDump

STRAY_GRACE_S = 1.0
"""Seconds that processes which outlived the workers get between SIGTERM and SIGKILL."""


def write_atomically(path: str, data: bytes) -> None:
    """Replace the file at `path` in one step, durable when this returns."""
    partial = path + ".partial"
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folders.sync_folder(os.path.dirname(path))


class Supervisor:
    """One run on one node, over any number of attempts."""

    def __init__(self, start: dict, link: ControlLink | None, listener_fd: int | None, guard: int) -> None:  # type: ignore[type-arg]
        """Serve the run of the first `start` message; `listener_fd` takes new links (`keep`), `guard` is our parent."""
        self.guard = guard
        self.run_dir: str = start["run_dir"]
        self.token: str = start["token"]
        self.grace_s: float = start["grace_s"]
        self.keep: bool = start["keep"]
        self.link_timeout_s: float = start["link_timeout_s"]
        self.link: ControlLink | None = link
        self.listener_fd = listener_fd
        self.group: Group | None = None
        self.attempt_dir = ""
        self.exits: list[dict] = []  # type: ignore[type-arg]
        self.metrics = MetricsTail(self.run_dir)
        self.progress_dir = ""
        self.stack_dump: StackDump | None = None
        self.memory: exit_cause.OomCounters | None = None
        self.deadline: float | None = None  # of the SIGTERM phase, while an attempt is being ended
        self.stray_deadline: float | None = None
        self.stopped: dict | None = None  # type: ignore[type-arg]  # goes out when all output has
        self.leaving = False
        self.wake_fd, write_end = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        # How batch systems warn, often all processes at once: for the workers, who answer it with a snapshot.
        signal.signal(signal.SIGUSR1, lambda *_: None)
        self.adopts = processes.become_subreaper()
        self.worker_start: WorkerStart | None = None
        self.fork_server: ForkServer | None = None
        self.cold_reason = ""  # why the fork server is no longer used

    @property
    def helpers(self) -> frozenset[int]:
        """Processes that serve the run and are not part of it."""
        warm = (self.fork_server.pid,) if self.fork_server is not None and self.fork_server.pid else ()
        # Whoever adopts us when the guard is killed has other children, such as all of the node's services.
        guard = (self.guard,) if os.getppid() == self.guard else ()
        return frozenset((os.getpid(), *guard, *warm))

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP and self.keep:
            return
        self.leaving = True
        self.end_attempt()

    # -- one attempt ------------------------------------------------------------------------------------------------

    def start(self, message: dict) -> None:  # type: ignore[type-arg]
        """Start the processes of an attempt, as the message says.

        Raises:
            OSError: a file could not be written or a process not be made.
        """
        message = environment.complete(message, self.run_dir)
        self.attempt_dir = os.path.join(self.run_dir, f"attempt-{message['attempt']}")
        os.makedirs(self.attempt_dir, mode=0o700, exist_ok=True)
        self.progress_dir = message["env"]["DTCTL_PROGRESS"]
        os.makedirs(self.progress_dir, mode=0o700, exist_ok=True)
        self.memory = exit_cause.OomCounters()
        script = os.path.join(self.attempt_dir, "node.sh")
        fd = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(message["script"])
        self.exits, self.stopped, self.deadline, self.stray_deadline = [], None, None, None
        self.metrics.sent = 0
        group = Group(self.attempt_dir, message["split_ranks"])
        self.group = group
        base = {**os.environ, **message["env"], processes.TOKEN: self.token}
        self.worker_start = WorkerStart(group, script, message["cwd"], base, message["workers"])
        self._start_workers(message.get("preload", []))
        write_atomically(
            os.path.join(self.run_dir, "supervisor.json"),
            json.dumps(
                {
                    "pid": os.getpid(),
                    "identity": processes.identity(os.getpid()),
                    "attempt": message["attempt"],
                    "keep": self.keep,
                    "token": self.token,
                }
            ).encode(),
        )
        pids = [process.pid for process in group.processes]
        self.send({"op": "started", "attempt": message["attempt"], "pids": pids, "interface": message["interface"]})

    def _start_workers(self, modules: list[str]) -> None:
        if self.worker_start is None:
            return
        if not modules or self.cold_reason:
            self.worker_start.start_fresh()
            return
        if self.fork_server is None:
            self.fork_server = ForkServer(self.run_dir)
        self.worker_start.start_warm(self.fork_server, modules)

    def _continue_worker_start(self, worker_start: WorkerStart, fork_server: ForkServer) -> None:
        try:
            self.cold_reason = worker_start.step(fork_server)
            if self.cold_reason:
                self.send({"op": "cold", "why": self.cold_reason})
        except OSError as exc:
            self._abort(exc)

    def try_start(self, message: dict) -> None:  # type: ignore[type-arg]
        """Start an attempt, or say why it cannot be started, and leave."""
        try:
            self.start(message)
        except OSError as exc:
            self._abort(exc)

    def _abort(self, exc: OSError) -> None:
        self.send({"op": "error", "code": facts.code_of(exc), "message": facts.describe(exc)})
        self.leaving = True
        self.end_attempt()

    def end_attempt(self) -> None:
        """Ask the started processes to end; the loop sees to it that they do."""
        if self.group is None or self.deadline is not None or self.stopped is not None:
            return
        self.deadline = time.monotonic() + self.grace_s
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
        for process in group.collect():
            group.drain(process)
            if self._report_exit(process):
                self.end_attempt()
        now = time.monotonic()
        if group.running() or (self.worker_start is not None and self.worker_start.waiting):
            if self.deadline is not None and now >= self.deadline:
                self._close_attempt(processes.kill(self.token, self.helpers), killed=True)
            return
        self.end_attempt()
        strays = self._strays()
        if not strays:
            self._close_attempt(0, killed=False)
        elif self.stray_deadline is None:
            self.stray_deadline = now + STRAY_GRACE_S
            processes.send(strays, signal.SIGTERM)
        elif now >= self.stray_deadline:
            self._close_attempt(processes.kill(self.token, self.helpers), killed=True)

    def _report_exit(self, process: Process) -> int:
        """Report how a process ended, and what the node knows about the cause; its exit code."""
        code, number = exit_facts(process.status or 0)
        fact = {"op": "exit", "rank": process.rank, "code": code, "signal": number, "time": time.time(), "why": ""}
        # From outside, to a worker that does not listen to it.
        fact["asked"] = number in (signal.SIGTERM, signal.SIGUSR1) and self.deadline is None
        fact["told"] = self.deadline is not None  # it may have ended because it was asked to
        self.send({"op": "progress", "workers": self._progress()})
        if code and self.deadline is None:  # a process that we ended needs no explanation
            if number == signal.SIGKILL and self.memory is not None:
                fact["why"] = self.memory.reason(process.pid)
            fact["why"] = fact["why"] or exit_cause.full_disk(self.run_dir)
        self.exits.append(fact)
        self.send(fact)
        return code

    def _progress(self) -> list:  # type: ignore[type-arg]
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
        self.send({"op": "stacks-end"})
        self.stack_dump = None

    def _strays(self) -> list[int]:
        """Processes of the run that outlived its workers."""
        if self.adopts and not processes.has_children():
            return []  # whatever a worker left behind would be our child by now
        return processes.find(self.token, self.helpers)

    def _close_attempt(self, left_behind: int, killed: bool) -> None:
        group = self.group
        if group is None:
            return
        for process in group.collect():
            self._report_exit(process)
        group.close()
        lost = sum(log.lost for log in group.logs.values())
        self.stopped = {
            "op": "stopped",
            "left": left_behind,
            "killed": killed,
            "exits": self.exits,
            "log_bytes_lost": lost,
        }
        try:
            write_atomically(os.path.join(self.attempt_dir, "exit.json"), json.dumps(self.stopped).encode())
        except OSError as exc:
            self.stopped["record"] = f"exit record not written: {exc.strerror}"

    # -- the link ---------------------------------------------------------------------------------------------------

    def send(self, message: dict) -> None:  # type: ignore[type-arg]
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
                data = log.unsent(CHUNK)
                log.sent += len(data)
                link.out += frames.pack(frames.LOG, data, rank)
        self.metrics.feed(link)
        if self.stopped is not None and not self.stopped.get("told") and all(log.sent >= log.size for _, log in logs):
            self.send(self.stopped)
            self.stopped["told"] = True

    def receive(self) -> None:
        """Act on the control machine's messages; if it is silent for too long, the link counts as lost."""
        link = self.link
        if link is None:
            return
        try:
            messages = link.read()
        except frames.BrokenFrame:
            messages = None
        if messages is None or time.monotonic() - link.last_heard > self.link_timeout_s:
            self.lose_link()
            return
        for message in messages:
            op = message.get("op")
            if op == "ping":
                self.send({"op": "pong", "time": time.time(), "sent": message.get("time"), "workers": self._progress()})
            elif op == "start":
                self.try_start(message)
            elif op == "stop":
                self.send({"op": "progress", "workers": self._progress(), "before_stop": True})
                self.end_attempt()
                if message.get("now") and self.deadline is not None:
                    self.deadline = time.monotonic()
            elif op == "probe":
                self.send({"op": "probed", "port": node_facts.first_free(message["ports"])})
            elif op == "stacks":
                self._begin_stack_dump()
            elif op == "attach":
                link.is_synced = True
                self._rewind(message.get("offsets", {}))
            elif op == "quit":
                self.leaving = True
                self.end_attempt()

    def _rewind(self, offsets: dict) -> None:  # type: ignore[type-arg]
        """A new link says how much of each log it has; it is given the rest, and the end again if there was one."""
        if self.group is not None:
            for name in os.listdir(self.attempt_dir):
                if name.endswith(".log"):
                    self.group.log(AGENT if name == "agent.log" else int(name[5:-4]))
            for rank, log in self.group.logs.items():
                log.sent = min(int(offsets.get(str(rank), 0)), log.size)
        self.metrics.sent = 0
        if self.stopped is not None:
            self.stopped.pop("told", None)

    def lose_link(self) -> None:
        """Go on alone if the run is to be kept; end it otherwise."""
        self.link = None
        if not self.keep:
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
            self.watch()
            self._send_stacks()
            self.queue_output()
            if self.link is not None and not self.link.flush():
                self.lose_link()
            if self._finished():
                if self.fork_server is not None:
                    self.fork_server.close()
                return
            self._wait()
            self.receive()

    def _finished(self) -> bool:
        ended = self.group is None or self.stopped is not None
        if self.keep and self.link is None and self.stopped is not None:
            return True  # the exit record and the logs on disk say the rest
        heard_out = self.link is None or (not self.link.out and (self.stopped is None or "told" in self.stopped))
        return self.leaving and ended and heard_out

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self.wake_fd, select.POLLIN)
        pipes = {}
        if self.group is not None:
            pipes = {process.pipe: process for process in self.group.processes if process.pipe is not None}
            for fd in pipes:
                poll.register(fd, select.POLLIN)
        if self.link is not None:
            poll.register(self.link.read_fd, select.POLLIN)
            if self.link.out:
                poll.register(self.link.write_fd, select.POLLIN | select.POLLOUT)
        if self.listener_fd is not None:
            poll.register(self.listener_fd, select.POLLIN)
        if self.worker_start is not None and self.worker_start.waiting and self.fork_server is not None:
            for fd in self.fork_server.descriptors():
                poll.register(fd, select.POLLIN)
        ending = self.deadline is not None and self.stopped is None
        for fd, _ in poll.poll(50 if ending or self.stack_dump is not None else 500):
            if fd == self.wake_fd:
                os.read(self.wake_fd, 512)
            elif fd == self.listener_fd:
                self.take_link()
            elif fd in pipes and self.group is not None:
                self.group.drain(pipes[fd])
