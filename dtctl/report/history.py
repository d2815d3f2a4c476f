"""History of a run and its nodes, derived from its events. Pure.

Times are seconds since the run began, by the control machine's clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dtctl.launch.records.events import (
    AlertChanged,
    AttemptRestarting,
    AttemptStarting,
    Event,
    HangDetected,
    LauncherPaused,
    LauncherReattached,
    NodeChanged,
    NodeDropped,
    NodeReplaced,
    Note,
    RunEnded,
    RunPlanned,
    RunStopping,
    SnapshotBegun,
    TimeLimitReached,
    WorkerExited,
    WorkersReplaced,
    describe_worker_end,
)  # fmt: skip
from dtctl.printable import format_count

DOING = {
    "connecting": "prepare", "connected": "prepare", "hello": "prepare", "pushing": "prepare", "pushed": "prepare",
    "ready": "prepare", "started": "start", "running": "run", "away": "away",
}  # fmt: skip
"""State of a node -> its activity in the timeline; other states have none."""
TOLD = {
    "prepare": "connected, receives code",
    "start": "workers start and connect to each other",
    "run": "workers run",
    "away": "unreachable, continues by itself",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpan:
    """Span of time in which a node was in one state."""

    node: str
    doing: str
    """A key of `TOLD`."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineMark:
    """Event on the timeline, at one time."""

    time_s: float
    kind: str
    """failure, exit (of a worker in an attempt that is being ended), restart, snapshot, hang, note, stop, end"""
    text: str
    node: str = ""
    """Name of the node; empty if the mark concerns all."""


@dataclass(slots=True)
class RunHistory:
    """The course of a run."""

    length_s: float = 0.0
    nodes: dict[str, str] = field(default_factory=dict)
    """Every node that ever took part, and its last state."""
    interfaces: dict[str, str] = field(default_factory=dict)
    spans: list[StateSpan] = field(default_factory=list)
    marks: list[TimelineMark] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    """Node -> number of times that it was the first to fail."""

    def list_marks_of(self, *kinds: str) -> list[TimelineMark]:
        """Return the marks of these kinds."""
        return [mark for mark in self.marks if mark.kind in kinds]


def build_run_history(events: Iterable[Event], *, began: float, length_s: float) -> RunHistory:
    """Return the course of a run.

    Args:
        events: as events.jsonl has them.
        began: when the run began, seconds since the epoch.
        length_s: how long it took, or has taken so far.
    """
    history = RunHistory(length_s=length_s)
    doing: dict[str, tuple[str, float]] = {}
    ending_all = False
    for event in events:
        now_s = min(max(0.0, event.time - began), length_s)
        if isinstance(event, RunPlanned):
            for node in event.nodes:
                _change_node_state(history, doing, node, "connecting", now_s)
        elif isinstance(event, NodeChanged):
            _change_node_state(history, doing, event.node, event.state, now_s)
            if event.interface:
                history.interfaces[event.node] = event.interface
            if event.state in ("lost", "failed", "away"):
                reason = f": {event.error}" if event.error else ""
                text = f"was {event.state}{reason}" if event.state != "away" else "is unreachable; its workers continue"
                history.marks.append(TimelineMark(time_s=now_s, kind="failure", text=text, node=event.node))
        else:
            kind, text = _describe_event_mark(event, consequence=ending_all)
            ending_all = isinstance(event, RunStopping) or (ending_all and not isinstance(event, AttemptStarting))
            if kind:
                history.marks.append(
                    TimelineMark(time_s=now_s, kind=kind, text=text, node=getattr(event, "node", "") or "")
                )
            if isinstance(event, AttemptRestarting) and event.node:
                history.failures[event.node] = history.failures.get(event.node, 0) + 1
    for node in list(doing):
        _change_node_state(history, doing, node, "over", length_s)
    return history


def _change_node_state(
    history: RunHistory, doing: dict[str, tuple[str, float]], node: str, state: str, now_s: float
) -> None:
    """Record that a node has changed its state."""
    activity, since_s = doing.get(node, ("", now_s))
    next_activity = DOING.get(state, "")
    if activity != next_activity or not next_activity:
        if activity:
            history.spans.append(StateSpan(node=node, doing=activity, begin_s=since_s, end_s=now_s))
        doing[node] = (next_activity, now_s)
    if state != "over":
        history.nodes[node] = state


def _describe_event_mark(event: Event, *, consequence: bool) -> tuple[str, str]:
    """Return kind and text of the mark of an event; empty texts if other marks show the same.

    Args:
        event: any but those of nodes.
        consequence: the attempt is being ended, so a worker that exits now is not the cause.
    """
    match event:
        case WorkerExited() if event.exit_code:
            process = f"rank {event.rank}" if event.rank is not None and event.rank >= 0 else "the agent"
            return "exit" if consequence else "failure", f"{process} {describe_worker_end(event)}"
        case AttemptRestarting():
            wait = f", after a wait of {event.wait_s:g} s" if event.wait_s else ""
            return "restart", f"restart {event.attempt} of {event.of}{wait}: {event.cause}"
        case AttemptStarting() if event.attempt:
            workers = f" on {format_count(event.world_size, 'worker')}" if event.world_size else ""
            return "note", f"attempt {event.attempt} starts{workers}"
        case SnapshotBegun():
            return "snapshot", f"snapshot of step {event.step}"
        case HangDetected():
            return "hang", f"no progress for {event.silent_s:g} s"
        case RunStopping():
            return "stop", f"all nodes are stopped: {event.reason}"
        case WorkersReplaced() | NodeReplaced() | NodeDropped():
            return _describe_replacement_mark(event)
        case LauncherReattached() | LauncherPaused():
            return _launcher_mark(event)
        case TimeLimitReached():
            return "stop", "the job's time limit is reached (job.time_s)"
        case Note(text=told) | AlertChanged(event_text=told):
            return "note", told
        case RunEnded():
            return "end", event.status
    return "", ""


def _launcher_mark(event: LauncherReattached | LauncherPaused) -> tuple[str, str]:
    """Return kind and text of the mark of a change of the launcher."""
    if isinstance(event, LauncherReattached):
        return "note", "a new launcher takes over the run"
    return "restart", f"the launcher did not run for {event.away_s:.0f} s; attempt {event.attempt} follows"


def _describe_replacement_mark(event: WorkersReplaced | NodeReplaced | NodeDropped) -> tuple[str, str]:
    """Return kind and text of the mark of a replacement, or of a node that was left out."""
    if isinstance(event, NodeReplaced):
        return "failure", f"replaced by {event.by}: {event.reason}"
    if isinstance(event, NodeDropped):
        return (
            "failure",
            f"is left out, {format_count(event.nodes, 'node continues', 'nodes continue')}: {event.reason}",
        )
    return "restart", event.event_text
