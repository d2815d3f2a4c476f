"""What happened to a run and its nodes, derived from its events. Pure.

Times are seconds since the run began, by the control machine's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """What a node was about for a while."""

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
        """The marks of these kinds."""
        return [mark for mark in self.marks if mark.kind in kinds]


def history_of(events: Iterable[Mapping[str, Any]], *, began: float, length_s: float) -> History:
    """The course of a run.

    Args:
        events: as events.jsonl has them.
        began: when the run began, seconds since the epoch.
        length_s: how long it took, or has taken so far.
    """
    history = History(length_s=length_s)
    doing: dict[str, tuple[str, float]] = {}
    ending_all = False
    for event in events:
        now_s = min(max(0.0, float(event.get("time", began)) - began), length_s)
        kind = str(event.get("event", ""))
        if kind == "plan":
            for node in event.get("nodes", []):
                _enter(history, doing, str(node), "connecting", now_s)
        elif kind == "node" and "node" in event:
            node, state = str(event["node"]), str(event.get("state", ""))
            _enter(history, doing, node, state, now_s)
            if event.get("interface"):
                history.interfaces[node] = str(event["interface"])
            if state in ("lost", "failed", "away"):
                reason = f": {event['error']}" if event.get("error") else ""
                text = f"was {state}{reason}" if state != "away" else "is unreachable; its workers continue"
                history.marks.append(Mark(time_s=now_s, kind="failure", text=text, node=node))
        else:
            mark = _mark(kind, event, now_s, consequence=ending_all)
            ending_all = kind == "stopping" or (ending_all and kind != "start")
            if mark is not None:
                history.marks.append(mark)
            if kind == "restart" and event.get("node"):
                history.failures[str(event["node"])] = history.failures.get(str(event["node"]), 0) + 1
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


def _mark(kind: str, event: Mapping[str, Any], now_s: float, *, consequence: bool) -> Mark | None:
    """What an event means to a reader; None when it says nothing new."""
    node = str(event.get("node") or "")
    if kind == "exit" and event.get("exit_code"):
        text = f"{_rank(event)} {ending(event)}"
        return Mark(time_s=now_s, kind="exit" if consequence else "failure", text=text, node=node)
    if kind == "restart":
        wait = f", after a wait of {event['wait_s']:g} s" if event.get("wait_s") else ""
        text = (
            f"restart {event.get('attempt')} of {event.get('of')}{wait}: {subject_of(event)} {event.get('reason', '')}"
        )
        return Mark(time_s=now_s, kind="restart", text=text, node=node)
    if kind == "start" and not event.get("attempt"):
        return None
    template = _WORDS.get(kind)
    if template is None:
        return None
    return Mark(time_s=now_s, kind=template[0], text=template[1].format_map(_Told(event)), node=node)


_WORDS = {
    "start": ("note", "attempt {attempt} starts on {world_size} workers"),
    "snapshot": ("snapshot", "snapshot of step {step}"),
    "hang": ("hang", "no progress for {silent_s} s"),
    "stopping": ("stop", "all nodes are stopped: {reason}"),
    "replaced": ("failure", "replaced by {by}: {reason}"),
    "left-out": ("failure", "is left out, {nodes} nodes continue: {reason}"),
    "taken-up": ("note", "a new launcher takes over the run"),
    "time-is-up": ("stop", "the job's time limit is reached (job.time_s)"),
    "note": ("note", "{text}"),
    "done": ("end", "{status}"),
}
"""Event -> kind of the mark, and what it says."""


class _Told(dict[str, Any]):
    """The facts of an event; an older version of dtctl may have told fewer."""

    def __missing__(self, key: str) -> str:
        return "?"


def _rank(event: Mapping[str, Any]) -> str:
    rank = event.get("rank")
    return f"rank {rank}" if isinstance(rank, int) and rank >= 0 else "the agent"


def subject_of(failure: Mapping[str, Any]) -> str:
    """`rank 3 on node2`, `node2`, or `a worker` where it is not known."""
    node, rank = failure.get("node"), failure.get("rank")
    if not node:
        return "a worker"
    return f"rank {rank} on {node}" if isinstance(rank, int) and rank >= 0 else str(node)


def ending(failure: Mapping[str, Any]) -> str:
    """`was ended by signal 9 (SIGKILL)`, `ended with exit code 1`, `was lost`."""
    import signal

    number, code = failure.get("signal"), failure.get("exit_code")
    if number:
        name = next((f" ({candidate.name})" for candidate in signal.Signals if candidate == number), "")
        return f"was ended by signal {number}{name}"
    return "was lost" if code is None else f"ended with exit code {code}"
