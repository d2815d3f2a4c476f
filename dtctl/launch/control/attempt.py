"""One attempt of a run: what nodes report of its workers, from their start to the last one's end.

The gang rule: the first failure anywhere ends the attempt everywhere.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

from dtctl import names
from dtctl.launch.control.attempt_nodes import AttemptNodes, AttemptOutcome
from dtctl.launch.control.deadlines import Deadlines
from dtctl.launch.control.failure import AGENT, describe
from dtctl.launch.control.gang import Gang
from dtctl.launch.control.hang import HangMonitor
from dtctl.launch.control.link import error_of
from dtctl.launch.control.losses import Losses, failure_of_worker
from dtctl.launch.control.progress import standings
from dtctl.launch.control.session import Content, LinkLost, NodeMessage, OutputChunk, SessionFailed
from dtctl.launch.records.events import (
    Confirmed,
    NodeChanged,
    Note,
    OutputLine,
    Outputs,
    Resumed,
    SnapshotBegun,
    WorkerExited,
)
from dtctl.launch.records.logs import METRICS
from dtctl.plan.model import Plan
from dtctl.supervisor.messages.attempt import (
    AttemptStopped,
    Cold,
    LiveReport,
    LogGap,
    MetricsBegin,
    Pong,
    ProgressReport,
    StacksEnd,
    Started,
    StopRequested,
    WorkerExit,
    WorkerProgress,
    WorkerStack,
)
from dtctl.supervisor.messages.base import Refusal

if TYPE_CHECKING:
    from dtctl.launch.control.healing import Healing
    from dtctl.launch.control.node_pool import NodePool


class Attempt:
    """One attempt, message by message."""

    def __init__(
        self,
        gang: Gang,
        plan: Plan,
        link_timeout_s: float,
        *,
        hang_monitor: HangMonitor,
        healing: Healing | None = None,
        pool: NodePool | None = None,
        keeps_nodes: bool = False,
        under_way: bool = False,
        confirms_silence: bool = False,
    ) -> None:
        """Watch an attempt that is started now, or is `under_way`; with `healing` lost workers are replaced.

        With `keeps_nodes` nodes continue when the link is lost, and are called again.
        """
        self.gang = gang
        self.hang_monitor = hang_monitor
        self.nodes = AttemptNodes(
            gang, plan, link_timeout_s, hang_monitor, keeps_nodes=keeps_nodes, under_way=under_way
        )
        self.losses = Losses(self.nodes, healing=healing, pool=pool)
        self.deadlines = Deadlines(self.nodes, self.losses, confirms_silence=confirms_silence)
        self.failed_ranks: set[int] = set()
        """Ranks that have ended with an error of their own."""
        self.newest_snapshot_step = 0
        """Step of the newest snapshot that workers have reported."""
        self.resume_events: set[type[Resumed | Confirmed]] = set()
        """Kinds that were emitted in this attempt."""

    def handle(self, message: NodeMessage) -> None:
        """Act on one message of a node that still belongs to the attempt."""
        name, content = message.session.name, message.content
        if self.losses.pool is not None and self.losses.pool.owns(message.session):
            self.losses.take_call(self.losses.pool, message)
            return
        if isinstance(content, OutputChunk):
            self._on_log(name, content.rank, content.payload)
            return
        if name in self.nodes.open and message.session is self.gang.sessions.get(name):
            self._act(name, content)

    def _act(self, name: str, content: Content) -> None:
        match content:
            case Started():
                self._on_started(name, content.interface)
            case WorkerExit() | AttemptStopped() if not self._concerns_own_workers(name, content):
                self.losses.lose(name, "it reported on a worker that does not run there")
            case WorkerExit():
                self._on_exit(name, content)
            case LiveReport() if content.rank in self.nodes.ranks[name]:
                self.losses.heal(lambda healing: self.losses.take_live_report(healing, content))
            case AttemptStopped():
                self._on_stopped(name, content)
            case Cold() if name not in self.nodes.cold_nodes:
                self.nodes.cold_nodes.add(name)
                self.gang.emit(Note(node=name, text=f"workers start without preloaded modules: {content.why}"))
            case MetricsBegin() if self._has_metrics(name):
                self.gang.logs.begin_metrics(name)
            case Refusal():
                self.losses.fail(name, str(error_of(content, name)), exit_code=None)
                self.nodes.give_up(name, state="failed")
            case LinkLost():
                self.losses.lose(name, content.stderr or "the link was lost")
            case SessionFailed():
                self.losses.lose(name, str(content.error) or "the link was lost")
            case _:
                self._on_other(name, content)

    def _on_other(self, name: str, content: Content) -> None:
        if isinstance(content, LogGap):
            self.gang.logs.skip(name, content.rank, content.bytes)
        elif isinstance(content, StopRequested):
            self.gang.emit(Note(node=name, text=f"the run is stopped by {content.by}"))
            if not self.gang.signals:
                self.gang.signals.append(signal.SIGTERM)
        else:
            self._on_progress(name, content)

    def _concerns_own_workers(self, name: str, content: WorkerExit | AttemptStopped) -> bool:
        """Return whether a node's message is about its own workers, or torchrun's agent there."""
        exits = content.exits if isinstance(content, AttemptStopped) else [content]
        return all(each.rank in self.nodes.ranks[name] | {AGENT} for each in exits)

    def _has_metrics(self, name: str) -> bool:
        """Return whether the worker that writes metrics.jsonl is on this node."""
        return 0 in self.nodes.ranks.get(name, ())

    def _on_log(self, name: str, rank: int, payload: bytes) -> None:
        nodes = self.nodes
        nodes.moved_at = self.hang_monitor.printed_at = time.monotonic()
        if rank == METRICS and not self._has_metrics(name):
            return
        if rank != METRICS and rank not in nodes.ranks.get(name, ()):  # a line can begin like one of another worker
            rank = AGENT
        for text in self.gang.logs.write(name, rank, payload):
            # torchrun's traceback of the SIGTERM it was sent explains nothing
            if rank != AGENT or nodes.stop_deadline is None:
                self.gang.emit(OutputLine(node=name, rank=rank, text=text))
        refusal = self.gang.logs.refusal()
        if refusal is not None:
            self.gang.emit(Note(node=name, text=f"output is displayed but no longer saved on this machine: {refusal}"))
        # Metrics come from a step that all workers have taken part in, and a worker prints once it has been started,
        # which torchrun's agents do together: the silent ones run, too. What comes before the workers is of the attempt
        # before.
        for node in sorted((nodes.silent_nodes & {name} if rank == AGENT else nodes.silent_nodes) - nodes.starting):
            nodes.silent_nodes.discard(node)
            self.gang.emit(NodeChanged(node=node, state="running"))

    def _on_started(self, name: str, interface: str | None) -> None:
        if name not in self.nodes.starting | self.nodes.joining:
            return
        self.nodes.starting.discard(name)
        self.nodes.joining.discard(name)
        self.gang.emit(NodeChanged(node=name, state="started", interface=interface or None))
        self.nodes.all_started = not self.nodes.starting

    def _on_stopped(self, name: str, stopped: AttemptStopped) -> None:
        for worker_exit in stopped.exits:
            self._on_exit(name, worker_exit)
        self.nodes.open.discard(name)
        self.nodes.outcome.left_behind[name] = stopped.left
        if stopped.log_bytes_lost:
            self.nodes.outcome.lost_output[name] = stopped.log_bytes_lost
        if stopped.log_bytes_unstored:
            text = f"{stopped.log_bytes_unstored:,} bytes of output found no room on its disk and were sent here only"
            self.gang.emit(Note(node=name, text=text))
        if stopped.outputs is not None:
            summary = stopped.outputs
            self.nodes.outcome.outputs[name] = Outputs(folder=summary.folder, files=summary.files, bytes=summary.bytes)
        self.nodes.outcome.is_unmet = self.nodes.outcome.is_unmet or stopped.met is False
        if stopped.gone:
            self.nodes.outcome.already_ended.append(name)
        self.gang.emit(NodeChanged(node=name, state="stopped", left=stopped.left))
        if stopped.record:
            self.gang.emit(Note(node=name, text=stopped.record))

    def _on_exit(self, name: str, worker: WorkerExit) -> None:
        if (name, worker.rank) in self.nodes.ended_workers:
            return  # repeated in the summary at the end, in case the first message was lost
        self.gang.emit(
            WorkerExited(
                node=name, rank=worker.rank, exit_code=worker.code, signal=worker.signal, killed=worker.killed or None
            )
        )
        if self.losses.is_replaced(name, worker):
            return
        self.nodes.ended_workers.add((name, worker.rank))
        self.nodes.moved_at = time.monotonic()
        if not worker.code:
            self.hang_monitor.worker_ended(worker.rank)
            self.losses.end_healing_without(name, worker.rank)
            return
        if worker.killed and self.nodes.stop_deadline is not None:
            return  # by dtctl itself, for whatever has ended the attempt
        if not worker.told:
            self.failed_ranks.add(worker.rank)
        if self.nodes.is_explained():
            self.nodes.end_for_absence()
        elif self.nodes.outcome.stopped_by is None:
            failure = failure_of_worker(name, worker)
            subject = f"rank {worker.rank} on {name}" if worker.rank >= 0 else name
            end = f"{subject} {describe(failure)}"
            self.losses.end_healing(f"{end}, meanwhile")
            self.nodes.outcome.failures.append(failure)
            # Not as the failure: which of those that end now was the first is known when all have.
            self.nodes.stop_others("a worker was told to stop" if worker.code == names.REQUEUE_EXIT else end)

    def _on_progress(self, name: str, content: Content) -> None:
        """Take a node's report about the progress of its workers."""
        if isinstance(content, Pong | ProgressReport):
            reports = [report for report in content.workers if report.rank in self.nodes.ranks[name]]
            before_stop = isinstance(content, ProgressReport) and content.before_stop
            self.hang_monitor.update(standings(name, reports), node=name, before_stop=before_stop)
            workers = self.hang_monitor.workers.values()
            steps = [worker.step for worker in workers]
            committed = [worker.committed for worker in workers]
            outcome = self.nodes.outcome
            outcome.committed_step = max([outcome.committed_step, *committed])
            outcome.first_step = max((worker.first for worker in workers), default=None)
            outcome.last_step = max([*steps, outcome.last_step or 0]) if steps else outcome.last_step
            self._emit_snapshots()
            for report in reports:
                self._emit_resume(report)
        elif isinstance(content, WorkerStack):
            if content.rank in self.hang_monitor.workers.keys() & self.nodes.ranks[name]:
                self.hang_monitor.add_stack(content)
        elif isinstance(content, StacksEnd):
            self.hang_monitor.node_finished(name)

    def _emit_snapshots(self) -> None:
        """Emit each snapshot once; the one that this attempt resumed from was emitted by the attempt before."""
        for worker in self.hang_monitor.workers.values():
            if worker.saved > max(worker.first, self.newest_snapshot_step):
                self.newest_snapshot_step = worker.saved
                self.gang.emit(SnapshotBegun(step=worker.saved))

    def _emit_resume(self, report: WorkerProgress) -> None:
        """Emit a worker's report of a resume from a snapshot, once."""
        for told, kind in ((report.resumed, Resumed), (report.confirmed, Confirmed)):
            if told is not None and kind not in self.resume_events:
                self.resume_events.add(kind)
                facts: dict[str, Any] = told.to_json()
                self.gang.emit(kind(**facts | {"why": tuple(told.why)}))

    def close(self) -> AttemptOutcome:
        """Return the outcome, once no node is open."""
        if self.losses.pool is not None:
            self.losses.pool.end()
            self.losses.pool.spares.close()
        leavers = [worker for worker in self.hang_monitor.left_early() if worker.rank not in self.failed_ranks]
        self.nodes.outcome.left_early = sorted(leavers, key=lambda worker: -worker.stale_s)
        return self.nodes.outcome
