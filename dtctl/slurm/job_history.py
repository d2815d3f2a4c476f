"""History of a job in plain mode, from its own log and its workers' output, as events of the run.

The launcher inside of a job records this itself, and mirror.py copies it; what is read here then is how the batch file
ended. So are jobs of the versions that had a loop in the batch file (before 2026-11-27).
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
from dtctl.launch.control.culprit import first_failure
from dtctl.launch.control.failure import AGENT, Failure
from dtctl.launch.records.events import (
    AttemptRunning,
    AttemptStarting,
    Emit,
    Event,
    NodeChanged,
    NodesAllocated,
    OutputLine,
    Restarting,
    WorkerExited,
)  # fmt: skip
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import BEGUN_FILE, METRICS, Logs
from dtctl.launch.records.run_writer import RunWriter, write_private
from dtctl.slurm import batchlog
from dtctl.slurm.job_files import JobFiles, Part
from dtctl.slurm.job_output import by_rank
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.mirror import Mirror

ERROR_MARK: Final = "dtctl: error: "
"""Prefix of a line of the batch file with the reason why it could not start the workers."""


@dataclass(slots=True, kw_only=True)
class PlainAttempt:
    """One start of the workers, from the job's log."""

    number: int
    failures: list[Failure] = field(default_factory=list)
    is_aborted: bool = False
    """True if srun ends what is left of it; tasks that its signals end from then on have not failed."""
    taken_back: str = ""
    """Reason why Slurm ended the job, or the batch file had it requeued."""
    exit_code: int | None = None
    """Exit code of all its tasks together; 0: each succeeded. None before that."""

    def apply(self, at: float, event: batchlog.Event, *, workers_apart: bool) -> None:
        """Take an event into account that belongs to the attempt.

        Args:
            at: when it was, in seconds since the epoch.
            event: of the log.
            workers_apart: whether each worker is a task of its own (kind direct).
        """
        match event:
            case batchlog.Aborted():
                self.is_aborted = bool(self.failures)
            case batchlog.Ended() if not (self.is_aborted and event.signal in (signal.SIGTERM, signal.SIGKILL)):
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
            case batchlog.TakenBack():
                self.taken_back = self.taken_back or event.reason  # a requeue by the script logs this, too
            case batchlog.StepEnded():
                self.exit_code = event.exit_code


class JobHistory:
    """One job, from its first attempt to the newest."""

    def __init__(self, record: RunWriter, ref: JobRef, files: JobFiles, mirror: Mirror, emit: Emit) -> None:
        """Take in what earlier followers of this run have copied, and emitted.

        Args:
            record: of the run.
            ref: the job.
            files: copies of its files.
            mirror: of the launcher inside of the job, if it has one: then that takes precedence.
            emit: takes what is new.
        """
        self.record = record
        self.ref = ref
        self.files = files
        self.mirror = mirror
        self.emit = emit
        self.logs = Logs(record)
        self.attempt: PlainAttempt | None = None
        """The newest one."""
        self.nodes: list[str] = []
        self.all_nodes: set[str] = set()
        """All nodes that the job was ever given."""
        self.is_taken_back = False
        """True if the newest start of the job was taken back by Slurm, or by its batch file."""
        self.script_code: int | None = None
        self.script_ended_at = 0.0
        """Time when that was read."""
        self.launch_s: float | None = None
        self._now = record.info().started
        """Time of the newest event, in seconds since the epoch, so that all readers have the same ledger."""
        self.ledger = Ledger(lambda: self._now, begun=self._now)
        self._silent_nodes: set[str] = set()
        """Nodes without any output of workers so far, which may still be at the rendezvous."""
        self._is_replay = True
        """True if events are those of an earlier follower."""
        for at, event in files.copied_events():
            self.apply(at, event)
        self._is_replay = False
        if (record.folder / BEGUN_FILE).exists():
            self.logs.rejoin()

    @property
    def number(self) -> int:
        """Number of the newest attempt; -1 before the first one."""
        return self.mirror.progress.attempt if self.attempt is None else self.attempt.number

    @property
    def taken_back(self) -> str:
        """Return why Slurm, or the batch file, has taken the job back; empty when neither has."""
        return self.mirror.requeue_reason if self.attempt is None else self.attempt.taken_back

    def give_nodes(self, nodes: list[str]) -> None:
        """Note the nodes that the job has now; none: they are not known."""
        self.nodes = nodes or self.nodes
        self.all_nodes.update(self.nodes)

    # -- output -----------------------------------------------------------------------------------------------------

    def read_output(self, arrived: dict[str, Part], *, before: int | None = None) -> None:
        """Take in what has arrived of the workers' files; `before`: only of attempts before this one."""
        first = self.nodes[0] if self.nodes else ""
        for name in sorted(arrived, key=_attempt_of):
            if before is not None and _attempt_of(name) >= before:
                continue
            offset, data = arrived.pop(name)
            if name == names.METRICS_FILE:
                if offset == 0:
                    self.logs.begin_metrics(first)
                self.logs.write(first, METRICS, data)
                for silent in sorted(self._silent_nodes):  # all take part in a step
                    self._hear(silent)
                continue
            _, _, node, file = Path(name).parts
            if data:
                self._hear(node)
            for rank, chunk in by_rank(file, data):
                for line in self.logs.write(node, rank, chunk):
                    self.emit(OutputLine(node=node, rank=rank, text=line))

    def _hear(self, node: str) -> None:
        """A node's workers have printed something, or taken a step."""
        if node in self._silent_nodes:
            self._silent_nodes.discard(node)
            self.emit(NodeChanged(node=node, state="running"))

    # -- events -----------------------------------------------------------------------------------------------------

    def apply(self, at: float, event: batchlog.Event) -> None:
        """Act on an event of the job's log; `at`: its time, in seconds since the epoch."""
        if isinstance(event, batchlog.Start):
            self._on_start(event)
        elif isinstance(event, batchlog.Begun):
            self.is_taken_back, self.script_code = False, None
        elif isinstance(event, batchlog.Requeued) or (isinstance(event, batchlog.TakenBack) and self.attempt is None):
            self.is_taken_back = True
            if isinstance(event, batchlog.TakenBack):
                self.mirror.requeue_reason = self.mirror.requeue_reason or event.reason  # a requeue logs this, too
        elif isinstance(event, batchlog.ScriptEnded):
            self.script_code, self.script_ended_at = event.exit_code, time.monotonic()
        elif self.attempt is not None and getattr(event, "attempt", self.number) == self.number:
            self.attempt.apply(at, event, workers_apart=self.ref.workers_apart)
            if isinstance(event, batchlog.StepEnded):
                self._on_step_ended(event)
            elif isinstance(event, batchlog.Ended) and event.exit_code is not None:
                rank = event.task if self.ref.workers_apart and event.task is not None else AGENT
                self._tell(
                    WorkerExited(time=at, node=event.node, rank=rank, exit_code=event.exit_code, signal=event.signal)
                )

    def _count_until(self, at: float, phase: str) -> None:
        """Have the ledger count time from then on to a phase; the clocks of two nodes may differ."""
        self._now = max(self._now, at)
        self.ledger.enter(phase)

    def close_ledger(self, at: float, *, succeeded: bool) -> None:
        """The job is over."""
        self._count_until(at, "stop")
        self.ledger.close(succeeded=succeeded)

    def _on_start(self, event: batchlog.Start) -> None:
        if self.attempt is not None:
            first, taken_back = self.first_failure(), self.attempt.taken_back
            if first is not None and not taken_back:
                reason = failures.describe(first)
                cause = Restarting(reason=reason, node=first.node, rank=first.rank, exit_code=first.exit_code)
            else:
                lost = first if first is not None and first.exit_code is None else None
                cause = Restarting(reason=taken_back or "Slurm requeued it", node=lost.node if lost else None)
            of = event.attempt + self.ref.max_attempts
            self._tell(replace(cause, time=event.time, attempt=event.attempt, of=of, wait_s=0.0))
            self._count_until(event.time, "restart")
        self.attempt = PlainAttempt(number=event.attempt)
        self.script_code = None
        self.ledger.attempts = event.attempt + 1
        self._count_until(event.time, "start")
        self.ledger.started()
        self.launch_s = self.launch_s or max(0.0, event.time - self.record.info().started)
        self.give_nodes(list(event.nodes))
        if self._is_replay:
            return
        self.logs.begin_attempt()
        plan = self._plan_of(event)
        self._tell(
            AttemptStarting(
                time=event.time,
                attempt=event.attempt,
                rendezvous=event.rendezvous,
                world_size=plan.get("world_size"),
            )
        )
        self._tell(NodesAllocated(time=event.time, nodes=tuple(self.nodes)))
        self._silent_nodes = set(self.nodes)
        for node in self.nodes:
            self._tell(NodeChanged(time=event.time, node=node, state="started"))
        self._tell(AttemptRunning(time=event.time, attempt=event.attempt, launch_s=round(self.launch_s, 3)))

    def _plan_of(self, event: batchlog.Start) -> dict[str, Any]:
        """The run's plan, with the nodes that Slurm has given it: as a launch over SSH records it for each attempt."""
        plan = self.record.plan()
        nodes = plan.get("nodes", [])
        if len(nodes) != len(self.nodes):
            return plan
        address, _, port = event.rendezvous.rpartition(":")
        for node, name in zip(nodes, self.nodes, strict=True):
            node |= {"name": name, "address": name}
        plan |= {"attempt": event.attempt, "rendezvous": {**plan["rendezvous"], "address": address, "port": int(port)}}
        with contextlib.suppress(LaunchError):  # a full disk
            write_private(self.record.folder / names.PLAN_FILE, json.dumps(plan, indent=1) + "\n")
        return plan

    def _on_step_ended(self, event: batchlog.StepEnded) -> None:
        self._count_until(event.time, "stop")
        if event.exit_code or self._is_replay:
            return  # srun reports those that failed
        for node in self.record.plan().get("nodes", []):
            first, slots = node.get("first_rank", 0), node.get("slots", 0)
            for rank in range(first, first + slots) if self.ref.workers_apart else (AGENT,):
                self._tell(WorkerExited(time=event.time, node=node["name"], rank=rank, exit_code=0))

    def first_failure(self) -> Failure | None:
        """Return what the newest attempt has failed of; None when it has not."""
        if self.mirror.has_begun:
            return self.mirror.failure()
        failure = first_failure(self.attempt.failures, (), self.logs) if self.attempt is not None else None
        if failure is None or not failure.log or Path(failure.log).is_file():
            return failure
        summary = failure.summary or job_error(self.files.read_log())
        return replace(failure, log=str(self.files.job_log), summary=summary)

    def _tell(self, event: Event) -> None:
        """Emit an event at the time that it has; not one that an earlier follower has emitted."""
        if not self._is_replay:
            self.emit(event)


def job_error(log: str) -> str:
    """Return the batch file's error message if it could not start the workers; empty without one."""
    marks = [line.removeprefix(ERROR_MARK) for line in log.splitlines() if line.startswith(ERROR_MARK)]
    return marks[-1] if marks else ""


def _attempt_of(name: str) -> int:
    """Return the attempt that a file of the job belongs to; -1 of one that all share."""
    parts = Path(name).parts
    return int(parts[1].partition("-")[2]) if len(parts) > 1 else -1
