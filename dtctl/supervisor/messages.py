"""The messages between the control machine and a node: one type each. Used by both ends; stdlib only, Python 3.8.

    control machine                      node
    ------------------------------------------------------------------------------------------------------------
    Hello: who are you                   NodeDescription
    PushTree, PushManifestEnd, PushEnd   PushState: bring the code (receive.py)
    Prepare: check for this run          Ready
                                         Working: still at one of these two, every second
    StandBy: you may have to run this
    StartAttempt: run this               Started, with the interface; Cold: without preloaded modules
    ProbePorts: which one is free        PortProbed
    Ping: are you there                  Pong: how far the workers are (progress.py)
                                         ProgressReport: the same, before an exit and a stop
                                         WorkerExit: a process has ended  (at once)
                                         LogGap: some of a rank's output is missing
                                         MetricsBegin: metrics.jsonl is sent from its first line
    Stacks: where do the workers stand   WorkerStack of each, then StacksEnd
    Heal: workers are lost, replace them LiveReport of each worker, several    (docs/recovery.md)
    Join: all are ready, meet here
    StopAttempt: end its processes       AttemptStopped: what is left     (after all output)
    Attach: I know logs up to here       Ready; log frames from there on
    Sweep: end what is left of a run     Swept; to the run's launcher, StopRequested
    ListStored (clean.py)                StoredItems
    RemoveStored                         ItemsRemoved
    ListRuns (node_runs.py)              RunsOnNode
    ReadLogs                             log frames, then LogsRead
    Quit: and end yourself
    ListOutputs (outputs.py)             OutputRows, OutputLinks, then OutputsListed
    DigestFiles                          FileDigest of each, then DigestsEnd
    SendFiles                            contents and FileSent, of each
    (any)                                Refusal: it cannot be done

Each travels as a JSON frame (frames.py) whose key `op` names it. Neither end uses what has not the form given here, and
a node is not trusted (docs/security.md): it may be faulty, run another version, or belong to somebody else by now.
"""

from __future__ import annotations

from dtctl.schema import (
    InvalidMessage,
    Record,
    flag,
    integer,
    list_of,
    mapping_of,
    nullable,
    number,
    pair,
    prose,
    text,
    valid_items,
    value,
)
from dtctl.schema import address as numeric_address
from dtctl.schema import path as printable_path

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar, Self

WORKERS = 4096
"""Of one node."""
RUNS = 1000
"""Of one node, in one list; the newest."""
STORED = 2000
"""Runs and trees of one node, in one list; the oldest."""
_STACK = text(1 << 20)
_TEXT = text(1 << 20)
"""As much as fits into a frame."""
_NAME = text(4096)
RANK = integer(-1, 1 << 24)
"""-1: torchrun's agent."""
WORKER_RANK = integer(0, 1 << 24)
COUNT = integer(0)
PORT = integer(0, 65_535)
EXIT_CODE = integer(0, 255)
SIGNAL = nullable(integer(1, 64))
_PROCESSES = integer(0, 1 << 22)


class Message(Record):
    """A record that says what it is: `op` stands in its JSON, too."""

    op: ClassVar[str]

    def __new__(cls, **_: object) -> Self:
        """Before the values, so that it comes first."""
        message = super().__new__(cls)
        message.__dict__["op"] = cls.op
        return message


# -- from the control machine -------------------------------------------------------------------------------------


class Hello(Message):
    """The first message to a node that is to be prepared."""

    op = "hello"
    ports: list[int] = value(list_of(PORT), default=[])
    """Candidates for the rendezvous, in order of preference; empty on all nodes but the head."""


class PushTree(Message):
    """Keep this tree of files, and say what of it is missing."""

    op = "push"
    tree: str = value(text(64))
    """Its digest."""


class PushManifestEnd(Message):
    """The list of files was sent."""

    op = "push-manifest-end"


class PushEnd(Message):
    """The contents of files were sent."""

    op = "push-end"


class Prepare(Message):
    """Check now whatever would make the start fail."""

    op = "prepare"
    run: str = value(_NAME)
    fresh: bool = value(flag)
    """Whether the run is new to this node."""
    cwd: str = value(_NAME)
    """Folder of the job's code."""
    pushed: bool = value(flag, default=True)
    """Whether it was pushed there; else it is the user's own, and may begin with `~`."""
    shared: bool = value(flag, default=False)
    """Whether it is one folder for all nodes, in which the workers start."""
    files: list[str] = value(list_of(_NAME))
    """That have to exist."""
    programs: list[str] = value(list_of(_NAME))
    path: str = value(_NAME, default="")
    """Folder in which programs are looked for before PATH."""
    outputs: list[str] = value(list_of(_NAME), default=[])
    """Paths in the working folder that are worth keeping."""
    earlier: str = value(_NAME, default="")
    """The run whose outputs this one goes on in."""


class WorkerSpec(Record):
    """One process to start."""

    rank: int = value(RANK)
    env: dict[str, str] = value(mapping_of(_NAME, _TEXT))


class RunOrigin(Record):
    """Who has launched a run; kept on its nodes for other control machines."""

    launched_from: str = value(_NAME)
    """User and machine."""
    command: str = value(_NAME)
    started: float = value(number)
    """Seconds since the epoch."""


class StartAttempt(Message):
    """Start an attempt; the process that takes the first of these becomes the run's supervisor."""

    op = "start"
    run: str = value(_NAME)
    token: str = value(_NAME)
    """Marks the run's processes."""
    attempt: int = value(COUNT)
    script: str = value(_TEXT)
    """What each worker runs, for bash."""
    workers: list[WorkerSpec] = value(list_of(WorkerSpec.parse, WORKERS))
    preload: list[str] = value(list_of(_NAME), default=[])
    """Modules to import before workers are forked; empty: each worker starts afresh."""
    split_ranks: bool = value(flag)
    """Whether lines of output name their worker, as torchrun's do."""
    env: dict[str, str] = value(mapping_of(_NAME, _TEXT))
    live: bool = value(flag, default=False)
    """Whether a lost worker is replaced while the others stay, if the launcher says so."""
    live_epoch: int = value(COUNT, default=0)
    """How often that has happened in this attempt, on a node that comes to it later."""
    outputs: list[str] = value(list_of(_NAME), default=[])
    """Paths in the working folder that are worth keeping."""
    log_bytes: int = value(COUNT, default=0)
    """Most that is kept of the output of a rank; 0: all of it."""
    peer: str = value(_NAME)
    """Address of the head node."""
    meeting_port: int = value(PORT, default=0)
    """At which the workers meet on this node; 0: they do so elsewhere, or need not."""
    grace_s: float = value(number)
    """Between SIGTERM and SIGKILL."""
    snapshots: str = value(_NAME, default="")
    """Folder of snapshots; empty: the run's own."""
    keep: bool = value(flag)
    """Whether the workers go on when the link is lost."""
    link_timeout_s: float = value(number)
    origin: RunOrigin | None = value(nullable(RunOrigin.parse), default=None)


class StandBy(StartAttempt):
    """Import what the workers of an attempt need, and start none: a node may be lost whose place this one takes."""

    op = "stand-by"


class StopAttempt(Message):
    """End the attempt's processes."""

    op = "stop"
    now: bool = value(flag, default=False)
    """Without waiting for them."""


class Quit(Message):
    """Nothing more is wanted from this node."""

    op = "quit"


class ProbePorts(Message):
    """Which of these ports is free?"""

    op = "probe"
    ports: list[int] = value(list_of(PORT))


class Attach(Message):
    """Go on with a kept run whose link was lost."""

    op = "attach"
    run: str = value(_NAME)
    offsets: dict[str, int] = value(mapping_of(_NAME, COUNT), default={})
    """Rank -> bytes of its output that the control machine has."""


class Stacks(Message):
    """Where do the workers stand?"""

    op = "stacks"


class Heal(Message):
    """Workers are lost; those of this node are replaced, the others freed from whatever waits for them."""

    op = "heal"
    epoch: int = value(COUNT)
    """How often workers of this attempt were replaced, this time included."""
    lost: list[int] = value(list_of(WORKER_RANK, WORKERS))
    """Ranks, of any node."""
    host: int = value(WORKER_RANK)
    """Rank of the worker that opens the store of the new group."""


class Join(Message):
    """All workers are ready for the new group."""

    op = "join"
    epoch: int = value(COUNT)
    address: str = value(numeric_address)
    """Of the node whose worker has the store."""
    port: int = value(PORT)


class Ping(Message):
    """A sign of life, which is answered with one."""

    op = "ping"


class Sweep(Message):
    """End a run whose launcher is gone."""

    op = "sweep"
    run: str = value(_NAME)
    token: str = value(_NAME)
    grace_s: float = value(number)
    by: str = value(_NAME, default="")
    """Who wants it, if that is another machine than the launcher's, which is told."""


# -- from a node --------------------------------------------------------------------------------------------------


class NodeDescription(Message):
    """What a node says about itself before a job starts on it."""

    op = "hello"
    gpus: int = value(integer(0, WORKERS))
    cores: int = value(integer(0, 1 << 16), default=0)
    """That its processes may use; 0: not known."""
    address: str = value(numeric_address)
    """Its own, on the way that the control machine came by; empty when not known."""
    port: int = value(PORT)
    """The first of the candidates that is free; 0: none, or none was named."""
    python: str = value(text(40), default="")
    host: str = value(text(255), default="")
    """How the machine calls itself; empty when not known."""
    workdir: str = value(_NAME, default="")
    running: list[str] = value(list_of(prose, RUNS), default=[])
    """Runs of this user that are under way here already."""


class PushState(Message):
    """How a push stands: have, want-manifest, need, done or error."""

    op = "push"
    state: str = value(text(40))
    path: str = value(printable_path, default="")
    """have, done: the folder of the tree."""
    digest: str = value(text(64), default="")
    """done: of the tree."""
    indexes: list[int] = value(list_of(COUNT, 10_000_000), default=[])
    """need: files of the manifest whose contents are to be sent."""
    code: str = value(text(40), default="")
    """error: as in Refusal."""
    message: str = value(prose, default="")


class Ready(Message):
    """The run may be started on this node."""

    op = "ready"


class Refusal(Message):
    """The node cannot do its part."""

    op = "error"
    code: str = value(text(40))
    """For the control machine to choose its hint by."""
    message: str = value(prose)


class Working(Message):
    """The node is at work on what it was asked last."""

    op = "working"


class Swept(Message):
    """A run's processes were ended."""

    op = "swept"
    found: int = value(_PROCESSES)
    left: int = value(_PROCESSES)


class Started(Message):
    """The processes of an attempt are there."""

    op = "started"
    interface: str | None = value(nullable(text(64)), default=None)
    """Network interface towards the other nodes; empty when there is no telling."""


class Cold(Message):
    """Workers start without preloaded modules."""

    op = "cold"
    why: str = value(prose)


class WorkerExit(Message):
    """A process that the supervisor started has ended."""

    op = "exit"
    rank: int = value(RANK)
    code: int = value(EXIT_CODE)
    """As a shell counts it, 128 + N for signal N."""
    signal: int | None = value(SIGNAL)
    why: str = value(prose, default="")
    """What the node knows about it that its log does not say."""
    asked: bool = value(flag, default=False)
    """Whether a signal from outside has ended it that asks to stop."""
    told: bool = value(flag, default=False)
    """Whether the supervisor had asked it to end."""
    killed: bool = value(flag, default=False)
    """Whether the supervisor has killed it, since it did not."""
    time: float = value(number, default=0.0)
    """By the node's clock, in seconds since the epoch."""


class OutputSummary(Record):
    """Files that a run's programs wrote on a node."""

    folder: str = value(printable_path)
    files: int = value(COUNT)
    bytes: int = value(COUNT)


class AttemptStopped(Message):
    """An attempt is over on this node; its exit record, exit.json, is the same."""

    op = "stopped"
    left: int = value(_PROCESSES)
    """Processes of the run that are still there."""
    exits: list[WorkerExit] = value(list_of(WorkerExit.parse, WORKERS))
    log_bytes_lost: int = value(COUNT, default=0)
    """Of output that neither the node's disk nor the link took."""
    log_bytes_unstored: int = value(COUNT, default=0)
    """Of output that the node's disk did not take."""
    segments: dict[str, list[list[int]]] = value(mapping_of(_NAME, list_of(list_of(COUNT, 3))), default={})
    """In the exit record: what the log of a rank has, where that is not all of its output (output_log.py)."""
    outputs: OutputSummary | None = value(nullable(OutputSummary.parse), default=None)
    """What the run's programs have put out so far."""
    met: bool | None = value(nullable(flag), default=None)
    """Whether anybody has opened the port at which the workers meet; None: nobody has looked here."""
    gone: bool = value(flag, default=False)
    """Whether the run had ended before the link stood: no supervisor waits for another attempt."""
    record: str = value(prose, default="")
    """Why the exit record could not be written; empty: it was."""


class WorkerProgress(Record):
    """What one worker has noted last (progress.py); times are ages, since clocks differ."""

    rank: int = value(WORKER_RANK)
    pid: int = value(COUNT)
    signal: int = value(COUNT, default=0)
    """Makes it write its stack; 0: none does."""
    phase: int = value(EXIT_CODE)
    step: int = value(COUNT)
    """Optimizer steps done, of the whole run."""
    place: int = value(COUNT)
    """Where in the next step: 8 x micro batch + 0 data, 1 forward, 2 backward; 7: after all of them."""
    first: int = value(COUNT)
    """Step that this attempt began after."""
    saved: int = value(COUNT)
    """Step of the last snapshot that was begun."""
    until: int = value(COUNT)
    """The training's last step; 0 when it is not known."""
    committed: int = value(COUNT, default=0)
    """Step of the newest snapshot that it has committed in this attempt; 0: none, or others commit."""
    begun_s: float = value(number)
    """Age of this attempt's first step."""
    stale_s: float = value(number)
    """Since it noted anything."""
    slowest_s: float = value(number)
    """The longest step but for the first ones; 0 when there was none yet."""
    stall_s: float = value(number)
    """Spent on snapshots in this attempt, by the training thread."""
    evaluation_s: float = value(number)
    state: str = value(text(1))
    """The kernel's letter; T: stopped; empty, Z or X: the process has ended."""


class Pong(Message):
    """The answer to a Ping."""

    op = "pong"
    workers: list[WorkerProgress] = value(valid_items(WorkerProgress.parse, WORKERS))


class ProgressReport(Message):
    """How far the workers are, unasked."""

    op = "progress"
    workers: list[WorkerProgress] = value(valid_items(WorkerProgress.parse, WORKERS))
    before_stop: bool = value(flag, default=False)
    """Whether the node asks them to end next."""
    time: float | None = value(nullable(number), default=None)
    """By the node's clock, in seconds since the epoch, where the receiver records it."""


class LiveReport(Message):
    """What a worker says about a healing."""

    op = "live"
    rank: int = value(WORKER_RANK)
    pid: int = value(COUNT)
    epoch: int = value(COUNT)
    """The one that the worker knows of."""
    state: str = value(text(20))
    """hosting, ready, unable, joined, failed or cut"""
    port: int = value(PORT, default=0)
    """hosting: of the store."""
    step: int = value(integer(-1), default=0)
    """ready, joined: steps done; -1: none yet, by one that takes a place."""
    repeats: bool = value(flag, default=False)
    """joined: whether the worker does a step again that it had begun."""
    why: str = value(prose, default="")
    """unable: why only a restart helps."""


class PortProbed(Message):
    """The first free port of a ProbePorts; 0: none."""

    op = "probed"
    port: int = value(PORT)


class StopRequested(Message):
    """Another control machine has asked this node to end the run."""

    op = "stop-requested"
    by: str = value(prose)


class LogGap(Message):
    """The node has no longer what comes next in the output of a rank."""

    op = "log-gap"
    rank: int = value(RANK)
    bytes: int = value(COUNT)


class MetricsBegin(Message):
    """The next frames of metrics.jsonl begin with its first line."""

    op = "metrics-begin"


class WorkerStack(Message):
    """Where one worker stands."""

    op = "stack"
    rank: int = value(WORKER_RANK)
    state: str = value(text(8))
    """The kernel's letter."""
    how: str = value(text(40))
    """py-spy, faulthandler or none"""
    text: str = value(_STACK)
    flight: str = value(_STACK)
    """The last collectives, JSON of torch's flight recorder; empty when it did not answer."""


class StacksEnd(Message):
    """All stacks of this node were sent."""

    op = "stacks-end"


# -- outputs: dtctl fetch and outputs.py --------------------------------------------------------------------------

FILES = 1_000_000
ROWS = 1000
_INDEX = integer(0, FILES)


class ListOutputs(Message):
    """Which files has a run put out?"""

    op = "list"
    run_dir: str = value(_NAME)
    """Folder of the run; may begin with `~`."""
    paths: list[str] = value(list_of(_NAME))
    """Relative to the working folder; nothing: all that the run's programs wrote."""


class DigestFiles(Message):
    """What do the beginnings of these files hash to?"""

    op = "digest"
    files: list[tuple[int, int]] = value(list_of(pair(_INDEX, COUNT)))
    """Index of its row, and length in bytes."""


class SendFiles(Message):
    """Send these files."""

    op = "send"
    files: list[tuple[int, int]] = value(list_of(pair(_INDEX, COUNT)))
    """Index of its row, and the offset to begin at."""


class OutputRows(Message):
    """Some of the files, until OutputsListed."""

    op = "rows"
    rows: list[tuple[str, int]] = value(list_of(pair(_NAME, COUNT), ROWS))
    """Path in the working folder, and size in bytes."""


class OutputLinks(Message):
    """Some of the symbolic links, until OutputsListed."""

    op = "links"
    rows: list[tuple[str, str]] = value(list_of(pair(_NAME, _NAME), ROWS))
    """Path in the working folder, and where it leads."""


class OutputsListed(Message):
    """These were all."""

    op = "listed"
    is_there: bool = value(flag)
    """Whether the node has a working folder of the run."""
    unnameable: int = value(COUNT)
    """Files left out because of their names."""


class FileDigest(Message):
    """What the beginning of a file hashes to."""

    op = "digest"
    index: int = value(_INDEX)
    digest: str = value(text(64))
    """SHA-256; empty when the file is shorter by now, or gone."""


class DigestsEnd(Message):
    """All digests that were requested have been sent."""

    op = "digested"


class FileSent(Message):
    """The contents of a file have been sent."""

    op = "sent"
    index: int = value(_INDEX)
    digest: str = value(text(64))
    """SHA-256 of all of it."""
    problem: str = value(prose)
    """Why it could not be read; empty: it was."""


class ListRuns(Message):
    """Which runs are there?"""

    op = "runs"
    workdir: str = value(_NAME)


class RunOnNode(Record):
    """A run as one of its nodes knows it."""

    run: str = value(_NAME)
    token: str = value(text(64))
    attempt: int = value(COUNT)
    keep: bool = value(flag)
    is_running: bool = value(flag)
    started: float = value(number)
    """Seconds since the epoch, by the clock of its launcher; 0: not known."""
    launched_from: str = value(prose)
    command: str = value(prose)
    exit_code: int | None = value(nullable(EXIT_CODE), default=None)
    """Of the first worker here that failed, or 0; None: it runs, or nobody knows."""


class RunsOnNode(Message):
    """These are."""

    op = "runs"
    runs: list[RunOnNode] = value(list_of(RunOnNode.parse, RUNS))


class ReadLogs(Message):
    """Send the output of a run's newest attempt."""

    op = "logs"
    workdir: str = value(_NAME)
    run: str = value(_NAME)
    attempt: int = value(integer(-1))
    """That the offsets are of; -1: of none."""
    offsets: dict[str, int] = value(mapping_of(_NAME, COUNT), default={})


class LogsRead(Message):
    """That is what there is by now."""

    op = "logs-read"
    attempt: int = value(COUNT)
    is_running: bool = value(flag)
    exit_code: int | None = value(nullable(EXIT_CODE), default=None)


class ListStored(Message):
    """Which runs and trees does the node keep?"""

    op = "stored"
    workdir: str = value(_NAME)


class StoredItem(Record):
    """A run, or a tree of code."""

    kind: str = value(text(8))
    """run or tree"""
    name: str = value(_NAME)
    bytes: int = value(COUNT)
    """On the disk, and in memory."""
    age_s: float = value(number)
    """Since something of it was last written, or it was last used."""
    is_used: bool = value(flag)
    """Whether a process needs it."""
    has: list[str] = value(list_of(text(40), 10), default=[])
    """What a run has that may be worth something: snapshots, work; and snapshots in memory: memory."""


class StoredItems(Message):
    """These."""

    op = "stored"
    items: list[StoredItem] = value(list_of(StoredItem.parse, STORED))


class RemoveStored(Message):
    """Remove these."""

    op = "remove"
    workdir: str = value(_NAME)
    items: list[tuple[str, str]] = value(list_of(pair(_NAME, _NAME), STORED))
    """Kind and name."""


class ItemsRemoved(Message):
    """They are gone, but for some."""

    op = "removed"
    left: list[str] = value(list_of(_NAME, STORED))


# -- reading them -------------------------------------------------------------------------------------------------


def _by_op(*kinds: type[Message]) -> dict[str, type[Message]]:
    return {kind.op: kind for kind in kinds}


REQUESTS = _by_op(
    Hello, PushTree, PushManifestEnd, PushEnd, Prepare, StartAttempt, StandBy, StopAttempt, Quit, ProbePorts, Attach,
    Stacks, Ping, Sweep, Heal, Join,
)  # fmt: skip
BEFORE_START = _by_op(NodeDescription, PushState, Ready, Refusal, Swept, Working)
"""What a node may say until a run has started,"""
WHILE_RUNNING = _by_op(
    Started, Cold, WorkerExit, AttemptStopped, Pong, ProgressReport, PortProbed, LogGap, MetricsBegin, WorkerStack,
    StacksEnd, StopRequested, LiveReport, Refusal,
)  # fmt: skip
"""and from then on."""

CLEAN_REQUESTS = _by_op(ListStored, RemoveStored, Quit)
CLEAN_ANSWERS = _by_op(StoredItems, ItemsRemoved, Refusal)
RUNS_REQUESTS = _by_op(ListRuns, ReadLogs, Quit)
RUNS_ANSWERS = _by_op(RunsOnNode, LogsRead, LogGap, Refusal)
FETCH_REQUESTS = _by_op(ListOutputs, DigestFiles, SendFiles, Quit)
FETCH_ANSWERS = _by_op(OutputRows, OutputLinks, OutputsListed, FileDigest, DigestsEnd, FileSent, Refusal)


def parse(document: Mapping[str, Any], kinds: Mapping[str, type[Message]]) -> Message:
    """The message that a JSON object is.

    Raises:
        InvalidMessage: it is none of these kinds, or has not its form.
    """
    op = document.get("op")
    kind = kinds.get(op) if isinstance(op, str) else None
    if kind is None:
        raise InvalidMessage("no message that is valid here")
    return kind.parse(document)
