"""Attempt of a run on one node: from its start until nothing of it is left. Stdlib only, Python 3.8."""

from __future__ import annotations

import os
import signal
import time

from dtctl import folders, node_facts
from dtctl.supervisor import environment, frames, processes, progress, run_workdir
from dtctl.supervisor.exit_cause import WorkerExits
from dtctl.supervisor.fork_server import ForkServers
from dtctl.supervisor.link import ControlLink
from dtctl.supervisor.messages.attempt import (
    AttemptStarted,
    AttemptStopped,
    Heal,
    PreloadSkipped,
    ProgressReport,
    StartAttempt,
    WorkerProgress,
)
from dtctl.supervisor.metrics import MetricsTail
from dtctl.supervisor.node_processes import NodeProcesses, StartedProcess
from dtctl.supervisor.output_log import RankLogs
from dtctl.supervisor.records import EXIT_RECORD, RECORD_BYTES, reserve_record_space, write_atomically, write_reserved
from dtctl.supervisor.rendezvous import RendezvousPort
from dtctl.supervisor.replacement_pipes import LIVE, LIVE_EPOCH, ReplacementPipes, end_session
from dtctl.supervisor.worker_start import WorkerStart

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that request an end: a worker that one of them ends does not count as lost."""
STRAY_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for processes that outlived the workers."""


class SupervisedRun:
    """A run on this node, over any number of attempts: its folder, and the processes that are part of it."""

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
        """Return the ids of the processes that serve the run and are not part of it."""
        # If the guard is killed, the new parent has other children, such as the node's services, and is no guard.
        guard = (self._guard,) if os.getppid() == self._guard else ()
        return frozenset((os.getpid(), *guard, *self.fork_servers.pids())) - {0}

    def find_strays(self) -> list[int]:
        """Return the ids of the run's processes that outlived its workers."""
        if self._adopts and not processes.has_children():
            return []  # A process that a worker left behind would now be a child of this process.
        return processes.find_run_processes(self.token, self.helpers)

    def kill(self) -> int:
        """Kill all processes of the run; return the number of those that remain."""
        return processes.kill_run_processes(self.token, self.helpers)

    def write_record(self, message: StartAttempt) -> None:
        """Record the supervisor of the run on this node, for any process that has to end it.

        Raises:
            OSError: the record cannot be written.
        """
        record = {
            "pid": os.getpid(),
            "identity": processes.read_process_identity(os.getpid()),
            "attempt": message.attempt,
            "keep": self.keep,
            "token": self.token,
            "origin": message.origin,
        }
        write_atomically(os.path.join(self.folder, processes.RECORD), frames.encode_message(record))

    def prepare_workers(self, message: StartAttempt, folder: str, interface: str) -> WorkerStart:
        """Write the node script that starts workers into a folder, and collect the workers' variables.

        Raises:
            OSError: the script cannot be written.
        """
        os.makedirs(folder, mode=0o700, exist_ok=True)
        script = os.path.join(folder, "node.sh")
        fd = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(message.script)
        env = environment.build_attempt_variables(message, self.folder, interface)
        workers = [environment.add_error_file(worker, env["DTCTL_PROGRESS"]) for worker in message.workers]
        env = {**environment.drop_step_variables(os.environ), **env, processes.TOKEN: self.token}
        return WorkerStart(
            self.fork_servers, message.preload, script, run_workdir.find_working_folder(self.folder), env, workers
        )

    def close(self) -> None:
        """End the fork servers, and remove the run's snapshots in memory."""
        self.fork_servers.close()
        folders.remove_folder_tree(folders.choose_memory_folder(self.folder))


class NodeAttempt:
    """The processes of one attempt on this node, with their start, their replacement and their end."""

    def __init__(self, message: StartAttempt, run: SupervisedRun, link: ControlLink) -> None:
        """Prepare everything that the workers need; `start` starts them.

        Raises:
            OSError: a file could not be written.
        """
        self.run = run
        self.link = link
        self.folder = os.path.join(run.folder, f"attempt-{message.attempt}")
        self.interface = node_facts.find_interface_towards(message.peer) if message.peer else ""
        self.worker_start = run.prepare_workers(message, self.folder, self.interface)
        self.progress_dir = self.worker_start.env["DTCTL_PROGRESS"]
        os.makedirs(self.progress_dir, mode=0o700, exist_ok=True)
        self.ends = WorkerExits(run.folder)
        self.rendezvous_port = RendezvousPort(message.meeting_port)
        reserve_record_space(os.path.join(self.folder, EXIT_RECORD), RECORD_BYTES)
        self.logs = RankLogs(self.folder, message.log_bytes)
        self.metrics = MetricsTail(run.folder)
        self.group = NodeProcesses(self.logs, message.split_ranks)
        self.live: ReplacementPipes | None = None
        if message.live:
            self.live = ReplacementPipes(os.path.join(self.folder, "live"), [worker.rank for worker in message.workers])
            self.worker_start.env[LIVE] = self.live.folder
            if message.live_epoch:
                self.worker_start.env[LIVE_EPOCH] = str(message.live_epoch)
                self.logs.skip_stored()
        self.deadline: float | None = None
        """Deadline of the SIGTERM phase, while the attempt is being ended."""
        self._stray_deadline: float | None = None
        self.is_stop_requested = False
        """True if the run is stopped on request."""
        self._is_killing = False
        """True if the processes of the attempt were sent SIGKILL."""
        self.stopped: AttemptStopped | None = None
        """Message about the end, which is sent after all output; None before the end."""
        self.is_end_sent = False

    def start(self) -> None:
        """Start the processes, or let a fork server prepare for that.

        Raises:
            OSError: a process could not be made.
        """
        self.worker_start.start(self.group)
        self.link.send(AttemptStarted(interface=self.interface))

    def read_progress(self) -> list[WorkerProgress]:
        """Return the progress of the workers that report it."""
        return progress.read_worker_progress(self.progress_dir) if self.stopped is None else []

    def end(self, at_once: bool = False) -> None:
        """Send SIGTERM to the started processes; `advance_end` kills them after the grace period, or at once."""
        if self.deadline is None and self.stopped is None:
            self.deadline = time.monotonic() + self.run.grace_s
            if self.live is not None:
                self.live.end()
            self.worker_start.cancel()
            # Only started processes get the signal: torchrun passes it on, and a worker needs its data loaders for the
            # last snapshot.
            processes.send_process_signal([process.pid for process in self.group.running()], signal.SIGTERM)
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

    def _report_exit(self, process: StartedProcess) -> int:
        """Report how a process ended, with the cause if the node has determined it; return its exit code."""
        worker_exit = self.ends.add(process, is_ending=self.deadline is not None, is_killing=self._is_killing)
        self.link.send(ProgressReport(workers=self.read_progress()))
        self.link.send(worker_exit)
        return worker_exit.code

    def _may_be_replaced(self, process: StartedProcess) -> bool:
        """Return whether the launcher decides about the end of a worker; until it has, no process is ended."""
        killed = os.WIFSIGNALED(process.status or 0) and os.WTERMSIG(process.status or 0) not in STOPS
        if self.live is None or not self.link.is_up or self.deadline is not None or not killed:
            return False
        self.live.mark_undecided(process.rank)
        return True

    def readable(self) -> dict[int, StartedProcess | None]:
        """Return the descriptors to read: pipes with their processes, and pipes of start and replacement."""
        self.logs.is_linked = self.link.is_synced
        others = self.worker_start.descriptors() + ([self.live.reports] if self.live is not None else [])
        return {**self.group.readable(), **dict.fromkeys(others)}

    def start_workers(self) -> None:
        """Continue the start of workers, and of replacements for lost ones.

        Raises:
            OSError: a process could not be made.
        """
        cold_reason = self.worker_start.step(self.group)
        if cold_reason:
            self.link.send(PreloadSkipped(why=cold_reason))
        if self.live is not None and self.deadline is None:
            self.worker_start.prepare_fork_server()
            for rank in list(self.live.missing):
                self._replace_worker(rank, self.live)

    def _replace_worker(self, rank: int, live: ReplacementPipes) -> None:
        """Start a worker that replaces a lost one, once no process of the lost one is left."""
        running = [process.pid for process in self.group.running() if process.rank == rank]
        if running:
            # The worker may be frozen or disconnected, and must not write any more.
            processes.send_process_signal(running, signal.SIGKILL)
            return
        if self.worker_start.is_importing():
            return
        for process in self.group.processes:
            if process.rank == rank:
                end_session(process.pid, self.run.token, self.run.helpers)
        is_warm = self.run.fork_servers.server is not None
        if not self.worker_start.restart_worker(rank, live.environment(), self.group):
            return  # The next call tries again with another fork server.
        live.missing.remove(rank)
        self.ends.drop_exit(rank)
        if self.worker_start.modules and not is_warm:
            self.link.send(PreloadSkipped(why=self.run.fork_servers.cold_reason))

    def advance_end(self) -> None:
        """Take the next step of ending the attempt, unless a worker is running or may be replaced."""
        now = time.monotonic()
        if self.live is not None and self.live.is_open:
            return
        if self.group.running() or self.worker_start.waiting:
            if self.deadline is not None and now >= self.deadline:
                self._close_attempt(must_kill=True)
            return
        self.end()
        strays = self.run.find_strays()
        if not strays:
            self._close_attempt()
        elif self._stray_deadline is None:
            self._stray_deadline = now + STRAY_GRACE_S
            processes.send_process_signal(strays, signal.SIGTERM)
        elif now >= self._stray_deadline:
            self._close_attempt(must_kill=True)

    def _close_attempt(self, must_kill: bool = False) -> None:
        """Kill the remaining processes if needed (`must_kill`), and record the end."""
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
            "outputs": run_workdir.summarize_outputs(self.run.folder, self.run.outputs),
            "met": self.rendezvous_port.opened,
            "requested": self.is_stop_requested,
            **self.logs.losses(is_linked=self.link.is_up),
        }
        record = AttemptStopped(**facts, segments=self.logs.segments())
        unrecorded = ""
        try:
            write_reserved(os.path.join(self.folder, EXIT_RECORD), frames.encode_message(record))
        except OSError as exc:
            unrecorded = f"exit record not written: {exc.strerror}"
        self.stopped = AttemptStopped(**facts, record=unrecorded)

    def queue_output(self) -> None:
        """Queue unsent output, up to the capacity of the link, and then the message about the end."""
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
