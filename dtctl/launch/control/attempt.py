"""One attempt of a run: which workers have started, ended or hang, and which nodes are still waited for.

The gang rule: the first failure anywhere ends the attempt everywhere.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from dtctl import names
from dtctl.launch.control.failure import AGENT, Failure, describe
from dtctl.launch.control.gang import PING_S, Gang
from dtctl.launch.control.hang import HangMonitor
from dtctl.launch.control.link import error_of
from dtctl.launch.control.progress import Standing, standings
from dtctl.launch.control.session import Content, LinkLost, NodeMessage, OutputChunk, Session, SessionFailed
from dtctl.launch.records.events import (
    Confirmed,
    Hung,
    NodeChanged,
    Note,
    OutputLine,
    Outputs,
    Resumed,
    SnapshotBegun,
    Stopping,
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
    Stacks,
    StacksEnd,
    Started,
    StopAttempt,
    StopRequested,
    WorkerExit,
    WorkerProgress,
    WorkerStack,
)
from dtctl.supervisor.messages.base import Refusal

if TYPE_CHECKING:
    from dtctl.launch.control.healing import Healing
    from dtctl.launch.control.node_pool import NodePool

START_LIMIT_S: Final = 30.0
"""Seconds that a node may take from the start message to its answer."""
STOP_MARGIN_S: Final = 5.0
"""Seconds that a node has on top of the grace of its workers: for strays, and the way there and back."""
CLOSE_SILENCE_S: Final = 120.0
"""Seconds without output after which nodes whose workers have all ended are stopped."""


class State(Enum):
    """State of an attempt."""

    STARTING = "starting"
    RUNNING = "running"
    HEALING = "healing"
    ENDING = "ending"
    CLOSING = "closing"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRule:
    """How a state is left. In each, a node that is silent for `cluster.link_timeout_s` is lost, too."""

    ended_by: str
    limit: str
    """Name or formula of the longest time in it."""
    check: str
    """Method of `Attempt` that looks at that time."""
    next: tuple[State, ...]
    open_ended: str = ""
    """When nothing but the program and its user bounds it; empty: never."""


STATES: Final[Mapping[State, StateRule]] = {
    State.STARTING: StateRule(
        ended_by="the answer of the last node to its start message",
        limit=f"{START_LIMIT_S:g} s",
        check="check_start",
        next=(State.RUNNING, State.STOPPING, State.OVER),
    ),
    State.RUNNING: StateRule(
        ended_by="the end of a worker, or its loss",
        limit="job.hang_s without a step, where the job tells its steps; job.time_s",
        check="check_progress",
        next=(State.HEALING, State.ENDING, State.CLOSING, State.STOPPING),
        open_ended="the program tells no steps, and the spec has no job.time_s",
    ),
    State.HEALING: StateRule(
        ended_by="the news that all workers have joined, or that one has ended: it cannot join any more",
        limit="job.heal_s",
        check="check_healing",
        next=(State.RUNNING, State.STOPPING),
    ),
    State.ENDING: StateRule(
        ended_by="the end of the last worker",
        limit="job.hang_s without a step, where the job tells its steps; job.time_s",
        check="check_progress",
        next=(State.CLOSING, State.STOPPING),
        open_ended="the program tells no steps, and the spec has no job.time_s",
    ),
    State.CLOSING: StateRule(
        ended_by="the report of the last node",
        limit=f"{CLOSE_SILENCE_S:g} s without output",
        check="check_close",
        next=(State.OVER, State.STOPPING),
    ),
    State.STOPPING: StateRule(
        ended_by="the report of the last node",
        limit=f"job.grace_s + {STOP_MARGIN_S:g} s",
        check="check_stop",
        next=(State.OVER,),
    ),
}
"""All states but the last one, which has no end. `Attempt` looks at the clock by this table alone."""


@dataclass(slots=True, kw_only=True)
class AttemptOutcome:
    """How an attempt ended."""

    failures: list[Failure] = field(default_factory=list)
    stopped_by: int | None = None
    """Signal that asked the launcher to stop; None when nobody did."""
    left_behind: dict[str, int | None] = field(default_factory=dict)
    """Node -> processes left there; None when the node could not be asked."""
    lost_nodes: list[str] = field(default_factory=list)
    """Nodes whose link was lost."""
    is_unmet: bool = False
    """Whether nobody has ever opened the port at which the workers were to meet."""
    already_ended: list[str] = field(default_factory=list)
    """Nodes where the run had ended before this launcher came; no supervisor waits there for another attempt."""
    lost_output: dict[str, int] = field(default_factory=dict)
    """Node -> bytes of output that could not be stored there."""
    outputs: dict[str, Outputs] = field(default_factory=dict)
    """Node -> what the run has put out there so far."""
    hung_s: float = 0.0
    """For how long nothing had moved when it was ended because it hung."""
    away_s: float = 0.0
    """For how long the launcher did not run, if the nodes have ended the attempt for it: then nobody has failed."""
    left_early: list[Standing] = field(default_factory=list)
    """Workers that had left, when it was ended, though their training had steps left, the first one first; those whose
    exit code says that they failed are not among them."""
    first_step: int | None = None
    """The step that it began after; None when the job tells none."""
    committed_step: int = 0
    """Step of the newest snapshot that workers have told of as committed; 0: none."""
    last_step: int | None = None
    """The last step that is known to have been done, of the whole run; None when the job tells none."""


class Attempt:
    """The state of one attempt: which workers have started and ended, and which nodes are still waited for."""

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

        With `keeps_nodes` they go on when the link is lost, and are called again.
        With `confirms_silence` a silent node is lost only if it does not answer a new connection either, or not for
        twice as long: no other node would take its place.
        """
        self.confirms_silence = confirms_silence
        self.healing = healing
        self.pool = pool
        self.keeps_nodes = keeps_nodes
        self.gang = gang
        self.hang_monitor = hang_monitor
        self.plan = plan
        self.link_timeout_s = link_timeout_s
        self.outcome = AttemptOutcome()
        self.open = {node.name for node in plan.nodes}
        self.starting = set() if under_way else set(self.open)
        self.silent_nodes = set(self.open)
        """Nodes none of whose workers has printed anything: still at the rendezvous, for all we see."""
        self.all_started = False
        self.begun_at = time.monotonic()
        self.moved_at = self.begun_at
        """When a worker has printed something or ended, for the last time."""
        self.stop_deadline: float | None = None
        self.ended_workers: set[tuple[str, int]] = set()
        self.failed_ranks: set[int] = set()
        """Ranks that have ended with an error of their own."""
        self.newest_snapshot_step = 0
        self.resume_events: set[type[Resumed | Confirmed]] = set()
        """Kinds that were emitted in this attempt."""
        """Step of the newest snapshot that workers have told of."""
        self.absence = (0.0, 0.0)
        """For how long the launcher did not run, if nodes may think it gone, and until when that explains what ends."""
        self.ranks = {node.name: frozenset(node.ranks) for node in plan.nodes}
        """Workers of each node; what it says of others is not believed."""
        self.cold_nodes: set[str] = set()
        """Nodes whose workers are started afresh."""
        self.joining: set[str] = set()
        """Nodes that have taken the places of lost ones and not started yet."""

    def handle(self, message: NodeMessage) -> None:
        """Act on one message of a node that still belongs to the attempt."""
        name, content = message.session.name, message.content
        if self.pool is not None and self.pool.owns(message.session):
            self._take_call(self.pool, message)
            return
        if isinstance(content, OutputChunk):
            self._on_log(name, content.rank, content.payload)
            return
        if name in self.open and message.session is self.gang.sessions.get(name):
            self._act(name, content)

    def _take_call(self, pool: NodePool, message: NodeMessage) -> None:
        """Act on a message of a node that was called because a place is vacant."""
        if not self.keeps_nodes:
            self._heal(lambda healing: healing.take_call(message))
        elif (substitute := pool.take(message)) is not None:
            self.gang.sessions[substitute.lost] = substitute.session
            self.gang.emit(NodeChanged(node=substitute.lost, state="running"))
            if self.stop_deadline is not None:
                substitute.session.send(StopAttempt(now=False))

    def _act(self, name: str, content: Content) -> None:
        match content:
            case Started():
                self._on_started(name, content.interface)
            case WorkerExit() | AttemptStopped() if not self._concerns_own_workers(name, content):
                self._on_lost(name, "it reported on a worker that does not run there")
            case WorkerExit():
                self._on_exit(name, content)
            case LiveReport() if content.rank in self.ranks[name]:
                self._heal(lambda healing: self._on_live_report(healing, content))
            case AttemptStopped():
                self._on_stopped(name, content)
            case Cold() if name not in self.cold_nodes:
                self.cold_nodes.add(name)
                self.gang.emit(Note(node=name, text=f"workers start without preloaded modules: {content.why}"))
            case MetricsBegin() if self._has_metrics(name):
                self.gang.logs.begin_metrics(name)
            case Refusal():
                self._fail(name, str(error_of(content, name)), exit_code=None)
                self._give_up_on(name, state="failed")
            case LinkLost():
                self._on_lost(name, content.stderr or "the link was lost")
            case SessionFailed():
                self._on_lost(name, str(content.error) or "the link was lost")
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
        """Whether what a node says is about its own workers, or torchrun's agent there."""
        exits = content.exits if isinstance(content, AttemptStopped) else [content]
        return all(each.rank in self.ranks[name] | {AGENT} for each in exits)

    def _has_metrics(self, name: str) -> bool:
        """Whether the worker that writes metrics.jsonl is on this node."""
        return 0 in self.ranks.get(name, ())

    def _on_log(self, name: str, rank: int, payload: bytes) -> None:
        self.moved_at = time.monotonic()
        if rank == METRICS and not self._has_metrics(name):
            return
        if rank != METRICS and rank not in self.ranks.get(name, ()):  # a line can begin like one of another worker
            rank = AGENT
        for text in self.gang.logs.write(name, rank, payload):
            if (
                rank != AGENT or self.stop_deadline is None
            ):  # torchrun's traceback of the SIGTERM it was sent explains nothing
                self.gang.emit(OutputLine(node=name, rank=rank, text=text))
        refusal = self.gang.logs.refusal()
        if refusal is not None:
            self.gang.emit(Note(node=name, text=f"output is displayed but no longer saved on this machine: {refusal}"))
        # Metrics come from a step that all workers have taken part in, and a worker prints once it has been started,
        # which torchrun's agents do together: the silent ones run, too. What comes before the workers is of the attempt
        # before.
        for node in sorted((self.silent_nodes & {name} if rank == AGENT else self.silent_nodes) - self.starting):
            self.silent_nodes.discard(node)
            self.gang.emit(NodeChanged(node=node, state="running"))

    def _on_started(self, name: str, interface: str | None) -> None:
        if name not in self.starting | self.joining:
            return
        self.starting.discard(name)
        self.joining.discard(name)
        self.gang.emit(NodeChanged(node=name, state="started", interface=interface or None))
        self.all_started = not self.starting

    def _on_stopped(self, name: str, stopped: AttemptStopped) -> None:
        for worker_exit in stopped.exits:
            self._on_exit(name, worker_exit)
        self.open.discard(name)
        self.outcome.left_behind[name] = stopped.left
        if stopped.log_bytes_lost:
            self.outcome.lost_output[name] = stopped.log_bytes_lost
        if stopped.log_bytes_unstored:
            text = f"{stopped.log_bytes_unstored:,} bytes of output found no room on its disk and were sent here only"
            self.gang.emit(Note(node=name, text=text))
        if stopped.outputs is not None:
            summary = stopped.outputs
            self.outcome.outputs[name] = Outputs(folder=summary.folder, files=summary.files, bytes=summary.bytes)
        self.outcome.is_unmet = self.outcome.is_unmet or stopped.met is False
        if stopped.gone:
            self.outcome.already_ended.append(name)
        self.gang.emit(NodeChanged(node=name, state="stopped", left=stopped.left))
        if stopped.record:
            self.gang.emit(Note(node=name, text=stopped.record))

    def _on_exit(self, name: str, worker: WorkerExit) -> None:
        if (name, worker.rank) in self.ended_workers:
            return  # repeated in the summary at the end, in case the first message was lost
        self.gang.emit(
            WorkerExited(
                node=name, rank=worker.rank, exit_code=worker.code, signal=worker.signal, killed=worker.killed or None
            )
        )
        if self._is_replaced(name, worker):
            return
        self.ended_workers.add((name, worker.rank))
        self.moved_at = time.monotonic()
        if not worker.code:
            self.hang_monitor.worker_ended(worker.rank)
            self._end_healing_without(name, worker.rank)
            return
        if worker.killed and self.stop_deadline is not None:
            return  # by dtctl itself, for whatever has ended the attempt
        if not worker.told:
            self.failed_ranks.add(worker.rank)
        if self._is_explained():
            self._end_for_absence()
        elif self.outcome.stopped_by is None:
            failure = _failure_of(name, worker)
            subject = f"rank {worker.rank} on {name}" if worker.rank >= 0 else name
            end = f"{subject} {describe(failure)}"
            self._end_healing(f"{end}, meanwhile")
            self.outcome.failures.append(failure)
            # Not as the failure: which of those that end now was the first is known when all have.
            self._stop_others("a worker was told to stop" if worker.code == names.REQUEUE_EXIT else end)

    # -- lost workers that are replaced -----------------------------------------------------------------------------

    def _is_replaced(self, name: str, worker: WorkerExit) -> bool:
        """Whether another process takes the place of a worker that has ended; begins that."""
        healing = self.healing
        if healing is None or self.stop_deadline is not None:
            return False
        if healing.is_expected(worker.rank):
            return True
        killed = worker.signal is not None and not worker.asked and not worker.told
        if not killed or self.ended_workers or self.starting or worker.rank < 0:
            return False
        failure = _failure_of(name, worker)
        self._heal(lambda healing: healing.lose(failure), failure)
        return True

    def _on_live_report(self, healing: Healing, report: LiveReport) -> None:
        healed = healing.take(report)
        if healed is not None:
            self.hang_monitor.begin_again()
            self.gang.emit(healed)

    def _is_node_replaced(self, name: str, text: str) -> bool:
        """Whether another node takes the place of a lost one, or the node itself again; begins that."""
        if self.healing is None or self.stop_deadline is not None or self.ended_workers or not self.all_started:
            return False
        failure = _node_failure(name, text)
        silent_s = time.monotonic() - self.gang.sessions[name].last_heard
        silent_s = silent_s if silent_s > 2 * PING_S else 0.0  # else its link has ended, which is known at once
        self.joining.discard(name)
        self.gang.emit(NodeChanged(node=name, state="lost"))
        self._heal(lambda healing: healing.lose_node(failure, detect_s=silent_s), failure)
        return True

    def replace_node(self, lost: str, name: str, plan: Plan) -> None:
        """From now on a node has the place of a lost one, which may be the same; its workers are being started."""
        self.plan = plan
        self.ranks = {node.name: frozenset(node.ranks) for node in plan.nodes}
        self.hang_monitor.node_of_rank = {rank: node.name for node in plan.nodes for rank in node.ranks}
        self.open.discard(lost)
        self.open.add(name)
        self.joining.add(name)
        self.silent_nodes.add(name)
        self.cold_nodes.discard(name)

    def _heal(self, action: Callable[[Healing], None], failure: Failure | None = None) -> None:
        """Take a healing a step further; given up, it is the failure that it began with."""
        if self.healing is None:
            return
        from dtctl.launch.control.spares import NotHealed  # few runs need it

        try:
            action(self.healing)
        except NotHealed as exc:
            self._end_healing(str(exc), failure)
            self._stop_others("a lost worker could not be replaced")

    def _end_healing(self, reason: str, failure: Failure | None = None) -> None:
        """Give up the healing that is on: the attempt has failed of what it began with."""
        if self.healing is None:
            return
        absent = self.healing.absent
        cause = self.healing.give_up() or failure
        if cause is None:
            return
        self.outcome.failures.append(cause)
        self.gang.emit(Note(node=cause.node, text=f"not healed, all workers are restarted: {reason}"))
        lost = {each.node for each in (cause, failure) if each is not None and each.rank is None}
        self._lose(absent | lost)

    def _end_healing_without(self, name: str, rank: int) -> None:
        """Give up the healing that is on: a worker that has ended well does not join the others again."""
        if self.healing is not None and self.healing.is_on and self.stop_deadline is None:
            self._end_healing(f"rank {rank} on {name} has ended, meanwhile")
            self._stop_others("a lost worker could not be replaced")

    def _on_progress(self, name: str, content: Content) -> None:
        """What a node says about how far its workers are."""
        if isinstance(content, Pong | ProgressReport):
            reports = [report for report in content.workers if report.rank in self.ranks[name]]
            before_stop = isinstance(content, ProgressReport) and content.before_stop
            self.hang_monitor.update(standings(name, reports), node=name, before_stop=before_stop)
            workers = self.hang_monitor.workers.values()
            steps = [worker.step for worker in workers]
            committed = [worker.committed for worker in workers]
            self.outcome.committed_step = max([self.outcome.committed_step, *committed])
            self.outcome.first_step = max((worker.first for worker in workers), default=None)
            self.outcome.last_step = max([*steps, self.outcome.last_step or 0]) if steps else self.outcome.last_step
            self._emit_snapshots()
            for report in reports:
                self._emit_resume(report)
        elif isinstance(content, WorkerStack):
            if content.rank in self.hang_monitor.workers.keys() & self.ranks[name]:
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
        """Emit once what a worker tells of going on from a snapshot."""
        for told, kind in ((report.resumed, Resumed), (report.confirmed, Confirmed)):
            if told is not None and kind not in self.resume_events:
                self.resume_events.add(kind)
                facts: dict[str, Any] = told.to_json()
                self.gang.emit(kind(**facts | {"why": tuple(told.why)}))

    @property
    def state(self) -> State:
        """State of the table above."""
        if not self.open:
            return State.OVER
        if self.stop_deadline is not None:
            return State.STOPPING
        if self.healing is not None and self.healing.is_on:
            return State.HEALING
        if self.starting:
            return State.STARTING
        if not self.ended_workers:
            return State.RUNNING
        agent = self.plan.kind == "torchrun"
        processes = {
            (node.name, AGENT if agent else node.first_rank + number)
            for node in self.plan.nodes
            for number in range(node.processes)
        }
        return State.CLOSING if processes <= self.ended_workers else State.ENDING

    def check_progress(self, now: float) -> None:
        """Act on a job whose workers make no progress."""
        if self.healing is not None and not self.ended_workers:
            self._heal(lambda healing: healing.check(self.link_timeout_s + 2 * PING_S))
        if self.healing is not None and self.healing.is_on:
            return
        if self.hang_monitor.hangs(now):
            self.gang.emit(Hung(silent_s=round(self.hang_monitor.silent_s or 0.0, 1)))
            nodes = {name for name in self.open if self.gang.sessions[name].send(Stacks())}
            self.hang_monitor.begin_collecting(nodes)
        failure = self.hang_monitor.verdict(now)
        if failure is not None and failure.rank is not None and self.healing is not None and not self.ended_workers:
            self._replace_hung(failure, detect_s=self.hang_monitor.silent_until(now))
        elif failure is not None:
            self.outcome.failures.append(failure)
            self.outcome.hung_s = self.hang_monitor.silent_s or 0.0
            self._stop_others(failure.summary, at_once=True)  # a worker that hangs does not react to SIGTERM

    def _replace_hung(self, hung: Failure, *, detect_s: float) -> None:
        self._heal(lambda healing: healing.lose(hung, is_running=True, detect_s=detect_s), hung)

    def check_healing(self, _now: float) -> None:
        """Act on a healing that takes too long, and on survivors that do not react, which would hold up the others."""
        healing = self.healing
        assert healing is not None  # noqa: S101  # for the type checker
        self._heal(lambda healing: healing.check(self.link_timeout_s + 2 * PING_S))
        for rank, asked_s in healing.late().items():
            if self.hang_monitor.is_stuck(rank, asked_s=asked_s, again=healing.has_healed):
                node = self.hang_monitor.node_of_rank[rank]
                summary = f"it has not reacted for {asked_s:.0f} s to the loss of another worker"
                stuck = Failure(
                    node=node, rank=rank, exit_code=None, signal=None, time=time.time(), summary=summary, hang=True
                )
                self._replace_hung(stuck, detect_s=0.0)

    def _on_lost(self, name: str, text: str) -> None:
        if self.pool is not None and self.keeps_nodes:
            self.gang.emit(NodeChanged(node=name, state="away"))
            self.pool.call_kept(name)
            return
        if not self._is_explained() and self._is_node_replaced(name, text):
            return
        self._on_lost_for_good(name, text)

    def _on_lost_for_good(self, name: str, text: str) -> None:
        self.outcome.lost_nodes.append(name)
        if self._is_explained():
            self._end_for_absence()
            self._give_up_on(name, state="stopped")
            return
        # A node whose supervisor is ended, or loses its link, tells its workers to stop, and these all others; what
        # others say of it may be here before the loss, which is the cause.
        stopping = [failure.exit_code == names.REQUEUE_EXIT for failure in self.outcome.failures]
        if self.stop_deadline is None or (stopping and all(stopping)):
            self._fail(name, text, exit_code=None)
        self._give_up_on(name)

    def excuse_absence(self) -> None:
        """What was due while this process did not run counts against no node."""
        away_s, self.gang.away_s = self.gang.away_s, 0.0
        if not away_s:
            return
        now = time.monotonic()
        self.begun_at = max(self.begun_at, now) if self.starting else self.begun_at
        if self.stop_deadline is not None:
            self.stop_deadline = max(self.stop_deadline, now + self.plan.grace_s + 5)
        if away_s > self.link_timeout_s - 2 * PING_S and not self.keeps_nodes:
            self.absence = (away_s, now + self.link_timeout_s + self.plan.grace_s + 5)

    def _is_explained(self) -> bool:
        """Whether what ends now may end because nodes had to take the launcher for gone."""
        return time.monotonic() < self.absence[1] and not self.outcome.failures and self.outcome.stopped_by is None

    def _end_for_absence(self) -> None:
        self.outcome.away_s = self.absence[0]
        self._stop_others(f"this launcher did not run for {self.absence[0]:.0f} s")

    def _fail(self, name: str, text: str, *, exit_code: int | None) -> None:
        self._end_healing(f"{name}: {text}")
        self.outcome.failures.append(_node_failure(name, text, exit_code=exit_code))
        self._stop_others(f"{name}: {text}")

    def _give_up_on(self, name: str, *, state: str = "lost") -> None:
        """Stop waiting for a node; what is left there is unknown."""
        self.open.discard(name)
        self.starting.discard(name)
        self.outcome.left_behind[name] = None
        self.gang.emit(NodeChanged(node=name, state=state))

    def _lose(self, nodes: AbstractSet[str]) -> None:
        """No other node takes the places of these."""
        for name in sorted(nodes & self.open):
            self.outcome.lost_nodes.append(name)
            self._give_up_on(name)

    def _stop_others(self, reason: str, *, at_once: bool = False) -> None:
        if self.stop_deadline is not None:
            return
        if self.healing is not None:
            absent = self.healing.absent
            self.healing.give_up()
            self._lose(absent)
        self.gang.emit(Stopping(reason=reason))
        self.hang_monitor.stopping()
        self.stop_deadline = time.monotonic() + self.plan.grace_s + STOP_MARGIN_S
        for name in self.open:
            self.gang.sessions[name].send(StopAttempt(now=at_once))

    def close(self) -> AttemptOutcome:
        """The outcome, once no node is open."""
        if self.healing is not None:
            self.healing.close()
        leavers = [worker for worker in self.hang_monitor.left_early() if worker.rank not in self.failed_ranks]
        self.outcome.left_early = sorted(leavers, key=lambda worker: -worker.stale_s)
        return self.outcome

    def interrupt(self, number: int, *, hard: bool) -> None:
        """Stop because of a signal; at a second signal, without waiting for the workers."""
        if self.outcome.stopped_by is None:
            self.outcome.stopped_by = number
            self._stop_others(f"signal {number}")
        if hard and self.stop_deadline is not None:
            self.stop_deadline = min(self.stop_deadline, time.monotonic() + 3)
            for name in self.open:
                self.gang.sessions[name].send(StopAttempt(now=True))

    def check_deadlines(self) -> None:
        """Act on deadlines that have passed: of a start, a heartbeat, a stop."""
        self.gang.notice_absence()
        self.excuse_absence()
        now = time.monotonic()
        if self.state is not State.OVER:
            getattr(self, STATES[self.state].check)(now)
        if self.pool is not None and self.keeps_nodes:
            self._check_kept(self.pool, now)
        for name in sorted(self.open - self._vacant):
            session = self.gang.sessions[name]
            self._check_silence(session, now - max(session.last_heard, self.begun_at))

    @property
    def _vacant(self) -> set[str]:
        """Lost nodes that are called again, or whose places others are to take."""
        return set() if self.pool is None else self.pool.vacant

    def _check_kept(self, pool: NodePool, now: float) -> None:
        """Call nodes again that go on by themselves, and give up those that stay away."""
        for name, error in pool.check().items():
            pool.abandon(name)
            self._on_lost_for_good(name, str(error))
        if self.stop_deadline is not None and now > self.stop_deadline:
            for name in pool.vacant:
                pool.abandon(name)
                self._give_up_on(name)

    def _check_silence(self, session: Session, silent_s: float) -> None:
        if silent_s <= self.link_timeout_s:
            session.forget_call()
            return
        text = f"no message arrived from it for {self.link_timeout_s:g} s"
        if self.confirms_silence:
            answers = session.call_again()
            if answers is not False and silent_s <= 2 * self.link_timeout_s:
                return
            if answers:
                text = f"no message arrived from it for {2 * self.link_timeout_s:g} s, though it takes new connections"
            else:
                text += ", and it does not answer a new connection"
        session.close()
        self._on_lost(session.name, text)

    def check_start(self, now: float) -> None:
        """Give up nodes that do not start."""
        if now - self.begun_at > START_LIMIT_S:
            self._lose_late(self.starting, f"it did not start the job within {START_LIMIT_S:g} s")
        if self.stop_deadline is None:
            self.check_progress(now)

    def check_close(self, now: float) -> None:
        """Stop nodes that do not report the end of their workers."""
        if now - self.moved_at > CLOSE_SILENCE_S:
            self._stop_others("all workers have ended, and not all nodes report it")

    def check_stop(self, now: float) -> None:
        """Give up nodes that do not stop."""
        if self.stop_deadline is not None and now > self.stop_deadline:
            self._lose_late(self.open, "it did not stop in time")

    def _lose_late(self, nodes: AbstractSet[str], text: str) -> None:
        for name in sorted((nodes & self.open) - self._vacant):
            self.gang.sessions[name].close()
            self._on_lost(name, text)


def _node_failure(name: str, text: str, *, exit_code: int | None = None) -> Failure:
    return Failure(node=name, rank=None, exit_code=exit_code, signal=None, time=time.time(), summary=text)


def _failure_of(name: str, worker: WorkerExit) -> Failure:
    return Failure(
        node=name,
        rank=worker.rank if worker.rank >= 0 else None,
        exit_code=worker.code,
        signal=worker.signal,
        time=time.time(),
        node_reason=worker.why,
        asked_to_stop=worker.asked,
    )
