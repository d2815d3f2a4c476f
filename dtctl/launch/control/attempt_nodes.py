"""The nodes of an attempt: their states, and the end of the attempt on all of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from dtctl.launch.control.failure import Failure
from dtctl.launch.control.hang import HangMonitor
from dtctl.launch.control.node_sessions import PING_S, NodeSessions
from dtctl.launch.control.progress import RankProgress
from dtctl.launch.records.events import NodeChanged, NodeOutputs, RunStopping
from dtctl.plan.model import Plan
from dtctl.supervisor.messages.attempt import StopAttempt

STOP_MARGIN_S: Final = 5.0
"""Seconds that a node has in addition to the grace period of its workers, for stray processes and the round trip."""


@dataclass(slots=True, kw_only=True)
class AttemptOutcome:
    """Outcome of an attempt."""

    failures: list[Failure] = field(default_factory=list)
    stopped_by: int | None = None
    """Signal by which the launcher was stopped; None without one."""
    left_behind: dict[str, int | None] = field(default_factory=dict)
    """Number of processes left on each node; None if the node could not be queried."""
    lost_nodes: list[str] = field(default_factory=list)
    """Nodes whose link was lost."""
    is_unmet: bool = False
    """True if no process has ever opened the port at which the workers were to meet."""
    already_ended: list[str] = field(default_factory=list)
    """Nodes where the run had ended before this launcher came; no supervisor waits there for another attempt."""
    lost_output: dict[str, int] = field(default_factory=dict)
    """Bytes of output that could not be stored on each node."""
    outputs: dict[str, NodeOutputs] = field(default_factory=dict)
    """Outputs of the run on each node so far."""
    hung_s: float = 0.0
    """Seconds without progress when the attempt was ended because of a hang."""
    away_s: float = 0.0
    """Seconds for which the launcher did not run, if the nodes ended the attempt because of that: then no worker has
    failed."""
    left_early: list[RankProgress] = field(default_factory=list)
    """Workers that had left before the end of the attempt although steps remained, in the order of leaving; workers
    with an exit code of a failure are not among them."""
    first_step: int | None = None
    """Step after which the attempt began; None if the job reports no steps."""
    committed_step: int = 0
    """Step of the newest snapshot that workers have reported as committed; 0: none."""
    last_step: int | None = None
    """Last step that is known to be done, counted over the whole run; None if the job reports no steps."""


class AttemptNodes:
    """The nodes of one attempt, and their states."""

    def __init__(
        self,
        gang: NodeSessions,
        plan: Plan,
        link_timeout_s: float,
        hang_monitor: HangMonitor,
        *,
        keeps_nodes: bool,
        under_way: bool,
    ) -> None:
        """Prepare to wait for all nodes of a plan; in an attempt that is `under_way`, they have started."""
        self.gang = gang
        self.plan = plan
        self.link_timeout_s = link_timeout_s
        self.hang_monitor = hang_monitor
        self.keeps_nodes = keeps_nodes
        """True if the nodes continue when the link is lost, and are called again."""
        self.outcome = AttemptOutcome()
        self.open = {node.name for node in plan.nodes}
        self.starting = set() if under_way else set(self.open)
        self.all_started = False
        self.joining: set[str] = set()
        """Nodes that have taken the places of lost ones and have not started yet."""
        self.silent_nodes = set(self.open)
        """Nodes without any output of workers so far: their workers may still be at the rendezvous."""
        self.cold_nodes: set[str] = set()
        """Nodes that start their workers without preloaded modules."""
        self.ranks = {node.name: frozenset(node.ranks) for node in plan.nodes}
        """Ranks of each node; reports of a node about other ranks are ignored."""
        self.ended_workers: set[tuple[str, int]] = set()
        self.begun_at = time.monotonic()
        self.moved_at = self.begun_at
        """Time when a worker last printed something or ended."""
        self.stop_deadline: float | None = None
        self.absence = (0.0, 0.0)
        """Seconds for which the launcher did not run, if nodes may have given it up, and the time until which that
        explains the end of workers."""
        self.give_up_replacing: Callable[[], AbstractSet[str]] | None = None
        """Function that ends the replacement of workers and returns the nodes that stay lost."""

    def give_up_node(self, name: str, *, state: str = "lost") -> None:
        """Stop waiting for a node; the number of processes left on it is unknown."""
        self.open.discard(name)
        self.starting.discard(name)
        self.outcome.left_behind[name] = None
        self.gang.emit(NodeChanged(node=name, state=state))

    def mark_nodes_lost(self, nodes: AbstractSet[str]) -> None:
        """Record nodes as lost, without another node in their places."""
        for name in sorted(nodes & self.open):
            self.outcome.lost_nodes.append(name)
            self.give_up_node(name)

    def stop_others(self, reason: str, *, at_once: bool = False) -> None:
        """Stop all nodes, at once or with the grace period in which workers can save their state."""
        if self.stop_deadline is not None:
            return
        if self.give_up_replacing is not None:
            self.mark_nodes_lost(self.give_up_replacing())
        self.gang.emit(RunStopping(reason=reason))
        self.hang_monitor.record_stop_request()
        self.stop_deadline = time.monotonic() + self.plan.grace_s + STOP_MARGIN_S
        for name in self.open:
            self.gang.sessions[name].send(StopAttempt(now=at_once, requested=self.outcome.stopped_by is not None))

    def interrupt(self, number: int, *, hard: bool) -> None:
        """Stop all nodes because of a signal; with `hard` (a second signal), do not wait for the workers."""
        if self.outcome.stopped_by is None:
            self.outcome.stopped_by = number
            self.stop_others(signal.Signals(number).name)
        if hard and self.stop_deadline is not None:
            self.stop_deadline = min(self.stop_deadline, time.monotonic() + 3)
            for name in self.open:
                self.gang.sessions[name].send(StopAttempt(now=True, requested=True))

    def replace_node(self, lost: str, name: str, plan: Plan) -> None:
        """Replace a lost node by a node whose workers are being started; it may be the same node."""
        self.plan = plan
        self.ranks = {node.name: frozenset(node.ranks) for node in plan.nodes}
        self.hang_monitor.node_of_rank = {rank: node.name for node in plan.nodes for rank in node.ranks}
        self.open.discard(lost)
        self.open.add(name)
        self.joining.add(name)
        self.silent_nodes.add(name)
        self.cold_nodes.discard(name)

    def reset_node_deadlines(self) -> None:
        """Extend the deadlines that passed while this process did not run."""
        away_s, self.gang.away_s = self.gang.away_s, 0.0
        if not away_s:
            return
        now = time.monotonic()
        self.begun_at = max(self.begun_at, now) if self.starting else self.begun_at
        if self.stop_deadline is not None:
            self.stop_deadline = max(self.stop_deadline, now + self.plan.grace_s + 5)
        if away_s > self.link_timeout_s - 2 * PING_S and not self.keeps_nodes:
            self.absence = (away_s, now + self.link_timeout_s + self.plan.grace_s + 5)

    def is_end_due_to_pause(self) -> bool:
        """Return whether workers may end now because the launcher did not run and nodes gave it up."""
        return time.monotonic() < self.absence[1] and not self.outcome.failures and self.outcome.stopped_by is None

    def end_after_pause(self) -> None:
        """End an attempt on all nodes that some nodes have ended because the launcher did not run."""
        self.outcome.away_s = self.absence[0]
        self.stop_others(f"this launcher did not run for {self.absence[0]:.0f} s")
