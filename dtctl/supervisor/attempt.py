"""One attempt of a run on one node: from its start until nothing of it is left. Stdlib only, Python 3.8."""

from __future__ import annotations

import os
import signal
import time

from dtctl import folders, node_facts
from dtctl.supervisor import environment, frames, processes, progress, work
from dtctl.supervisor.exit_cause import WorkerExits
from dtctl.supervisor.fork_server import ForkServers
from dtctl.supervisor.group import Group, Process
from dtctl.supervisor.link import ControlLink
from dtctl.supervisor.live import LIVE, LIVE_EPOCH, Live, end_session
from dtctl.supervisor.messages.attempt import (
    AttemptStopped,
    Cold,
    Heal,
    ProgressReport,
    StartAttempt,
    Started,
    WorkerProgress,
)
from dtctl.supervisor.metrics import MetricsTail
from dtctl.supervisor.output_log import RankLogs
from dtctl.supervisor.records import EXIT_RECORD, RECORD_BYTES, reserve, write_atomically, write_reserved
from dtctl.supervisor.rendezvous import RendezvousPort
from dtctl.supervisor.worker_start import WorkerStart

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a worker to end: a worker that one of them ends is not lost."""
STRAY_GRACE_S = 1.0
"""Seconds that processes which outlived the workers get between SIGTERM and SIGKILL."""


class SupervisedRun:
    """One run on this node, over any number of attempts: its folder, and the processes that are part of it."""

    def __init__(self, start: StartAttempt, run_dir: str, guard: int) -> None:
        """Take over the run of the first StartAttempt; `guard` is our parent."""
        self.folder = run_dir
        self.token = start.token
        self.grace_s = start.grace_s
        self.keep = start.keep
        self.outputs = start.outputs
        self.fork_servers = ForkServers(run_dir)
        self._guard = guard
        self._adopts = processes.become_subreaper()

    @property
    def helpers(self) -> frozenset[int]:
        """Processes that serve the run and are not part of it."""
        # Whoever adopts us when the guard is killed has other children, such as all of the node's services.
        guard = (self._guard,) if os.getppid() == self._guard else ()
        return frozenset((os.getpid(), *guard, *self.fork_servers.pids())) - {0}

    def find_strays(self) -> list[int]:
        """Processes of the run that outlived its workers."""
        if self._adopts and not processes.has_children():
            return []  # whatever a worker left behind would be our child by now
        return processes.find(self.token, self.helpers)

    def kill(self) -> int:
        """End all processes of the run; the number of those that are still there."""
        return processes.kill(self.token, self.helpers)

    def write_record(self, message: StartAttempt) -> None:
        """Record which process supervises the run here, for the process that has to end it.

        Raises:
            OSError: it cannot be written.
        """
        record = {
            "pid": os.getpid(),
            "identity": processes.identity(os.getpid()),
            "attempt": message.attempt,
            "keep": self.keep,
            "token": self.token,
            "origin": message.origin,
        }
        write_atomically(os.path.join(self.folder, processes.RECORD), frames.encode(record))

    def prepare_workers(self, message: StartAttempt, folder: str, interface: str) -> WorkerStart:
        """Write the node script that workers are started by into a folder, and put their variables together.

        Raises:
            OSError: it cannot be written.
        """
        os.makedirs(folder, mode=0o700, exist_ok=True)
        script = os.path.join(folder, "node.sh")
        fd = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(message.script)
        env = environment.of_workers(message, self.folder, interface)
        workers = [environment.with_error_file(worker, env["DTCTL_PROGRESS"]) for worker in message.workers]
        env = {**environment.without_step(os.environ), **env, processes.TOKEN: self.token}
        return WorkerStart(self.fork_servers, message.preload, script, work.folder_of(self.folder), env, workers)

    def close(self) -> None:
        """Leave nothing behind that only a run needs."""
        self.fork_servers.close()
        folders.remove_tree(folders.memory_folder(self.folder))


class Attempt:
    """The processes of one attempt on this node, and how far their start, their replacement and their end are."""

    def __init__(self, message: StartAttempt, run: SupervisedRun, link: ControlLink) -> None:
        """Make everything that the workers need; `start` starts them.

        Raises:
            OSError: a file could not be written.
        """
        self.run = run
        self.link = link
        self.folder = os.path.join(run.folder, f"attempt-{message.attempt}")
        self.interface = node_facts.interface_towards(message.peer) if message.peer else ""
        self.worker_start = run.prepare_workers(message, self.folder, self.interface)
        self.progress_dir = self.worker_start.env["DTCTL_PROGRESS"]
        os.makedirs(self.progress_dir, mode=0o700, exist_ok=True)
        self.ends = WorkerExits(run.folder)
        self.rendezvous_port = RendezvousPort(message.meeting_port)
        reserve(os.path.join(self.folder, EXIT_RECORD), RECORD_BYTES)
        self.logs = RankLogs(self.folder, message.log_bytes)
        self.metrics = MetricsTail(run.folder)
        self.group = Group(self.logs, message.split_ranks)
        self.live: Live | None = None
        if message.live:
            self.live = Live(os.path.join(self.folder, "live"), [worker.rank for worker in message.workers])
            self.worker_start.env[LIVE] = self.live.folder
            if message.live_epoch:
                self.worker_start.env[LIVE_EPOCH] = str(message.live_epoch)
                self.logs.skip_stored()
        self.deadline: float | None = None
        """Deadline of the SIGTERM phase, while the attempt is being ended."""
        self._stray_deadline: float | None = None
        self._is_killing = False
        """True if the processes of the attempt were sent SIGKILL."""
        self.stopped: AttemptStopped | None = None
        """Goes out when all output has."""
        self.is_end_sent = False

    def start(self) -> None:
        """Start the processes, or let a fork server prepare for that.

        Raises:
            OSError: a process could not be made.
        """
        self.worker_start.start(self.group)
        self.link.send(Started(interface=self.interface))

    def read_progress(self) -> list[WorkerProgress]:
        """Return the progress of the workers that report it."""
        return progress.read(self.progress_dir) if self.stopped is None else []

    def end(self, at_once: bool = False) -> None:
        """Ask the started processes to end; `conclude` sees to it that they do, after the grace or at once."""
        if self.deadline is None and self.stopped is None:
            self.deadline = time.monotonic() + self.run.grace_s
            if self.live is not None:
                self.live.end()
            self.worker_start.cancel()
            # Only those that we started: torchrun passes it on, and a worker needs its data loaders for the last
            # snapshot.
            processes.send([process.pid for process in self.group.running()], signal.SIGTERM)
        if at_once:
            self.deadline = time.monotonic()

    def heal(self, request: Heal) -> None:
        """Let lost workers be replaced, unless the attempt is being ended."""
        if self.live is not None and self.deadline is None:
            self.live.heal(request)

    def collect(self) -> None:
        """Report the processes that have ended, and the workers' messages about a replacement."""
        ended = self.group.collect()
        self.rendezvous_port.check_port(at_once=bool(ended))
        for process in ended:
            self.group.drain(process)
            if self._report_exit(process) and not self._may_be_replaced(process):
                self.end()
        for report in self.live.read() if self.live is not None else ():
            self.link.send(report)

    def _report_exit(self, process: Process) -> int:
        """Report how a process ended, with the cause if the node has determined it; return its exit code."""
        worker_exit = self.ends.add(process, is_ending=self.deadline is not None, is_killing=self._is_killing)
        self.link.send(ProgressReport(workers=self.read_progress()))
        self.link.send(worker_exit)
        return worker_exit.code

    def _may_be_replaced(self, process: Process) -> bool:
        """Return whether the launcher decides what follows the end of a worker; until then nothing is ended."""
        killed = os.WIFSIGNALED(process.status or 0) and os.WTERMSIG(process.status or 0) not in STOPS
        if self.live is None or not self.link.is_up or self.deadline is not None or not killed:
            return False
        self.live.lose(process.rank)
        return True

    def readable(self) -> dict[int, Process | None]:
        """Return the descriptors to read: pipes with their processes, and pipes of start and replacement."""
        self.logs.is_linked = self.link.is_synced
        others = self.worker_start.descriptors() + ([self.live.reports] if self.live is not None else [])
        return {**self.group.readable(), **dict.fromkeys(others)}

    def start_workers(self) -> None:
        """Go on with the start of workers, and with that of others in the places of lost ones.

        Raises:
            OSError: a process could not be made.
        """
        cold_reason = self.worker_start.step(self.group)
        if cold_reason:
            self.link.send(Cold(why=cold_reason))
        if self.live is not None and self.deadline is None:
            self.worker_start.keep_warm()
            for rank in list(self.live.missing):
                self._replace(rank, self.live)

    def _replace(self, rank: int, live: Live) -> None:
        """Start a worker in the place of a lost one, as soon as nothing of that is left."""
        running = [process.pid for process in self.group.running() if process.rank == rank]
        if running:
            processes.send(running, signal.SIGKILL)  # frozen, or cut off: it is not to write any more
            return
        if self.worker_start.is_importing():
            return
        for process in self.group.processes:
            if process.rank == rank:
                end_session(process.pid, self.run.token, self.run.helpers)
        is_warm = self.run.fork_servers.server is not None
        if not self.worker_start.start_again(rank, live.environment(), self.group):
            return  # as soon as there is another fork server
        live.missing.remove(rank)
        self.ends.forget(rank)
        if self.worker_start.modules and not is_warm:
            self.link.send(Cold(why=self.run.fork_servers.cold_reason))

    def conclude(self) -> None:
        """Take the next step of ending the attempt, unless a worker is running or may be replaced."""
        now = time.monotonic()
        if self.live is not None and self.live.is_open:
            return
        if self.group.running() or self.worker_start.waiting:
            if self.deadline is not None and now >= self.deadline:
                self._close(must_kill=True)
            return
        self.end()
        strays = self.run.find_strays()
        if not strays:
            self._close()
        elif self._stray_deadline is None:
            self._stray_deadline = now + STRAY_GRACE_S
            processes.send(strays, signal.SIGTERM)
        elif now >= self._stray_deadline:
            self._close(must_kill=True)

    def _close(self, must_kill: bool = False) -> None:
        """Kill what has not ended when it was asked to, if there is something, and record the end."""
        self._is_killing = must_kill
        left_behind = self.run.kill() if must_kill else 0
        for process in self.group.collect():
            self._report_exit(process)
        self.group.close()
        if self.live is not None:
            self.live.close()
            self.live = None
        facts: dict[str, Any] = {
            "left": left_behind,
            "exits": self.ends.exits,
            "outputs": work.summary(self.run.folder, self.run.outputs),
            "met": self.rendezvous_port.opened,
            **self.logs.losses(is_linked=self.link.is_up),
        }
        record = AttemptStopped(**facts, segments=self.logs.segments())
        unrecorded = ""
        try:
            write_reserved(os.path.join(self.folder, EXIT_RECORD), frames.encode(record))
        except OSError as exc:
            unrecorded = f"exit record not written: {exc.strerror}"
        self.stopped = AttemptStopped(**facts, record=unrecorded)

    def queue_output(self) -> None:
        """Queue output that was not sent yet, as much as the link can take, and then the message about the end."""
        if not self.link.is_synced:
            return
        is_all = self.logs.feed(self.link)
        self.metrics.feed(self.link)
        if self.stopped is not None and not self.is_end_sent and is_all:
            self.link.send(self.stopped)
            self.is_end_sent = True

    def rewind(self, offsets: dict[str, int]) -> None:
        """Send a new link the rest of each log from the offsets that it reports, and the end again if there was one."""
        self.logs.rewind(offsets)
        self.metrics.sent = 0
        self.is_end_sent = False
