"""History of a job in plain mode, as events of the run, from the job's log and its workers' output.

The launcher inside of a job records its history itself, and record_sync.py copies those records; this module then reads
only the end of the batch file. Jobs of versions before 2026-11-27, which had a loop in the batch file, are read like
plain mode.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from dtctl import names
from dtctl.errors import LaunchError
from dtctl.launch.control import failure as failures
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.first_failure import find_first_failure
from dtctl.launch.records.events import (
    AttemptRestarting,
    AttemptRunning,
    AttemptStarting,
    Emit,
    Event,
    NodeChanged,
    NodesAllocated,
    OutputLine,
    WorkerExited,
)  # fmt: skip
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import BEGUN_FILE, RunLogs
from dtctl.launch.records.run_writer import RunWriter
from dtctl.slurm import batchlog
from dtctl.slurm.job_files import JobFiles, Part
from dtctl.slurm.job_output import split_by_rank
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.record_sync import RecordSync
from dtctl.supervisor.frames import AGENT, METRICS

ERROR_MARK: Final = "dtctl: error: "
"""Prefix of the line in which the batch file gives the reason why it could not start the workers."""


@dataclass(slots=True, kw_only=True)
class PlainAttempt:
    """Attempt of the workers, from the job's log."""

    number: int
    failures: list[Failure] = field(default_factory=list)
    is_aborted: bool = False
    """True if srun ends the remaining tasks; tasks that its signals end do not count as failed."""
    taken_back: str = ""
    """Reason why Slurm ended the job, or why the batch file requeued it."""
    exit_code: int | None = None
    """Exit code of all tasks of the attempt together, 0 if each succeeded; None while they run."""

    def apply(self, at: float, event: batchlog.Event, *, workers_apart: bool) -> None:
        """Update the attempt with one of its events.

        Args:
            at: time of the event, in seconds since the epoch.
            event: event of the log.
            workers_apart: whether each worker is a task of its own (kind direct).
        """
        match event:
            case batchlog.TasksAborted():
                self.is_aborted = bool(self.failures)
            case batchlog.TaskFailed() if not (self.is_aborted and event.signal in (signal.SIGTERM, signal.SIGKILL)):
                self.failures.append(
                    Failure(
                        node=event.node,
                        rank=event.task if workers_apart else None,
                        exit_code=event.exit_code,
                        signal=event.signal,
                        time=at,
                        node_reason=event.reason,
                    )
                )
            case batchlog.JobTerminated():
                self.taken_back = self.taken_back or event.reason  # a requeue by the script also logs this event
            case batchlog.JobStepEnded():
                self.exit_code = event.exit_code


class JobHistory:
    """History of a job, from its first attempt to the newest."""

    def __init__(self, record: RunWriter, ref: JobRef, files: JobFiles, mirror: RecordSync, emit: Emit) -> None:
        """Read the events that earlier followers of this run have copied and emitted.

        Args:
            record: record of the run.
            ref: the job.
            files: copies of the job's files.
            mirror: records of the launcher inside of the job, if it has one; these take precedence.
            emit: called with each new event.
        """
        self.record = record
        self.ref = ref
        self.files = files
        self.mirror = mirror
        self.emit = emit
        self.logs = RunLogs(record)
        self.attempt: PlainAttempt | None = None
        """Attempt that began last; None before the first one."""
        self.nodes: list[str] = []
        self.all_nodes: set[str] = set()
        """All nodes that the job has had."""
        self.is_taken_back = False
        """True if Slurm or the batch file has ended the newest start of the job to requeue it."""
        self.script_code: int | None = None
        self.script_ended_at = 0.0
        """Time when the end of the batch script was read, by the monotonic clock."""
        self.launch_s: float | None = None
        self._now = record.info().started
        """Time of the newest event, in seconds since the epoch, so that all readers have the same ledger."""
        self.ledger = Ledger(lambda: self._now, begun=self._now)
        self._silent_nodes: set[str] = set()
        """Nodes whose workers have printed nothing so far; they may still be at the rendezvous."""
        self._is_replay = True
        """True while events of an earlier follower are read."""
        for at, event in files.copied_events():
            self.apply(at, event)
        self._is_replay = False
        if (record.folder / BEGUN_FILE).exists():
            self.logs.continue_attempt_logs()

    @property
    def number(self) -> int:
        """Number of the newest attempt; -1 before the first one."""
        return self.mirror.progress.attempt if self.attempt is None else self.attempt.number

    @property
    def requeue_cause(self) -> str:
        """Return the reason why Slurm or the batch file has requeued the job; empty if neither has."""
        return self.mirror.requeue_reason if self.attempt is None else self.attempt.taken_back

    def set_job_nodes(self, nodes: list[str]) -> None:
        """Note the nodes that the job has now; an empty list means that they are not known."""
        self.nodes = nodes or self.nodes
        self.all_nodes.update(self.nodes)

    # -- output -----------------------------------------------------------------------------------------------------

    def read_output(self, arrived: dict[str, Part], *, before: int | None = None) -> None:
        """Process new parts of the workers' files; `before` limits them to attempts before this number."""
        first = self.nodes[0] if self.nodes else ""
        for name in sorted(arrived, key=_attempt_of):
            if before is not None and _attempt_of(name) >= before:
                continue
            offset, data = arrived.pop(name)
            if name == names.METRICS_FILE:
                if offset == 0:
                    self.logs.restart_metrics_copy(first)
                self.logs.write(first, METRICS, data)
                for silent in sorted(self._silent_nodes):  # all nodes take part in a step
                    self._mark_node_running(silent)
                continue
            _, _, node, file = Path(name).parts
            if data:
                self._mark_node_running(node)
            for rank, chunk in split_by_rank(file, data):
                for line in self.logs.write(node, rank, chunk):
                    self.emit(OutputLine(node=node, rank=rank, text=line))

    def _mark_node_running(self, node: str) -> None:
        """Mark a node as running, since its workers have printed something or completed a step."""
        if node in self._silent_nodes:
            self._silent_nodes.discard(node)
            self.emit(NodeChanged(node=node, state="running"))

    # -- events -----------------------------------------------------------------------------------------------------

    def apply(self, at: float, event: batchlog.Event) -> None:
        """Handle an event of the job's log; `at` is its time in seconds since the epoch."""
        if isinstance(event, batchlog.WorkersStarted):
            self._on_start(event)
        elif isinstance(event, batchlog.BatchScriptStarted):
            self.is_taken_back, self.script_code = False, None
        elif isinstance(event, batchlog.JobRequeued) or (
            isinstance(event, batchlog.JobTerminated) and self.attempt is None
        ):
            self.is_taken_back = True
            if isinstance(event, batchlog.JobTerminated):
                # A requeue also logs this event.
                self.mirror.requeue_reason = self.mirror.requeue_reason or event.reason
        elif isinstance(event, batchlog.BatchScriptEnded):
            self.script_code, self.script_ended_at = event.exit_code, time.monotonic()
        elif self.attempt is not None and getattr(event, "attempt", self.number) == self.number:
            self.attempt.apply(at, event, workers_apart=self.ref.workers_apart)
            if isinstance(event, batchlog.JobStepEnded):
                self._on_step_ended(event)
            elif isinstance(event, batchlog.TaskFailed) and event.exit_code is not None:
                rank = event.task if self.ref.workers_apart and event.task is not None else AGENT
                self._emit_new_event(
                    WorkerExited(time=at, node=event.node, rank=rank, exit_code=event.exit_code, signal=event.signal)
                )

    def _count_until(self, at: float, phase: str) -> None:
        """Set the ledger's phase from a time on; time never goes back, though the clocks of two nodes may differ."""
        self._now = max(self._now, at)
        self.ledger.enter(phase)

    def close_ledger(self, at: float, *, succeeded: bool) -> None:
        """Close the ledger at the end of the job."""
        self._count_until(at, "stop")
        self.ledger.close(succeeded=succeeded)

    def _on_start(self, event: batchlog.WorkersStarted) -> None:
        if self.attempt is not None:
            first, taken_back = self.first_failure(), self.attempt.taken_back
            if first is not None and not taken_back:
                reason = failures.describe_failure(first)
                cause = AttemptRestarting(reason=reason, node=first.node, rank=first.rank, exit_code=first.exit_code)
            else:
                lost = first if first is not None and first.exit_code is None else None
                cause = AttemptRestarting(reason=taken_back or "Slurm requeued it", node=lost.node if lost else None)
            of = event.attempt + self.ref.max_attempts
            self._emit_new_event(replace(cause, time=event.time, attempt=event.attempt, of=of, wait_s=0.0))
            self._count_until(event.time, "restart")
        self.attempt = PlainAttempt(number=event.attempt)
        self.script_code = None
        self.ledger.attempts = event.attempt + 1
        self._count_until(event.time, "start")
        self.ledger.record_processes_started()
        self.launch_s = self.launch_s or max(0.0, event.time - self.record.info().started)
        self.set_job_nodes(list(event.nodes))
        if self._is_replay:
            return
        self.logs.begin_attempt()
        plan = self._plan_of(event)
        self._emit_new_event(
            AttemptStarting(
                time=event.time,
                attempt=event.attempt,
                rendezvous=event.rendezvous,
                world_size=plan.get("world_size"),
            )
        )
        self._emit_new_event(NodesAllocated(time=event.time, nodes=tuple(self.nodes)))
        self._silent_nodes = set(self.nodes)
        for node in self.nodes:
            self._emit_new_event(NodeChanged(time=event.time, node=node, state="started"))
        self._emit_new_event(AttemptRunning(time=event.time, attempt=event.attempt, launch_s=round(self.launch_s, 3)))

    def _plan_of(self, event: batchlog.WorkersStarted) -> dict[str, Any]:
        """Record the run's plan with the nodes from Slurm, as a launch over SSH does, and return it."""
        plan = self.record.plan()
        nodes = plan.get("nodes", [])
        if len(nodes) != len(self.nodes):
            return plan
        address, _, port = event.rendezvous.rpartition(":")
        for node, name in zip(nodes, self.nodes, strict=True):
            node |= {"name": name, "address": name}
        plan |= {"attempt": event.attempt, "rendezvous": {**plan["rendezvous"], "address": address, "port": int(port)}}
        with contextlib.suppress(LaunchError):  # the disk may be full
            self.record.write(names.PLAN_FILE, json.dumps(plan, indent=1) + "\n")
        return plan

    def _on_step_ended(self, event: batchlog.JobStepEnded) -> None:
        self._count_until(event.time, "stop")
        if event.exit_code or self._is_replay:
            return  # srun reports the tasks that failed
        for node in self.record.plan().get("nodes", []):
            first, slots = node.get("first_rank", 0), node.get("slots", 0)
            for rank in range(first, first + slots) if self.ref.workers_apart else (AGENT,):
                self._emit_new_event(WorkerExited(time=event.time, node=node["name"], rank=rank, exit_code=0))

    def first_failure(self) -> Failure | None:
        """Return the first failure of the newest attempt; None if it has not failed."""
        if self.mirror.has_begun:
            return self.mirror.failure()
        failure = find_first_failure(self.attempt.failures, (), self.logs) if self.attempt is not None else None
        if failure is None or not failure.log or Path(failure.log).is_file():
            return failure
        summary = failure.summary or find_job_error(self.files.read_log())
        return replace(failure, log=str(self.files.job_log), summary=summary)

    def _emit_new_event(self, event: Event) -> None:
        """Emit an event with its own time, unless an earlier follower has emitted it."""
        if not self._is_replay:
            self.emit(event)


def find_job_error(log: str) -> str:
    """Return the batch file's error message if it could not start the workers; empty if there is none."""
    marks = [line.removeprefix(ERROR_MARK) for line in log.splitlines() if line.startswith(ERROR_MARK)]
    return marks[-1] if marks else ""


def _attempt_of(name: str) -> int:
    """Return the attempt that a file of the job belongs to; -1 for a file that all attempts share."""
    parts = Path(name).parts
    return int(parts[1].partition("-")[2]) if len(parts) > 1 else -1
