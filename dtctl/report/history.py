"""History of a run and its nodes, derived from its events. Pure.

Times are seconds since the run began, by the control machine's clock.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from dtctl.launch.records.events import (
    AlertChanged,
    AttemptStarting,
    Event,
    FirstFailure,
    Healed,
    Hung,
    LauncherAway,
    NodeChanged,
    NodeLeftOut,
    NodeReplaced,
    Note,
    Restarting,
    RunEnded,
    RunPlanned,
    SnapshotBegun,
    Stopping,
    TakenUp,
    TimeIsUp,
    WorkerExited,
)  # fmt: skip

DOING = {
    "connecting": "prepare", "connected": "prepare", "hello": "prepare", "pushing": "prepare", "pushed": "prepare",
    "ready": "prepare", "started": "start", "running": "run", "away": "away",
}  # fmt: skip
"""State of a node -> what it is about; in other states it is about nothing."""
TOLD = {
    "prepare": "connected, receives code",
    "start": "workers start and find each other",
    "run": "workers run",
    "away": "unreachable, continues by itself",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Span of time in which a node was in one state."""

    node: str
    doing: str
    """A key of `TOLD`."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at one time."""

    time_s: float
    kind: str
    """failure, exit (that of a worker whose attempt was being ended), restart, snapshot, hang, note, stop, end"""
    text: str
    node: str = ""
    """Empty: it concerns all."""


@dataclass(slots=True)
class History:
    """The course of a run."""

    length_s: float = 0.0
    nodes: dict[str, str] = field(default_factory=dict)
    """Every node that ever took part, and its last state."""
    interfaces: dict[str, str] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    """Node -> how often it was the first to fail."""

    def of(self, *kinds: str) -> list[Mark]:
        """Return the marks of these kinds."""
        return [mark for mark in self.marks if mark.kind in kinds]


def history_of(events: Iterable[Event], *, began: float, length_s: float) -> History:
    """Return the course of a run.

    Args:
        events: as events.jsonl has them.
        began: when the run began, seconds since the epoch.
        length_s: how long it took, or has taken so far.
    """
    history = History(length_s=length_s)
    doing: dict[str, tuple[str, float]] = {}
    ending_all = False
    for event in events:
        now_s = min(max(0.0, event.time - began), length_s)
        if isinstance(event, RunPlanned):
            for node in event.nodes:
                _enter(history, doing, node, "connecting", now_s)
        elif isinstance(event, NodeChanged):
            _enter(history, doing, event.node, event.state, now_s)
            if event.interface:
                history.interfaces[event.node] = event.interface
            if event.state in ("lost", "failed", "away"):
                reason = f": {event.error}" if event.error else ""
                text = f"was {event.state}{reason}" if event.state != "away" else "is unreachable; its workers continue"
                history.marks.append(Mark(time_s=now_s, kind="failure", text=text, node=event.node))
        else:
            kind, text = _description(event, consequence=ending_all)
            ending_all = isinstance(event, Stopping) or (ending_all and not isinstance(event, AttemptStarting))
            if kind:
                history.marks.append(Mark(time_s=now_s, kind=kind, text=text, node=getattr(event, "node", "") or ""))
            if isinstance(event, Restarting) and event.node:
                history.failures[event.node] = history.failures.get(event.node, 0) + 1
    for node in list(doing):
        _enter(history, doing, node, "over", length_s)
    return history


def _enter(history: History, doing: dict[str, tuple[str, float]], node: str, state: str, now_s: float) -> None:
    """A node is in another state from now on."""
    activity, since_s = doing.get(node, ("", now_s))
    next_activity = DOING.get(state, "")
    if activity != next_activity or not next_activity:
        if activity:
            history.spans.append(Span(node=node, doing=activity, begin_s=since_s, end_s=now_s))
        doing[node] = (next_activity, now_s)
    if state != "over":
        history.nodes[node] = state


def _description(event: Event, *, consequence: bool) -> tuple[str, str]:
    """Kind and text of the mark of an event; nothing where it tells a reader nothing new.

    Args:
        event: any but those of nodes.
        consequence: the attempt is being ended, so a worker that exits now is not the cause.
    """
    match event:
        case WorkerExited() if event.exit_code:
            process = f"rank {event.rank}" if event.rank is not None and event.rank >= 0 else "the agent"
            return "exit" if consequence else "failure", f"{process} {ending(event)}"
        case Restarting():
            wait = f", after a wait of {event.wait_s:g} s" if event.wait_s else ""
            return "restart", f"restart {event.attempt} of {event.of}{wait}: {event.cause}"
        case AttemptStarting() if event.attempt:
            workers = f" on {event.world_size} workers" if event.world_size else ""
            return "note", f"attempt {event.attempt} starts{workers}"
        case SnapshotBegun():
            return "snapshot", f"snapshot of step {event.step}"
        case Hung():
            return "hang", f"no progress for {event.silent_s:g} s"
        case Stopping():
            return "stop", f"all nodes are stopped: {event.reason}"
        case Healed() | NodeReplaced() | NodeLeftOut():
            return _change(event)
        case TakenUp() | LauncherAway():
            return _launcher_mark(event)
        case TimeIsUp():
            return "stop", "the job's time limit is reached (job.time_s)"
        case Note(text=told) | AlertChanged(told=told):
            return "note", told
        case RunEnded():
            return "end", event.status
    return "", ""


def _launcher_mark(event: TakenUp | LauncherAway) -> tuple[str, str]:
    """Return kind and text of the mark of what has become of the launcher."""
    if isinstance(event, TakenUp):
        return "note", "a new launcher takes over the run"
    return "restart", f"the launcher did not run for {event.away_s:.0f} s; attempt {event.attempt} follows"


def _change(event: Healed | NodeReplaced | NodeLeftOut) -> tuple[str, str]:
    """Kind and text of the mark of who has taken whose place, or whose place is empty."""
    if isinstance(event, NodeReplaced):
        return "failure", f"replaced by {event.by}: {event.reason}"
    if isinstance(event, NodeLeftOut):
        return "failure", f"is left out, {event.nodes} nodes continue: {event.reason}"
    return "restart", event.told


def ending(failure: WorkerExited | FirstFailure) -> str:
    """`was ended by signal 9 (SIGKILL)`, `ended with exit code 1`, `was lost`."""
    if isinstance(failure, WorkerExited) and failure.killed:
        return "was killed by dtctl: it did not end when it was asked to"
    if failure.signal:
        name = next((f" ({number.name})" for number in signal.Signals if number == failure.signal), "")
        return f"was ended by signal {failure.signal}{name}"
    return "was lost" if failure.exit_code is None else f"ended with exit code {failure.exit_code}"
