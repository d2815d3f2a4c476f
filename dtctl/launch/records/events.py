"""Events of a run: a type per event, its line in events.jsonl, and the one fold from events to a run's state.

A launcher creates events; the terminal, `--json` and the run's record receive the same ones. Who reads a record gets
them back from `parse`, which leaves out what is none: a job, a full disk or a person may have written it. Versions of
dtctl differ in what they record, so most fields have a default, and fields that are not known are not read.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Final, Protocol, get_args, get_origin, get_type_hints

from dtctl import schema
from dtctl.schema import Check, InvalidMessage

Moment = Annotated[float, schema.moment]
"""Seconds since the epoch."""
Seconds = Annotated[float, schema.number]
"""A duration; neither infinite nor NaN."""
Index = Annotated[int, schema.integer(-(1 << 31), 1 << 31)]
Count = Annotated[int, schema.integer(0)]

_OPTIONAL: Final = {"optional": True}
"""Mark of fields that are left out of the JSON object while they are None or empty."""


def _now() -> float:
    return round(time.time(), 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run."""

    event: ClassVar[str]
    """Value of the key `event` in JSON."""
    recorded: ClassVar[bool] = True
    """True if it is written into events.jsonl."""
    time: Moment = field(default_factory=_now)

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object: `event`, `time`, and its facts."""
        facts = _object(self)
        return {"event": self.event, "time": facts.pop("time"), **facts}


def _object(value: Any) -> dict[str, Any]:
    items = {}
    for each in fields(value):
        item = getattr(value, each.name)
        if each.metadata.get("optional") and (item is None or item == {}):
            continue
        items[each.name] = _plain(item)
    return items


def _plain(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {key: _plain(inner) for key, inner in item.items()}
    if isinstance(item, tuple):
        return [_plain(inner) for inner in item]
    return _object(item) if is_dataclass(item) else item


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlanned(Event):
    """The first event of a run."""

    event = "plan"
    run: str = ""
    kind: str = ""
    """torchrun, direct, ...: how workers are started."""
    world_size: Count = 0
    nodes: tuple[str, ...] = ()
    """Empty for a job of Slurm, which has none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushProgress:
    """Progress of the code on its way to a node."""

    sent: Count | None = field(default=None, metadata=_OPTIONAL)
    """Bytes so far."""
    files: Count | None = field(default=None, metadata=_OPTIONAL)
    bytes: Count | None = field(default=None, metadata=_OPTIONAL)
    state: str | None = field(default=None, metadata=_OPTIONAL)
    """`have`: the node had it already."""
    path: str | None = field(default=None, metadata=_OPTIONAL)
    """Folder on the node."""


class PushReport(Protocol):
    """Takes the progress of a push to one node."""

    def __call__(self, sent_bytes: int, note: str = "", /) -> None:
        """Report how many bytes the node has, and a note for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged(Event):
    """A node is in another state."""

    event = "node"
    node: str
    state: str
    """connected, hello, pushing, pushed, ready, started, running, away, stopped, lost or failed"""
    push: PushProgress | None = field(default=None, metadata=_OPTIONAL)
    error: str | None = field(default=None, metadata=_OPTIONAL)
    interface: str | None = field(default=None, metadata=_OPTIONAL)
    """The network interface between the nodes, as the node has found it."""
    left: Count | None = field(default=None, metadata=_OPTIONAL)
    """Processes left there after a stop; None: not asked, or it could not be."""

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object; `left` is null for a node that is over and could not be asked."""
        facts = super(NodeChanged, self).to_json()  # slots make another class of this one
        return {**facts, "left": self.left} if self.state in ("stopped", "lost") else facts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarting(Event):
    """The launcher requests all nodes to start their workers."""

    event = "start"
    attempt: Index = 0
    rendezvous: str | None = field(default=None, metadata=_OPTIONAL)
    world_size: Count | None = field(default=None, metadata=_OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRunning(Event):
    """Every node has started its workers."""

    event = "started"
    attempt: Index = 0
    launch_s: Seconds | None = None
    """Seconds from the start of the launcher to the first of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(Event):
    """A worker's process has ended."""

    event = "exit"
    node: str = ""
    rank: Index | None = None
    """-1: torchrun's agent."""
    exit_code: Index | None = None
    signal: Index | None = None
    killed: bool | None = field(default=None, metadata=_OPTIONAL)
    """True if dtctl has killed it, since it did not end when it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Event):
    """Something that is no failure and may explain one."""

    event = "note"
    node: str | None = None
    text: str = ""
    warning: bool | None = field(default=None, metadata=_OPTIONAL)
    """True if the user should read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertChanged(Event):
    """A rule of `metrics.alerts` applies, or no longer does."""

    event = "alert"
    alert: str
    """no-step, loss-not-finite, restart-N or throughput"""
    state: str
    """firing or resolved"""
    text: str = ""

    @property
    def firing(self) -> dict[str, AlertChanged]:
        """The alert by its name while it fires; empty once it is over."""
        return {self.alert: self} if self.state == "firing" else {}

    @property
    def told(self) -> str:
        """Return the event in words: `alert no-step, firing: no step for 600 s after step 70`."""
        return f"alert {self.alert}, {self.state}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(Event):
    """The launcher requests all nodes to stop their workers."""

    event = "stopping"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBegun(Event):
    """Workers have begun to write a snapshot."""

    event = "snapshot"
    step: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """A training continues from a snapshot; the steps that show whether it is exact have not been repeated yet."""

    event = "resumed"
    step: Count = 0
    """Step of the snapshot."""
    verdict: str | None = None
    """exact, not-exact or not-confirmed; None before steps were repeated."""
    steps: Count = 0
    """Number of steps that were repeated bit for bit."""
    differs: str | None = None
    """state, loss, gradient or update: the first thing that is not as it was."""
    why: tuple[str, ...] = ()
    """Known differences, a phrase each."""

    @property
    def told(self) -> str:
        """Return the event in words: `resumed at step 400`."""
        return f"resumed at step {self.step}{_of_known(self.why)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed(Event):
    """Verdict after the steps that follow a snapshot were repeated; as `Resumed`."""

    event = "confirmed"
    step: Count = 0
    verdict: str | None = None
    steps: Count = 0
    differs: str | None = None
    why: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """Return the event in words: `resumed at step 400: exact, 2 steps repeated bit for bit`."""
        found = f"{(self.verdict or '').replace('-', ' ')}, {self.steps} steps repeated bit for bit"
        differs = f", then another {self.differs}" if self.differs else ""
        return f"resumed at step {self.step}: {found}{differs}{_of_known(self.why)}"


def _of_known(why: tuple[str, ...]) -> str:
    return f" ({'; '.join(why)})" if why else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung(Event):
    """The run makes no progress; the stacks of all workers are requested."""

    event = "hang"
    silent_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeIsUp(Event):
    """`job.time_s` has passed."""

    event = "time-is-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarting(Event):
    """Another attempt follows one that has failed."""

    event = "restart"
    attempt: Index = 0
    of: Index = 0
    """Most restarts."""
    reason: str | None = None
    node: str | None = None
    rank: Index | None = None
    """Rank of the first failure; None: the node as a whole, or the agent that starts its workers."""
    exit_code: Index | None = field(default=None, metadata=_OPTIONAL)
    """Exit code of the first failure, as a shell counts it; None: the node was lost."""
    wait_s: Seconds | None = field(default=None, metadata=_OPTIONAL)

    @property
    def cause(self) -> str:
        """The reason with its subject: `rank 1 on node2 was ended by signal 9 (SIGKILL)`."""
        if not self.node:
            return self.reason or ""
        return f"{subject_of(self.node, self.rank, self.exit_code)} {self.reason or ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A worker that was lost, and the process that has its place."""

    rank: Index
    node: str = ""
    """Place where it was lost."""
    by: str = ""
    """Node of the other process."""
    reason: str = ""
    """Reason of the loss: `was ended by signal 9 (SIGKILL)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A worker whose process stayed."""

    rank: Index
    node: str = ""
    pid: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed(Event):
    """Lost workers were replaced, and the others have stayed."""

    event = "heal"
    step: Count = 0
    """Steps done then; training continues from there."""
    replaced: tuple[Replacement, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    repeated_steps: Count = 0
    """Steps that are done again, by the workers that had begun them: 0 or 1."""
    detect_s: Seconds = 0.0
    """Seconds from the loss until it was noticed: for a worker that hangs, since anything has moved."""
    heal_s: Seconds = 0.0
    """Seconds from then until all workers were in the new group."""

    @property
    def told(self) -> str:
        """Return it in words: `rank 1 on node2 was ended by signal 9 (SIGKILL): replaced in 0.21 s`."""
        lost = "; ".join(f"rank {each.rank} on {each.node} {each.reason}" for each in self.replaced)
        count = len(self.survivors)
        if not self.replaced:
            return f"connections between workers were lost: made anew after step {self.step} in {self.heal_s:.2f} s"
        others = "the other one stayed" if count == 1 else f"the {count} others stayed"
        again = ", and do this step again" if self.repeated_steps else ""
        return f"{lost}: replaced after step {self.step} in {self.heal_s:.2f} s; {others}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherAway(Event):
    """The launcher did not run for a while, the nodes have ended the attempt for it, and another one follows."""

    event = "launcher-away"
    away_s: Seconds = 0.0
    attempt: Index = 0
    """The one that follows; it is no restart of `job.max_restarts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplaced(Event):
    """A spare takes the place of a node."""

    event = "replaced"
    node: str = ""
    by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeftOut(Event):
    """The run continues without a node."""

    event = "left-out"
    node: str = ""
    nodes: Count = 0
    """Number of nodes with which it continues."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUp(Event):
    """A new launcher controls the run."""

    event = "taken-up"
    pid: Count = 0
    attempt: Index | None = field(default=None, metadata=_OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitting(Event):
    """The run is about to be submitted. A reader that finds this without `submitted` looks for this script's job."""

    event = "submitting"
    script: str
    """The batch file, on the host of Slurm's commands."""
    index: Count | None = None
    """Index of the task, where the job is an array."""
    site: str = ""
    folder: str = ""
    python: str = ""
    workers_apart: bool = False
    slots: Count = 1
    max_attempts: Index = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted(Event):
    """Slurm has accepted the run as a job."""

    event = "submitted"
    job: str
    site: str = ""
    """Host on which Slurm's commands run."""
    folder: str = ""
    """Folder of the job's files, on that host."""
    python: str = ""
    """Interpreter there."""
    workers_apart: bool = False
    """True if each worker is a task of its own (kind direct)."""
    slots: Count = 1
    max_attempts: Index = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQueued(Event):
    """The job waits for Slurm."""

    event = "queued"
    job: str = ""
    state: str | None = None
    """Slurm's word for it."""
    reason: str | None = None
    start: Seconds | None = None
    """Time when Slurm expects to start it, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAllocated(Event):
    """Slurm has given the job these nodes."""

    event = "allocated"
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """Worker or node that failed first."""

    node: str | None = None
    rank: Index | None = None
    exit_code: Index | None = None
    signal: Index | None = None
    log: str | None = None
    """File on the control machine."""
    summary: str | None = None
    hang: bool | None = field(default=None, metadata=_OPTIONAL)
    """True if it was ended because it made no progress."""


def subject_of(node: str | None, rank: int | None, exit_code: int | None) -> str:
    """Name what has failed: `rank 3 on node2`, `node node2` that was lost, `the agent on node2`, or `a worker`.

    The agent is the program that starts the workers of a node, such as torchrun. If it does not report which of them
    has failed, or has failed itself, this is no failure of the node.
    """
    if not node:
        return "a worker"
    if rank is not None and rank >= 0:
        return f"rank {rank} on {node}"
    return f"node {node}" if exit_code is None else f"the agent on {node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Files that a run has left on a node."""

    folder: str = ""
    """Working folder on the node."""
    files: Count = 0
    bytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The last event of a run."""

    event = "done"
    run: str = ""
    status: str
    """succeeded, failed or stopped"""
    exit_code: Index = 0
    attempts: Index = 0
    first_failure: FirstFailure | None = None
    launch_s: Seconds | None = None
    duration_s: Seconds | None = None
    left_behind: Count | None = None
    """Processes left on all nodes; None when one of them could not be asked."""
    goodput: Seconds | None = field(default=None, metadata=_OPTIONAL)
    lost_output: Mapping[str, int] = field(default_factory=dict, metadata=_OPTIONAL)
    """Node -> bytes that could not be stored."""
    cut_output: Mapping[str, int] = field(default_factory=dict, metadata=_OPTIONAL)
    """Node -> bytes that `job.log_mib` has cut out."""
    outputs: Mapping[str, Outputs] = field(default_factory=dict, metadata=_OPTIONAL)
    """Node -> what its programs have written, where there is any."""
    error: str | None = field(default=None, metadata=_OPTIONAL)
    """Reason why it was never started, or could not be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine(Event):
    """A line that a worker has printed."""

    event = "log"
    recorded = False
    node: str
    rank: int
    text: str


Emit = Callable[[Event], None]
TYPES: Final[Mapping[str, type[Event]]] = {each.event: each for each in Event.__subclasses__() if each.recorded}


def parse(line: str) -> Event | None:
    """Return the event in a line of events.jsonl; None when the line holds none."""
    try:
        document = json.loads(line)
        kind: Any = TYPES.get(document["event"])
        event: Event | None = None if kind is None else _check_of(kind)(document)
        return event
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@functools.cache
def _check_of(hint: Any) -> Check[Any]:
    """Make the check of the values that an annotation allows."""
    if is_dataclass(hint):
        kind: Any = hint
        hints = get_type_hints(kind, include_extras=True)
        keys = schema.form({each.name: _check_of(hints[each.name]) for each in fields(kind)})
        return lambda document: kind(**keys(document))
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        check: Check[Any] = hint.__metadata__[0]
        return check
    if origin is tuple:
        items = schema.list_of(_check_of(inner[0]))
        return lambda value: tuple(items(value))
    if origin is Mapping:
        return schema.mapping_of(_text, _check_of(inner[1]))
    if inner:
        return schema.nullable(_check_of(inner[0]))
    return {str: _text, bool: schema.flag, int: schema.integer(-(1 << 63))}[hint]


def _text(value: object) -> str:
    """Return a text that can be printed anywhere."""
    text = _ANY_TEXT(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidMessage("half a character") from None
    return text


_ANY_TEXT: Final = schema.text(1 << 24)


@dataclass(slots=True)
class RunProgress:
    """State of a run from its events: `apply` each of them, in their order."""

    status: str = "starting"
    """queued (Slurm has it), starting, running, stopping, succeeded, failed or stopped"""
    last: float | None = None
    """Time when the last event happened, in seconds since the epoch."""
    attempt: int = -1
    """The newest that was started; -1: none was."""
    launch_s: float | None = None
    nodes: dict[str, str] = field(default_factory=dict)
    """Node -> its last state."""
    all_nodes: set[str] = field(default_factory=set)
    """Every node that ever took part."""
    left: dict[str, int | None] = field(default_factory=dict)
    """Node -> processes left there; None while they may run, and when the node could not be asked."""
    restarts: list[Restarting] = field(default_factory=list)
    heals: list[Healed] = field(default_factory=list)
    """Workers that were replaced while the others stayed."""
    resume: Resumed | Confirmed | None = None
    """Newest resume, as far as it is known."""
    job: JobSubmitted | None = None
    waits: JobQueued | None = None
    """While the job waits."""
    alerts: dict[str, AlertChanged] = field(default_factory=dict)
    """Alerts that are firing."""
    end: RunEnded | None = None

    def apply(self, event: Event) -> None:
        """Take an event into account."""
        self.last = event.time
        match event:
            case NodeChanged():
                self._note_node(event)
            case RunPlanned() | NodesAllocated():
                self.nodes, self.waits = dict.fromkeys(event.nodes, "connecting"), None
                self.all_nodes.update(event.nodes)
            case NodeReplaced():
                self.nodes[event.by] = self.nodes.pop(event.node, "ready")
            case NodeLeftOut():
                self.nodes.pop(event.node, None)
            case JobSubmitted() | JobQueued():
                self._note_job(event)
            case AttemptStarting():
                self.attempt = event.attempt
                self.left = dict.fromkeys(self.nodes)
            case AttemptRunning():
                self.status, self.launch_s = "running", self.launch_s if self.launch_s is not None else event.launch_s
            case Stopping():
                self.status = "stopping"
            case LauncherAway() | Restarting():
                self.status = "starting"
                self.restarts += [event] if isinstance(event, Restarting) else []
            case Healed() | AlertChanged() | Resumed() | Confirmed():
                self._note(event)
            case RunEnded():
                self.status, self.end = event.status, event
                gone = ("lost", "failed")
                self.nodes = {node: state if state in gone else "stopped" for node, state in self.nodes.items()}

    def _note_node(self, event: NodeChanged) -> None:
        self.nodes[event.node] = event.state
        self.all_nodes.add(event.node)
        if event.left is not None:
            self.left[event.node] = event.left

    def _note_job(self, event: JobSubmitted | JobQueued) -> None:
        self.status = "queued"
        if isinstance(event, JobSubmitted):
            self.job = event
        else:
            self.nodes, self.waits = {}, event

    def _note(self, event: Healed | AlertChanged | Resumed | Confirmed) -> None:
        """Keep what changes no status."""
        if isinstance(event, Healed):
            self.heals.append(event)
        elif isinstance(event, Resumed | Confirmed):
            self.resume = event
        else:
            self.alerts.pop(event.alert, None)
            self.alerts |= event.firing

    @property
    def left_behind(self) -> int | None:
        """Processes left on all nodes; None when that is not known."""
        counts = list(self.left.values())
        return None if None in counts else sum(count or 0 for count in counts)
