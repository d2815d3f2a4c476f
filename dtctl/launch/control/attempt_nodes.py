"""The nodes of an attempt: which of them are waited for, and how it is ended on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from dtctl.launch.control.failure import Failure
from dtctl.launch.control.gang import PING_S, Gang
from dtctl.launch.control.hang import HangMonitor
from dtctl.launch.control.progress import Standing
from dtctl.launch.records.events import NodeChanged, Outputs, Stopping
from dtctl.plan.model import Plan
from dtctl.supervisor.messages.attempt import StopAttempt

STOP_MARGIN_S: Final = 5.0
"""Seconds that a node has on top of the grace of its workers: for strays, and the way there and back."""


@dataclass(slots=True, kw_only=True)
class AttemptOutcome:
    """Outcome of an attempt."""

    failures: list[Failure] = field(default_factory=list)
    stopped_by: int | None = None
    """Signal that asked the launcher to stop; None without one."""
    left_behind: dict[str, int | None] = field(default_factory=dict)
    """Node -> processes left there; None when the node could not be asked."""
    lost_nodes: list[str] = field(default_factory=list)
    """Nodes whose link was lost."""
    is_unmet: bool = False
    """True if no process has ever opened the port at which the workers were to meet."""
    already_ended: list[str] = field(default_factory=list)
    """Nodes where the run had ended before this launcher came; no supervisor waits there for another attempt."""
    lost_output: dict[str, int] = field(default_factory=dict)
    """Node -> bytes of output that could not be stored there."""
    outputs: dict[str, Outputs] = field(default_factory=dict)
    """Node -> what the run has put out there so far."""
    hung_s: float = 0.0
    """Seconds for which nothing had moved when it was ended because it hung."""
    away_s: float = 0.0
    """Seconds for which the launcher did not run, if the nodes have ended the attempt for it: then no worker has
    failed."""
    left_early: list[Standing] = field(default_factory=list)
    """Workers that had left when it was ended, though their training had steps left, in the order of leaving; workers
    with an exit code of a failure are not among them."""
    first_step: int | None = None
    """The step that it began after; None when the job reports none."""
    committed_step: int = 0
    """Step of the newest snapshot that workers have reported as committed; 0: none."""
    last_step: int | None = None
    """The last step that is known to have been done, of the whole run; None when the job reports none."""


class AttemptNodes:
    """The nodes of one attempt, and what has become of them."""

    def __init__(
        self,
        gang: Gang,
        plan: Plan,
        link_timeout_s: float,
        hang_monitor: HangMonitor,
        *,
        keeps_nodes: bool,
        under_way: bool,
    ) -> None:
        """Wait for all nodes of a plan; those of an attempt that is `under_way` have started."""
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
        """Nodes that have taken the places of lost ones and not started yet."""
        self.silent_nodes = set(self.open)
        """Nodes without any output of workers so far, which may still be at the rendezvous."""
        self.cold_nodes: set[str] = set()
        """Nodes that start their workers without preloaded modules."""
        self.ranks = {node.name: frozenset(node.ranks) for node in plan.nodes}
        """Workers of each node; its reports about others are ignored."""
        self.ended_workers: set[tuple[str, int]] = set()
        self.begun_at = time.monotonic()
        self.moved_at = self.begun_at
        """Time when a worker has printed something or ended, for the last time."""
        self.stop_deadline: float | None = None
        self.absence = (0.0, 0.0)
        """Seconds for which the launcher did not run, if nodes may think it gone, and until when that explains what
        ends."""
        self.give_up_replacing: Callable[[], AbstractSet[str]] | None = None
        """Ends what replaces lost workers; returns the nodes that stay lost."""

    def give_up(self, name: str, *, state: str = "lost") -> None:
        """Stop waiting for a node; what is left there is unknown."""
        self.open.discard(name)
        self.starting.discard(name)
        self.outcome.left_behind[name] = None
        self.gang.emit(NodeChanged(node=name, state=state))

    def lose(self, nodes: AbstractSet[str]) -> None:
        """No other node takes the places of these."""
        for name in sorted(nodes & self.open):
            self.outcome.lost_nodes.append(name)
            self.give_up(name)

    def stop_others(self, reason: str, *, at_once: bool = False) -> None:
        """Stop all nodes, with the time that workers have to save, or at once."""
        if self.stop_deadline is not None:
            return
        if self.give_up_replacing is not None:
            self.lose(self.give_up_replacing())
        self.gang.emit(Stopping(reason=reason))
        self.hang_monitor.stopping()
        self.stop_deadline = time.monotonic() + self.plan.grace_s + STOP_MARGIN_S
        for name in self.open:
            self.gang.sessions[name].send(StopAttempt(now=at_once))

    def interrupt(self, number: int, *, hard: bool) -> None:
        """Stop because of a signal; at a second signal, without waiting for the workers."""
        if self.outcome.stopped_by is None:
            self.outcome.stopped_by = number
            self.stop_others(f"signal {number}")
        if hard and self.stop_deadline is not None:
            self.stop_deadline = min(self.stop_deadline, time.monotonic() + 3)
            for name in self.open:
                self.gang.sessions[name].send(StopAttempt(now=True))

    def replace_node(self, lost: str, name: str, plan: Plan) -> None:
        """Put a node into the place of a lost one, which may be the same; its workers are being started."""
        self.plan = plan
        self.ranks = {node.name: frozenset(node.ranks) for node in plan.nodes}
        self.hang_monitor.node_of_rank = {rank: node.name for node in plan.nodes for rank in node.ranks}
        self.open.discard(lost)
        self.open.add(name)
        self.joining.add(name)
        self.silent_nodes.add(name)
        self.cold_nodes.discard(name)

    def excuse_absence(self) -> None:
        """Excuse all nodes for deadlines that passed while this process did not run."""
        away_s, self.gang.away_s = self.gang.away_s, 0.0
        if not away_s:
            return
        now = time.monotonic()
        self.begun_at = max(self.begun_at, now) if self.starting else self.begun_at
        if self.stop_deadline is not None:
            self.stop_deadline = max(self.stop_deadline, now + self.plan.grace_s + 5)
        if away_s > self.link_timeout_s - 2 * PING_S and not self.keeps_nodes:
            self.absence = (away_s, now + self.link_timeout_s + self.plan.grace_s + 5)

    def is_explained(self) -> bool:
        """Return whether what ends now may end because nodes had to take the launcher for gone."""
        return time.monotonic() < self.absence[1] and not self.outcome.failures and self.outcome.stopped_by is None

    def end_for_absence(self) -> None:
        """End an attempt that nodes have ended because the launcher did not run."""
        self.outcome.away_s = self.absence[0]
        self.stop_others(f"this launcher did not run for {self.absence[0]:.0f} s")
