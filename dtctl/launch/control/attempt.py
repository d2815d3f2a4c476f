"""One attempt of a run: which workers have started, ended or hang, and which nodes are still waited for.

The gang rule: the first failure anywhere ends the attempt everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtctl import names
from dtctl.launch.control.failure import AGENT, Failure
from dtctl.launch.control.gang import Gang
from dtctl.launch.control.hang import HangLimit, HangMonitor, Watched
from dtctl.launch.control.link import error_of
from dtctl.launch.control.progress import Standing
from dtctl.launch.control.session import NodeMessage
from dtctl.launch.records.events import Hung, NodeChanged, Note, OutputLine, SnapshotBegun, Stopping, WorkerExited
from dtctl.launch.records.logs import METRICS
from dtctl.plan.model import Plan

FIRST_RETRY_S = 0.5
RETRY_LIMIT_S = 3600.0
"""How long a kept run's node may be out of reach before it counts as lost."""
START_LIMIT_S = 30.0
"""How long a node may take from the start message to its answer."""


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
    already_ended: list[str] = field(default_factory=list)
    """Nodes where the run had ended before this launcher came; no supervisor waits there for another attempt."""
    lost_output: dict[str, int] = field(default_factory=dict)
    """Node -> bytes of output that could not be stored there."""
    hung_s: float = 0.0
    """For how long nothing had moved when it was ended because it hung."""
    left_early: list[Standing] = field(default_factory=list)
    """Workers that had left, when it was ended, though their training had steps left, the first one first; those whose
    exit code says that they failed are not among them."""
    first_step: int | None = None
    """The step that it began after; None when the job tells none."""
    committed_step: int = 0
    """Step of the newest snapshot that workers have told of as committed; 0: none."""
    last_step: int | None = None
    """The last step that is known to have been done, of the whole run; None when the job tells none."""


@dataclass(slots=True, kw_only=True)
class _Retry:
    """A node that is to be contacted again."""

    since: float
    next: float
    tries: int = 0


class Attempt:
    """The state of one attempt: which workers have started and ended, and which nodes are still waited for."""

    def __init__(
        self, gang: Gang, plan: Plan, link_timeout_s: float, *, hang_monitor: HangMonitor, under_way: bool = False
    ) -> None:
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
        self.stop_deadline: float | None = None
        self.ended_workers: set[tuple[str, int]] = set()
        self.failed_ranks: set[int] = set()
        """Ranks that have ended with an error of their own."""
        self.newest_snapshot_step = 0
        """Step of the newest snapshot that workers have told of."""
        self.ranks = {node.name: frozenset(node.ranks) for node in plan.nodes}
        """Workers of each node; what it says of others is not believed."""
        self.cold_nodes: set[str] = set()
        """Nodes whose workers are started afresh."""
        self.retries: dict[str, _Retry] = {}
        """Nodes of a kept run whose link is gone: they go on, and are called again from time to time."""

    def handle(self, message: NodeMessage) -> None:
        """Act on one message of a node that still belongs to the attempt."""
        name = message.session.name
        if message.kind == "log":
            self._on_log(name, message.data["rank"], message.data["payload"])
        elif name not in self.open or message.session is not self.gang.sessions.get(name):
            return
        elif message.kind == "started":
            self._on_started(name, message.data)
        elif not self._concerns_own_workers(name, message):
            self._on_lost(name, "it reported on a worker that does not run there")
        elif message.kind == "exit":
            self._on_exit(name, message.data)
        elif message.kind == "ready":  # a kept run's link stands again
            self.retries.pop(name, None)
            self.gang.emit(NodeChanged(node=name, state="running"))
        elif message.kind == "stopped":
            self._on_stopped(name, message.data)
        elif message.kind == "cold" and name not in self.cold_nodes:
            self.cold_nodes.add(name)
            self.gang.emit(Note(node=name, text=f"workers start without preloaded modules: {message.data['why']}"))
        elif message.kind == "metrics-begin" and self._has_metrics(name):
            self.gang.logs.begin_metrics(name)
        elif message.kind == "error":
            self._fail(name, str(error_of(message.data, name)), exit_code=None)
            self._give_up_on(name, state="failed")
        elif message.kind in ("lost", "failed"):
            text = message.data.get("stderr") or str(message.data.get("error", "")) or "the link was lost"
            self._on_lost(name, text)
        else:
            self._on_progress(name, message)

    def _concerns_own_workers(self, name: str, message: NodeMessage) -> bool:
        """Whether what a node says is about its own workers, or torchrun's agent there."""
        facts = message.data["exits"] if message.kind == "stopped" else [message.data]
        return message.kind not in ("exit", "stopped") or all(fact["rank"] in self.ranks[name] | {-1} for fact in facts)

    def _has_metrics(self, name: str) -> bool:
        """Whether the worker that writes metrics.jsonl is on this node."""
        return 0 in self.ranks.get(name, ())

    def _on_log(self, name: str, rank: int, payload: bytes) -> None:
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
        # Metrics come from a step that all workers have taken part in, the silent ones too; those that come before the
        # workers are those of the attempt before.
        for node in sorted((self.silent_nodes if rank == METRICS else self.silent_nodes & {name}) - self.starting):
            self.silent_nodes.discard(node)
            self.gang.emit(NodeChanged(node=node, state="running"))

    def _on_started(self, name: str, data: dict[str, Any]) -> None:
        if name not in self.starting:
            return
        self.starting.discard(name)
        self.gang.emit(NodeChanged(node=name, state="started", interface=data.get("interface") or None))
        self.all_started = not self.starting

    def _on_stopped(self, name: str, data: dict[str, Any]) -> None:
        for fact in data["exits"]:
            self._on_exit(name, fact)
        self.open.discard(name)
        self.outcome.left_behind[name] = data["left"]
        if data.get("log_bytes_lost"):
            self.outcome.lost_output[name] = data["log_bytes_lost"]
        if data.get("gone"):
            self.outcome.already_ended.append(name)
        self.gang.emit(NodeChanged(node=name, state="stopped", left=data["left"]))
        if data.get("record"):
            self.gang.emit(Note(node=name, text=data["record"]))

    def _on_exit(self, name: str, data: dict[str, Any]) -> None:
        if (name, data["rank"]) in self.ended_workers:
            return  # repeated in the summary at the end, in case the first message was lost
        self.ended_workers.add((name, data["rank"]))
        self.gang.emit(WorkerExited(node=name, rank=data["rank"], exit_code=data["code"], signal=data["signal"]))
        if not data["code"]:
            self.hang_monitor.worker_ended(data["rank"])
            return
        if not data.get("told"):
            self.failed_ranks.add(data["rank"])
        if self.outcome.stopped_by is None:
            failure = Failure(
                node=name,
                rank=data["rank"] if data["rank"] >= 0 else None,
                exit_code=data["code"],
                signal=data["signal"],
                time=time.time(),
                node_reason=data.get("why", ""),
                asked_to_stop=data.get("asked", False),
            )
            self.outcome.failures.append(failure)
            self._stop_others("a worker was told to stop" if data["code"] == names.REQUEUE_EXIT else f"{name} failed")

    def _on_progress(self, name: str, message: NodeMessage) -> None:
        """What a node says about how far its workers are."""
        if message.kind in ("pong", "progress"):
            reports = [fact for fact in message.data["workers"] if fact["rank"] in self.ranks[name]]
            self.hang_monitor.update(name, reports, before_stop=message.data.get("before_stop", False))
            workers = self.hang_monitor.workers.values()
            steps = [worker.step for worker in workers]
            committed = [worker.committed for worker in workers]
            self.outcome.committed_step = max([self.outcome.committed_step, *committed])
            self.outcome.first_step = max((worker.first for worker in workers), default=None)
            self.outcome.last_step = max([*steps, self.outcome.last_step or 0]) if steps else self.outcome.last_step
            self._emit_snapshots()
        elif message.kind == "stack" and message.data["rank"] in self.hang_monitor.workers.keys() & self.ranks[name]:
            self.hang_monitor.add_stack(message.data)
        elif message.kind == "stacks-end":
            self.hang_monitor.node_finished(name)

    def _emit_snapshots(self) -> None:
        """Emit each snapshot once; the one that this attempt resumed from was emitted by the attempt before."""
        for worker in self.hang_monitor.workers.values():
            if worker.saved > max(worker.first, self.newest_snapshot_step):
                self.newest_snapshot_step = worker.saved
                self.gang.emit(SnapshotBegun(step=worker.saved))

    def _check_progress(self, now: float) -> None:
        if self.hang_monitor.hangs(now):
            self.gang.emit(Hung(silent_s=round(self.hang_monitor.silent_s or 0.0, 1)))
            nodes = {name for name in self.open if self.gang.sessions[name].send({"op": "stacks"})}
            self.hang_monitor.begin_collecting(nodes)
        failure = self.hang_monitor.verdict(now)
        if failure is not None:
            self.outcome.failures.append(failure)
            self.outcome.hung_s = self.hang_monitor.silent_s or 0.0
            self._stop_others(failure.summary, at_once=True)  # a worker that hangs does not react to SIGTERM

    def _on_lost(self, name: str, text: str) -> None:
        if self.gang.reattach is not None and self._plan_retry(name):
            return
        self.outcome.lost_nodes.append(name)
        # A node whose supervisor is ended, or loses its link, tells its workers to stop, and these all others; what
        # others say of it may be here before the loss, which is the cause.
        stopping = [failure.exit_code == names.REQUEUE_EXIT for failure in self.outcome.failures]
        if self.stop_deadline is None or (stopping and all(stopping)):
            self._fail(name, text, exit_code=None)
        self._give_up_on(name)

    def _plan_retry(self, name: str) -> bool:
        """Plan the next try to reach a node that goes on without us; False when it is time to give it up."""
        now = time.monotonic()
        if name not in self.retries:
            self.retries[name] = _Retry(since=now, next=now + FIRST_RETRY_S)
            self.gang.emit(NodeChanged(node=name, state="away"))
            return True
        retry = self.retries[name]
        retry.tries += 1
        retry.next = now + min(30.0, FIRST_RETRY_S * 2**retry.tries)
        return now - retry.since < RETRY_LIMIT_S

    def _fail(self, name: str, text: str, *, exit_code: int | None) -> None:
        failure = Failure(node=name, rank=None, exit_code=exit_code, signal=None, time=time.time(), summary=text)
        self.outcome.failures.append(failure)
        self._stop_others(f"{name}: {text}")

    def _give_up_on(self, name: str, *, state: str = "lost") -> None:
        """Stop waiting for a node; what is left there is unknown."""
        self.open.discard(name)
        self.starting.discard(name)
        self.outcome.left_behind[name] = None
        self.gang.emit(NodeChanged(node=name, state=state))

    def _stop_others(self, reason: str, *, at_once: bool = False) -> None:
        if self.stop_deadline is not None:
            return
        self.gang.emit(Stopping(reason=reason))
        self.hang_monitor.stopping()
        # A node needs the grace, a second for strays, and the way there and back.
        self.stop_deadline = time.monotonic() + self.plan.grace_s + 5
        for name in self.open:
            self.gang.sessions[name].send({"op": "stop", "now": True} if at_once else {"op": "stop"})

    def close(self) -> AttemptOutcome:
        """The outcome, once no node is open."""
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
                self.gang.sessions[name].send({"op": "stop", "now": True})

    def check_deadlines(self) -> None:
        """Act on deadlines that have passed: of a start, a heartbeat, a stop."""
        now = time.monotonic()
        if self.stop_deadline is None:
            self._check_progress(now)
        for name in sorted(self.open):
            session = self.gang.sessions[name]
            if name in self.retries:
                self._check_retry(name, now)
            elif now - max(session.last_heard, self.begun_at) > self.link_timeout_s:
                session.close()
                self._on_lost(name, f"no message arrived from it for {self.link_timeout_s:g} s")
            elif name in self.starting and now - self.begun_at > START_LIMIT_S:
                session.close()
                self._on_lost(name, f"it did not start the job within {START_LIMIT_S:g} s")
            elif self.stop_deadline is not None and now > self.stop_deadline:
                session.close()
                self._on_lost(name, "it did not stop in time")

    def _check_retry(self, name: str, now: float) -> None:
        retry = self.retries[name]
        if self.stop_deadline is not None and now > self.stop_deadline:
            self._give_up_on(name)
        elif now >= retry.next and self.gang.reattach is not None:
            retry.next = float("inf")  # until this try has failed
            self.gang.reattach(name)


def watch(
    gang: Gang,
    plan: Plan,
    *,
    link_timeout_s: float,
    hang_s: HangLimit = "off",
    hang_start_s: HangLimit = "auto",
    on_started: Callable[[], None] | None,
    on_progress: Watched | None = None,
) -> AttemptOutcome:
    """Watch an attempt to its end on every node.

    Args:
        gang: the sessions of its nodes.
        plan: the attempt.
        link_timeout_s: a node not heard of for this long is lost.
        hang_s: when a job that makes no progress hangs (see hang.py).
        hang_start_s: the same before there is a measure: start, compilation, first batches and steps.
        on_started: called once, when every node has started its processes; None when they were started before.
        on_progress: told how far the workers are, whenever a node says so.
    """
    folder = gang.logs.folder / names.HANGS_DIR / f"attempt-{plan.attempt}"
    hang_monitor = HangMonitor(
        node_of_rank={rank: node.name for node in plan.nodes for rank in node.ranks},
        limit=hang_s,
        start_limit=hang_start_s,
        folder=folder,
        on_progress=on_progress,
    )
    attempt = Attempt(gang, plan, link_timeout_s, hang_monitor=hang_monitor, under_way=on_started is None)
    while attempt.open:
        if gang.signals:
            attempt.interrupt(gang.signals[-1], hard=len(gang.signals) > 1)
        message = gang.next_message(0.2)
        if message is not None:
            attempt.handle(message)
        if attempt.all_started and on_started is not None:
            on_started()
            attempt.all_started = False
        attempt.check_deadlines()
    for node, rank, text in gang.logs.flush():
        gang.emit(OutputLine(node=node, rank=rank, text=text))
    return attempt.close()
