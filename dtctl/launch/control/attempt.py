"""Attempt of a run: handling of the nodes' messages from the start of the workers to the end of the last one.

The first failure of any worker ends the attempt on all nodes.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

from dtctl import names
from dtctl.launch.control.attempt_nodes import AttemptNodes, AttemptOutcome
from dtctl.launch.control.deadlines import AttemptDeadlines
from dtctl.launch.control.failure import describe_failure
from dtctl.launch.control.hang import HangMonitor
from dtctl.launch.control.link import build_refusal_error
from dtctl.launch.control.lost_workers import LostWorkerHandler, build_worker_failure
from dtctl.launch.control.node_sessions import NodeSessions
from dtctl.launch.control.progress import build_worker_standings
from dtctl.launch.control.session import Content, LinkLost, NodeMessage, OutputChunk, SessionFailed
from dtctl.launch.records.events import (
    NodeChanged,
    NodeOutputs,
    Note,
    OutputLine,
    ResumeConfirmed,
    RunResumed,
    SnapshotBegun,
    WorkerExited,
)
from dtctl.plan.model import Plan
from dtctl.supervisor.frames import AGENT, METRICS
from dtctl.supervisor.messages.attempt import (
    AttemptStarted,
    AttemptStopped,
    LiveReport,
    LogGap,
    MetricsBegin,
    Pong,
    PreloadSkipped,
    ProgressReport,
    StacksEnd,
    StopRequested,
    WorkerExit,
    WorkerProgress,
    WorkerStack,
)
from dtctl.supervisor.messages.base import Refusal

if TYPE_CHECKING:
    from dtctl.launch.control.node_pool import NodePool
    from dtctl.launch.control.worker_replacement import WorkerReplacement


class Attempt:
    """State of an attempt, which changes message by message."""

    def __init__(
        self,
        gang: NodeSessions,
        plan: Plan,
        link_timeout_s: float,
        *,
        hang_monitor: HangMonitor,
        healing: WorkerReplacement | None = None,
        pool: NodePool | None = None,
        keeps_nodes: bool = False,
        under_way: bool = False,
        confirms_silence: bool = False,
    ) -> None:
        """Watch an attempt that starts now, or already runs (`under_way`); with `healing`, lost workers are replaced.

        With `keeps_nodes`, nodes continue when the link is lost, and are called again.
        """
        self.gang = gang
        self.hang_monitor = hang_monitor
        self.nodes = AttemptNodes(
            gang, plan, link_timeout_s, hang_monitor, keeps_nodes=keeps_nodes, under_way=under_way
        )
        self.losses = LostWorkerHandler(self.nodes, healing=healing, pool=pool)
        self.deadlines = AttemptDeadlines(self.nodes, self.losses, confirms_silence=confirms_silence)
        self.failed_ranks: set[int] = set()
        """Ranks that have ended with an error of their own."""
        self.newest_snapshot_step = 0
        """Step of the newest snapshot that workers have reported."""
        self.resume_events: set[type[RunResumed | ResumeConfirmed]] = set()
        """Types of the events that were emitted in this attempt."""

    def handle(self, message: NodeMessage) -> None:
        """Act on one message of a node that still belongs to the attempt."""
        name, content = message.session.name, message.content
        if self.losses.pool is not None and self.losses.pool.has_session(message.session):
            self.losses.handle_pool_message(self.losses.pool, message)
            return
        if isinstance(content, OutputChunk):
            self._on_log(name, content.rank, content.payload)
            return
        if name in self.nodes.open and message.session is self.gang.sessions.get(name):
            self._handle_node_message(name, content)

    def _handle_node_message(self, name: str, content: Content) -> None:
        match content:
            case AttemptStarted():
                self._on_started(name, content.interface)
            case WorkerExit() | AttemptStopped() if not self._concerns_own_workers(name, content):
                self.losses.handle_node_loss(name, "it sent a report about a worker that does not run there")
            case WorkerExit():
                self._on_exit(name, content)
            case LiveReport() if content.rank in self.nodes.ranks[name]:
                self.losses.run_replacement_step(lambda healing: self.losses.handle_live_report(healing, content))
            case AttemptStopped():
                self._on_stopped(name, content)
            case PreloadSkipped() if name not in self.nodes.cold_nodes:
                self.nodes.cold_nodes.add(name)
                self.gang.emit(Note(node=name, text=f"workers start without preloaded modules: {content.why}"))
            case MetricsBegin() if self._has_metrics(name):
                self.gang.logs.restart_metrics_copy(name)
            case Refusal():
                self.losses.fail(name, str(build_refusal_error(content, name)), exit_code=None)
                self.nodes.give_up_node(name, state="failed")
            case LinkLost():
                self.losses.handle_node_loss(name, content.stderr or "the link was lost")
            case SessionFailed():
                self.losses.handle_node_loss(name, str(content.error) or "the link was lost")
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
        """Return whether this node has the worker that writes metrics.jsonl."""
        return 0 in self.nodes.ranks.get(name, ())

    def _on_log(self, name: str, rank: int, payload: bytes) -> None:
        nodes = self.nodes
        nodes.moved_at = self.hang_monitor.printed_at = time.monotonic()
        if rank == METRICS and not self._has_metrics(name):
            return
        # A printed line may imitate the prefix of another worker.
        if rank != METRICS and rank not in nodes.ranks.get(name, ()):
            rank = AGENT
        for text in self.gang.logs.write(name, rank, payload):
            # After SIGTERM, torchrun prints a traceback that explains nothing.
            if rank != AGENT or nodes.stop_deadline is None:
                self.gang.emit(OutputLine(node=name, rank=rank, text=text))
        refusal = self.gang.logs.pop_write_refusal()
        if refusal is not None:
            self.gang.emit(Note(node=name, text=f"output is displayed but no longer saved on this machine: {refusal}"))
        # Metrics come from a step in which all workers took part, and torchrun's agents start all workers together, so
        # output of one worker shows that the silent nodes run, too. Output from before the start of the workers belongs
        # to the previous attempt.
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
            text = f"{stopped.log_bytes_unstored:,} bytes of output did not fit on its disk and were only sent here"
            self.gang.emit(Note(node=name, text=text))
        if stopped.outputs is not None:
            summary = stopped.outputs
            self.nodes.outcome.outputs[name] = NodeOutputs(
                folder=summary.folder, files=summary.files, bytes=summary.bytes
            )
        self.nodes.outcome.is_unmet = self.nodes.outcome.is_unmet or stopped.met is False
        if stopped.gone:
            self.nodes.outcome.already_ended.append(name)
        self.gang.emit(NodeChanged(node=name, state="stopped", left=stopped.left))
        if stopped.record:
            self.gang.emit(Note(node=name, text=stopped.record))

    def _on_exit(self, name: str, worker: WorkerExit) -> None:
        if (name, worker.rank) in self.nodes.ended_workers:
            return  # The summary at the end repeats each exit, in case its first message was lost.
        self.gang.emit(
            WorkerExited(
                node=name, rank=worker.rank, exit_code=worker.code, signal=worker.signal, killed=worker.killed or None
            )
        )
        if self.losses.replace_ended_worker(name, worker):
            return
        self.nodes.ended_workers.add((name, worker.rank))
        self.nodes.moved_at = time.monotonic()
        if not worker.code:
            self.hang_monitor.record_worker_end(worker.rank)
            self.losses.abort_replacement_without(name, worker.rank)
            return
        if worker.killed and self.nodes.stop_deadline is not None:
            return  # dtctl killed the worker itself, because the attempt has ended.
        if not worker.told:
            self.failed_ranks.add(worker.rank)
        if self.nodes.is_end_due_to_pause():
            self.nodes.end_after_pause()
        elif self.nodes.outcome.stopped_by is None:
            failure = build_worker_failure(name, worker)
            subject = f"rank {worker.rank} on {name}" if worker.rank >= 0 else name
            end = f"{subject} {describe_failure(failure)}"
            self.losses.abort_replacement(f"{end}, meanwhile")
            self.nodes.outcome.failures.append(failure)
            # This is not yet the failure of the attempt: the first one is determined when all workers have ended.
            self.nodes.stop_others("a worker was told to stop" if worker.code == names.REQUEUE_EXIT else end)

    def _on_progress(self, name: str, content: Content) -> None:
        """Act on a node's report about the progress of its workers."""
        if isinstance(content, Pong | ProgressReport):
            reports = [report for report in content.workers if report.rank in self.nodes.ranks[name]]
            before_stop = isinstance(content, ProgressReport) and content.before_stop
            self.hang_monitor.update(build_worker_standings(name, reports), node=name, before_stop=before_stop)
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
            self.hang_monitor.record_node_stacks(name)

    def _emit_snapshots(self) -> None:
        """Emit each snapshot once; the previous attempt emitted the one that this attempt resumed from."""
        for worker in self.hang_monitor.workers.values():
            if worker.saved > max(worker.first, self.newest_snapshot_step):
                self.newest_snapshot_step = worker.saved
                self.gang.emit(SnapshotBegun(step=worker.saved))

    def _emit_resume(self, report: WorkerProgress) -> None:
        """Emit a worker's report of a resume from a snapshot, once."""
        for told, kind in ((report.resumed, RunResumed), (report.confirmed, ResumeConfirmed)):
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
