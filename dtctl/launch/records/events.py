"""Events of a run: a type for each event, its line in events.jsonl, and the state of a run that follows from them.

A launcher creates events; the terminal, `--json` and the run's record receive the same ones. `parse_event` reads them
from a record and skips invalid lines, since a job, a full disk or a person may have changed the file. Versions of dtctl
record different fields, so most fields have a default, and unknown fields are not read.
"""

from __future__ import annotations

import functools
import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Final, Protocol, get_args, get_origin, get_type_hints

from dtctl import schema
from dtctl.printable import format_count
from dtctl.schema import Check, InvalidMessage

Moment = Annotated[float, schema.check_moment]
"""Seconds since the epoch."""
Seconds = Annotated[float, schema.check_number]
"""Duration in seconds, neither infinite nor NaN."""
Index = Annotated[int, schema.make_integer_check(-(1 << 31), 1 << 31)]
Count = Annotated[int, schema.make_integer_check(0)]

_OPTIONAL: Final = {"optional": True}
"""Mark of fields that are left out of the JSON object while they are None or empty."""


def _read_wall_clock() -> float:
    return round(time.time(), 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run."""

    event: ClassVar[str]
    """Value of the key `event` in JSON."""
    recorded: ClassVar[bool] = True
    """True if the event is written into events.jsonl."""
    time: Moment = field(default_factory=_read_wall_clock)

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object: `event`, `time`, and its facts."""
        facts = _convert_json_object(self)
        return {"event": self.event, "time": facts.pop("time"), **facts}


def _convert_json_object(value: Any) -> dict[str, Any]:
    items = {}
    for each in fields(value):
        item = getattr(value, each.name)
        if each.metadata.get("optional") and (item is None or item == {}):
            continue
        items[each.name] = _convert_json_value(item)
    return items


def _convert_json_value(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {key: _convert_json_value(inner) for key, inner in item.items()}
    if isinstance(item, tuple):
        return [_convert_json_value(inner) for inner in item]
    return _convert_json_object(item) if is_dataclass(item) else item


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlanned(Event):
    """The first event of a run."""

    event = "plan"
    run: str = ""
    kind: str = ""
    """Way in which workers are started: torchrun, direct, ..."""
    world_size: Count = 0
    nodes: tuple[str, ...] = ()
    """Names of the nodes; empty for a job of Slurm, whose nodes are not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushProgress:
    """Progress of a push to one node."""

    sent: Count | None = field(default=None, metadata=_OPTIONAL)
    """Bytes of the contents that the node has got so far."""
    of: Count | None = field(default=None, metadata=_OPTIONAL)
    """Bytes of the contents that the node lacked, as far as that is known."""
    files: Count | None = field(default=None, metadata=_OPTIONAL)
    bytes: Count | None = field(default=None, metadata=_OPTIONAL)
    """Compressed bytes that this machine has sent to the node."""
    state: str | None = field(default=None, metadata=_OPTIONAL)
    """State of the push, such as `have`: the node had the files already."""
    path: str | None = field(default=None, metadata=_OPTIONAL)
    """Folder on the node."""


class PushReport(Protocol):
    """Function that receives the progress of a push to one node."""

    def __call__(self, sent_bytes: int, of_bytes: int, note: str = "", /) -> None:
        """Report how many bytes of the contents the node has got, how many it lacked, and a note for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged(Event):
    """The state of a node has changed."""

    event = "node"
    node: str
    state: str
    """New state: connected, hello, pushing, pushed, ready, started, running, away, stopped, lost or failed."""
    push: PushProgress | None = field(default=None, metadata=_OPTIONAL)
    error: str | None = field(default=None, metadata=_OPTIONAL)
    interface: str | None = field(default=None, metadata=_OPTIONAL)
    """Network interface between the nodes, as found by the node."""
    left: Count | None = field(default=None, metadata=_OPTIONAL)
    """Number of processes left on the node after a stop; None: the node was not queried, or could not be."""

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object; `left` is null for a node that has ended and could not be queried."""
        # `slots=True` replaces the class, so super() needs the new one as an argument.
        facts = super(NodeChanged, self).to_json()
        return {**facts, "left": self.left} if self.state in ("stopped", "lost") else facts


@dataclass(frozen=True, slots=True, kw_only=True)
class PushAdvanced(Event):
    """Progress of the push to all nodes together."""

    event = "push"
    nodes: Count = 0
    nodes_done: Count = 0
    """Number of nodes that have all files."""
    bytes: Count = 0
    """Bytes of the contents that nodes have got so far, from here or from each other."""
    of: Count = 0
    """Bytes of the contents that the nodes lacked, as far as that is known."""
    bytes_per_s: Seconds = 0.0
    """Rate of the last seconds."""


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
    """Seconds from the start of the launcher to the first of these events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(Event):
    """A worker's process has ended."""

    event = "exit"
    node: str = ""
    rank: Index | None = None
    """Global rank; -1 for torchrun's agent."""
    exit_code: Index | None = None
    signal: Index | None = None
    killed: bool | None = field(default=None, metadata=_OPTIONAL)
    """True if dtctl has killed the worker, since it did not end within the grace period."""

    @property
    def event_text(self) -> str:
        """Return the event in words: `node2: rank 1 ended with signal 9`."""
        process = f"rank {self.rank}" if self.rank is not None and self.rank >= 0 else "agent"
        if self.killed:
            return f"{self.node}: {process} was killed by dtctl: it did not end within the grace period"
        cause = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
        return f"{self.node}: {process} ended with {cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Event):
    """A note about an event that is not a failure but may explain one."""

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
    """Name of the alert: no-step, loss-not-finite, restart-N or throughput."""
    state: str
    """State of the alert: firing or resolved."""
    text: str = ""

    @property
    def firing(self) -> dict[str, AlertChanged]:
        """Return the alert by its name while it fires; empty once it is resolved."""
        return {self.alert: self} if self.state == "firing" else {}

    @property
    def event_text(self) -> str:
        """Return the event in words: `alert no-step, firing: no step for 600 s after step 70`."""
        return f"alert {self.alert}, {self.state}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopping(Event):
    """The launcher requests all nodes to stop their workers."""

    event = "stopping"
    reason: str = ""

    @property
    def event_text(self) -> str:
        """Return the event in words: `stopping all nodes: rank 1 on node2 ended with exit code 1`."""
        return f"stopping all nodes: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBegun(Event):
    """Workers have begun to write a snapshot."""

    event = "snapshot"
    step: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(Event):
    """The run continues from a snapshot; the steps that show whether the resume is exact have not been repeated yet."""

    event = "resumed"
    step: Count = 0
    """Step of the snapshot."""
    verdict: str | None = None
    """Verdict: exact, not-exact or not-confirmed; None before steps were repeated."""
    steps: Count = 0
    """Number of steps that were repeated bit for bit."""
    differs: str | None = None
    """First value that differs: state, loss, gradient or update."""
    why: tuple[str, ...] = ()
    """Phrase for each known difference."""

    @property
    def event_text(self) -> str:
        """Return the event in words: `resumed at step 400`."""
        return f"resumed at step {self.step}{_of_known(self.why)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfirmed(Event):
    """Verdict after the steps that follow a snapshot were repeated, with the fields of `RunResumed`."""

    event = "confirmed"
    step: Count = 0
    verdict: str | None = None
    steps: Count = 0
    differs: str | None = None
    why: tuple[str, ...] = ()

    @property
    def event_text(self) -> str:
        """Return the event in words: `resumed at step 400: exact, 2 steps repeated bit for bit`."""
        found = f"{(self.verdict or '').replace('-', ' ')}, {format_count(self.steps, 'step')} repeated bit for bit"
        differs = f", then another {self.differs}" if self.differs else ""
        return f"resumed at step {self.step}: {found}{differs}{_of_known(self.why)}"


def _of_known(why: tuple[str, ...]) -> str:
    return f" ({'; '.join(why)})" if why else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDetected(Event):
    """The run makes no progress; the stacks of all workers are requested."""

    event = "hang"
    silent_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimitReached(Event):
    """End of `job.time_s`: the run is stopped."""

    event = "time-is-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRestarting(Event):
    """Another attempt follows a failed one."""

    event = "restart"
    attempt: Index = 0
    of: Index = 0
    """Most restarts that the run may have."""
    reason: str | None = None
    node: str | None = None
    rank: Index | None = None
    """Rank of the first failure; None: the node as a whole failed, or the agent that starts its workers."""
    exit_code: Index | None = field(default=None, metadata=_OPTIONAL)
    """Exit code of the first failure, in the form of a shell (128 + N for signal N); None: the node was lost."""
    wait_s: Seconds | None = field(default=None, metadata=_OPTIONAL)

    @property
    def cause(self) -> str:
        """Return the reason with its subject: `rank 1 on node2 was ended by signal 9 (SIGKILL)`."""
        if not self.node:
            return self.reason or ""
        return f"{describe_failure_subject(self.node, self.rank, self.exit_code)} {self.reason or ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedWorker:
    """A lost worker, and the process that takes its place."""

    rank: Index
    node: str = ""
    """Node of the lost worker."""
    by: str = ""
    """Node of the new process."""
    reason: str = ""
    """Reason of the loss: `was ended by signal 9 (SIGKILL)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivingWorker:
    """A worker whose process continued."""

    rank: Index
    node: str = ""
    pid: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersReplaced(Event):
    """Lost workers were replaced, while the processes of the others continued."""

    event = "heal"
    step: Count = 0
    """Number of steps done at that time, from which training continues."""
    replaced: tuple[ReplacedWorker, ...] = ()
    survivors: tuple[SurvivingWorker, ...] = ()
    repeated_steps: Count = 0
    """Number of steps that the workers which had begun them do again: 0 or 1."""
    detect_s: Seconds = 0.0
    """Seconds from the loss until it was detected; for a worker that hangs, since the last progress of any worker."""
    heal_s: Seconds = 0.0
    """Seconds from the detection until all workers were in the new group."""

    @property
    def event_text(self) -> str:
        """Return the event in words: `rank 1 on node2 was ended by signal 9 (SIGKILL): replaced in 0.21 s`."""
        lost = "; ".join(f"rank {each.rank} on {each.node} {each.reason}" for each in self.replaced)
        count = len(self.survivors)
        if not self.replaced:
            return f"connections between workers were lost: restored after step {self.step} in {self.heal_s:.2f} s"
        others = "the other one stayed" if count == 1 else f"the {count} others stayed"
        again = ", and do this step again" if self.repeated_steps else ""
        return f"{lost}: replaced after step {self.step} in {self.heal_s:.2f} s; {others}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherPaused(Event):
    """The nodes have ended the attempt because the launcher did not run for a while, and another attempt follows."""

    event = "launcher-away"
    away_s: Seconds = 0.0
    attempt: Index = 0
    """Number of the following attempt, which does not count as a restart of `job.max_restarts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplaced(Event):
    """A spare takes the place of a node."""

    event = "replaced"
    node: str = ""
    by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDropped(Event):
    """The run continues without a node."""

    event = "left-out"
    node: str = ""
    nodes: Count = 0
    """Number of nodes with which the run continues."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReattached(Event):
    """A new launcher controls the run."""

    event = "taken-up"
    pid: Count = 0
    attempt: Index | None = field(default=None, metadata=_OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitting(Event):
    """The run is about to be submitted; if no `submitted` follows, readers search for the job of this script."""

    event = "submitting"
    script: str
    """Path of the batch file on the host of Slurm's commands."""
    index: Count | None = None
    """Index of the task, if the job is an array."""
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
    """Folder of the job's files on that host."""
    python: str = ""
    """Path of Python on that host."""
    workers_apart: bool = False
    """True if each worker is a separate task (kind direct)."""
    slots: Count = 1
    max_attempts: Index = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQueued(Event):
    """The job waits for Slurm."""

    event = "queued"
    job: str = ""
    state: str | None = None
    """State of the job in Slurm's terms."""
    reason: str | None = None
    start: Seconds | None = None
    """Time when Slurm expects to start the job, in seconds since the epoch."""


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
    """Path of the log on the control machine."""
    summary: str | None = None
    hang: bool | None = field(default=None, metadata=_OPTIONAL)
    """True if the worker was ended because it made no progress."""

    @property
    def event_text(self) -> str:
        """Return the failure in words: `first failure: rank 1 on node2 was ended by signal 9 (SIGKILL)`."""
        subject = describe_failure_subject(self.node, self.rank, self.exit_code, hang=self.hang)
        return f"first failure: {subject} {'made no progress' if self.hang else describe_worker_end(self)}"


def describe_worker_end(failure: WorkerExited | FirstFailure) -> str:
    """Describe an end in words: `was ended by signal 9 (SIGKILL)`, `ended with exit code 1`, `was lost`."""
    if isinstance(failure, WorkerExited) and failure.killed:
        return "was killed by dtctl: it did not end within the grace period"
    if failure.signal:
        name = next((f" ({number.name})" for number in signal.Signals if number == failure.signal), "")
        return f"was ended by signal {failure.signal}{name}"
    return "was lost" if failure.exit_code is None else f"ended with exit code {failure.exit_code}"


def describe_failure_subject(
    node: str | None, rank: int | None, exit_code: int | None, *, hang: bool | None = False
) -> str:
    """Return the subject of a failure: `rank 3 on node2`, `node node2` (lost), `the agent on node2`, or `a worker`.

    The agent is the program that starts the workers of a node, such as torchrun. An exit of the agent without the name
    of a failed worker does not count as a failure of the node. The subject of a hang without a known rank is `the run`.
    """
    if hang and rank is None:
        return "the run"
    if not node:
        return "a worker"
    if rank is not None and rank >= 0:
        return f"rank {rank} on {node}"
    return f"node {node}" if exit_code is None else f"the agent on {node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutputs:
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
    """Result of the run: succeeded, failed or stopped."""
    exit_code: Index = 0
    attempts: Index = 0
    first_failure: FirstFailure | None = None
    launch_s: Seconds | None = None
    duration_s: Seconds | None = None
    left_behind: Count | None = None
    """Number of processes left on all nodes; None if a node could not be queried."""
    goodput: Seconds | None = field(default=None, metadata=_OPTIONAL)
    lost_output: Mapping[str, int] = field(default_factory=dict, metadata=_OPTIONAL)
    """Bytes of output, by node, that could not be stored."""
    cut_output: Mapping[str, int] = field(default_factory=dict, metadata=_OPTIONAL)
    """Bytes of output, by node, that were removed because of `job.log_mib`."""
    outputs: Mapping[str, NodeOutputs] = field(default_factory=dict, metadata=_OPTIONAL)
    """Files that programs have written, by node; nodes without any are missing."""
    error: str | None = field(default=None, metadata=_OPTIONAL)
    """Reason why the run was never started, or could not be started again."""


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


def parse_event(line: str) -> Event | None:
    """Return the event in a line of events.jsonl; None if the line has no event."""
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
        keys = schema.make_object_check({each.name: _check_of(hints[each.name]) for each in fields(kind)})
        return lambda document: kind(**keys(document))
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        check: Check[Any] = hint.__metadata__[0]
        return check
    if origin is tuple:
        items = schema.list_of(_check_of(inner[0]))
        return lambda value: tuple(items(value))
    if origin is Mapping:
        return schema.mapping_of(_require_printable_text, _check_of(inner[1]))
    if inner:
        return schema.make_nullable_check(_check_of(inner[0]))
    return {str: _require_printable_text, bool: schema.check_flag, int: schema.make_integer_check(-(1 << 63))}[hint]


def _require_printable_text(value: object) -> str:
    """Return a text that can be printed anywhere."""
    text = _ANY_TEXT(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidMessage("half a character") from None
    return text


_ANY_TEXT: Final = schema.make_text_check(1 << 24)


def decide_end_status(*, is_stopped: bool, has_failed: bool) -> str:
    """Return the result of a run: stopped, failed or succeeded.

    Args:
        is_stopped: whether a stop was requested. The exits of workers after that are no failures.
        has_failed: whether a worker or a node failed, or the run could not be started.
    """
    if is_stopped:
        return "stopped"
    return "failed" if has_failed else "succeeded"


@dataclass(slots=True)
class RunProgress:
    """State of a run, built by `apply` for each of its events in their order."""

    status: str = "starting"
    """Status: queued (by Slurm), starting, running, stopping, succeeded, failed or stopped."""
    last: float | None = None
    """Time when the last event happened, in seconds since the epoch."""
    attempt: int = -1
    """Number of the newest started attempt; -1: none was started."""
    launch_s: float | None = None
    nodes: dict[str, str] = field(default_factory=dict)
    """Last state of each node."""
    all_nodes: set[str] = field(default_factory=set)
    """Every node that ever took part."""
    left: dict[str, int | None] = field(default_factory=dict)
    """Number of processes left on each node; None while they may run, or if the node could not be queried."""
    restarts: list[AttemptRestarting] = field(default_factory=list)
    heals: list[WorkersReplaced] = field(default_factory=list)
    """Replacements of workers while the others continued."""
    resume: RunResumed | ResumeConfirmed | None = None
    """Newest event about a resume."""
    job: JobSubmitted | None = None
    waits: JobQueued | None = None
    """Newest event of a waiting job; None if the job does not wait."""
    alerts: dict[str, AlertChanged] = field(default_factory=dict)
    """Alerts that are firing."""
    end: RunEnded | None = None

    def apply(self, event: Event) -> None:
        """Update the state by an event."""
        self.last = event.time
        match event:
            case NodeChanged():
                self._note_node(event)
            case RunPlanned() | NodesAllocated():
                self.nodes, self.waits = dict.fromkeys(event.nodes, "connecting"), None
                self.all_nodes.update(event.nodes)
            case NodeReplaced():
                self.nodes[event.by] = self.nodes.pop(event.node, "ready")
            case NodeDropped():
                self.nodes.pop(event.node, None)
            case JobSubmitted() | JobQueued():
                self._note_job(event)
            case AttemptStarting():
                self.attempt = event.attempt
                self.left = dict.fromkeys(self.nodes)
            case AttemptRunning():
                self.status, self.launch_s = "running", self.launch_s if self.launch_s is not None else event.launch_s
            case RunStopping():
                self.status = "stopping"
            case LauncherPaused() | AttemptRestarting():
                self.status = "starting"
                self.restarts += [event] if isinstance(event, AttemptRestarting) else []
            case WorkersReplaced() | AlertChanged() | RunResumed() | ResumeConfirmed():
                self._apply_run_note(event)
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

    def _apply_run_note(self, event: WorkersReplaced | AlertChanged | RunResumed | ResumeConfirmed) -> None:
        """Store an event that does not change the status."""
        if isinstance(event, WorkersReplaced):
            self.heals.append(event)
        elif isinstance(event, RunResumed | ResumeConfirmed):
            self.resume = event
        else:
            self.alerts.pop(event.alert, None)
            self.alerts |= event.firing

    @property
    def left_behind(self) -> int | None:
        """Return the number of processes left on all nodes; None if it is not known."""
        counts = list(self.left.values())
        return None if None in counts else sum(count or 0 for count in counts)
