"""Messages of a run. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import Record, flag, integer, list_of, mapping_of, nullable, number, prose, text, valid_items, value
from dtctl.schema import address as numeric_address
from dtctl.schema import path as printable_path
from dtctl.supervisor.messages.base import (
    COUNT,
    EXIT_CODE,
    NAME,
    PORT,
    PROCESSES,
    RANK,
    TEXT,
    WORKER_RANK,
    WORKERS,
    Message,
    Quit,
    Refusal,
    by_op,
)

SIGNAL = nullable(integer(1, 64))


class WorkerSpec(Record):
    """One process to start."""

    rank: int = value(RANK)
    env: dict[str, str] = value(mapping_of(NAME, TEXT))


class RunOrigin(Record):
    """Launcher of a run; kept on its nodes for other control machines."""

    launched_from: str = value(NAME)
    """User and machine."""
    command: str = value(NAME)
    started: float = value(number)
    """Seconds since the epoch."""


class StartAttempt(Message):
    """Start an attempt; the process that takes the first of these becomes the run's supervisor."""

    op = "start"
    run: str = value(NAME)
    token: str = value(NAME)
    """Marks the run's processes."""
    attempt: int = value(COUNT)
    script: str = value(TEXT)
    """Bash script that each worker runs."""
    workers: list[WorkerSpec] = value(list_of(WorkerSpec.parse, WORKERS))
    preload: list[str] = value(list_of(NAME), default=[])
    """Modules to import before workers are forked; empty: each worker starts afresh."""
    split_ranks: bool = value(flag)
    """True if lines of output name their worker, as torchrun's do."""
    env: dict[str, str] = value(mapping_of(NAME, TEXT))
    live: bool = value(flag, default=False)
    """True if a lost worker is replaced while the others stay, when the launcher requests it."""
    live_epoch: int = value(COUNT, default=0)
    """Number of replacements in this attempt, on a node that comes to it later."""
    outputs: list[str] = value(list_of(NAME), default=[])
    """Paths in the working folder that are worth keeping."""
    log_bytes: int = value(COUNT, default=0)
    """Most that is kept of the output of a rank; 0: all of it."""
    peer: str = value(NAME)
    """Address of the head node."""
    meeting_port: int = value(PORT, default=0)
    """At which the workers meet on this node; 0: they do so elsewhere, or need not."""
    grace_s: float = value(number)
    """Seconds between SIGTERM and SIGKILL."""
    snapshots: str = value(NAME, default="")
    """Folder of snapshots; empty: the run's own."""
    keep: bool = value(flag)
    """True if the workers continue when the link is lost."""
    link_timeout_s: float = value(number)
    origin: RunOrigin | None = value(nullable(RunOrigin.parse), default=None)


class StandBy(StartAttempt):
    """Import the modules that the workers of an attempt need, and start none: this node may replace a lost one."""

    op = "stand-by"


class StopAttempt(Message):
    """End the attempt's processes."""

    op = "stop"
    now: bool = value(flag, default=False)
    """True to end them at once."""


class Attach(Message):
    """Continue with a kept run that has lost its link."""

    op = "attach"
    run: str = value(NAME)
    offsets: dict[str, int] = value(mapping_of(NAME, COUNT), default={})
    """Rank -> bytes of its output that the control machine has."""


class ProbePorts(Message):
    """Question: which of these ports is free."""

    op = "probe"
    ports: list[int] = value(list_of(PORT))


class Stacks(Message):
    """Question: the stacks of the workers."""

    op = "stacks"


class Heal(Message):
    """Workers are lost; those of this node are replaced, the others freed from whatever waits for them."""

    op = "heal"
    epoch: int = value(COUNT)
    """Number of times that workers of this attempt were replaced, this time included."""
    lost: list[int] = value(list_of(WORKER_RANK, WORKERS))
    """Ranks, of any node."""
    host: int = value(WORKER_RANK)
    """Rank of the worker that opens the store of the new group."""


class Join(Message):
    """All workers are ready for the new group."""

    op = "join"
    epoch: int = value(COUNT)
    address: str = value(numeric_address)
    """Address of the node of the worker that has the store."""
    port: int = value(PORT)


class Ping(Message):
    """A sign of life, which is answered with one."""

    op = "ping"


class Started(Message):
    """The processes of an attempt are there."""

    op = "started"
    interface: str | None = value(nullable(text(64)), default=None)
    """Network interface towards the other nodes; empty when unknown."""


class Cold(Message):
    """Workers start without preloaded modules."""

    op = "cold"
    why: str = value(prose)


class WorkerExit(Message):
    """A process that the supervisor started has ended."""

    op = "exit"
    rank: int = value(RANK)
    code: int = value(EXIT_CODE)
    """Exit code as in a shell, 128 + N for signal N."""
    signal: int | None = value(SIGNAL)
    why: str = value(prose, default="")
    """Facts of the node about it that its log does not have."""
    asked: bool = value(flag, default=False)
    """True if a signal from outside has ended it that asks to stop."""
    told: bool = value(flag, default=False)
    """True if the supervisor had asked it to end."""
    killed: bool = value(flag, default=False)
    """True if the supervisor has killed it, since it did not."""
    time: float = value(number, default=0.0)
    """Time by the node's clock, in seconds since the epoch."""


class OutputSummary(Record):
    """Files that a run's programs wrote on a node."""

    folder: str = value(printable_path)
    files: int = value(COUNT)
    bytes: int = value(COUNT)


class AttemptStopped(Message):
    """An attempt is over on this node; its exit record, exit.json, is the same."""

    op = "stopped"
    left: int = value(PROCESSES)
    """Processes of the run that are still there."""
    exits: list[WorkerExit] = value(list_of(WorkerExit.parse, WORKERS))
    log_bytes_lost: int = value(COUNT, default=0)
    """Bytes of output that neither the node's disk nor the link took."""
    log_bytes_unstored: int = value(COUNT, default=0)
    """Bytes of output that the node's disk did not take."""
    segments: dict[str, list[list[int]]] = value(mapping_of(NAME, list_of(list_of(COUNT, 3))), default={})
    """Parts in the exit record that the log of a rank has, where that is not all of its output (output_log.py)."""
    outputs: OutputSummary | None = value(nullable(OutputSummary.parse), default=None)
    """Outputs of the run's programs so far."""
    met: bool | None = value(nullable(flag), default=None)
    """True if a process has opened the port at which the workers meet; None: not checked on this node."""
    gone: bool = value(flag, default=False)
    """True if the run had ended before the link stood: no supervisor waits for another attempt."""
    record: str = value(prose, default="")
    """Reason why the exit record could not be written; empty: it was."""


class ResumeVerdict(Record):
    """Verdict of a resume."""

    step: int = value(COUNT)
    """Step of the snapshot."""
    verdict: str | None = value(nullable(text(20)))
    """exact, not-exact or not-confirmed; None: the steps that show it have not been repeated yet."""
    steps: int = value(COUNT)
    """Number of steps that were repeated bit for bit."""
    differs: str | None = value(nullable(text(20)))
    """state, loss, gradient or update: the first thing that is not as it was."""
    why: list[str] = value(list_of(prose, 100))
    """Known differences, a phrase each."""


class WorkerProgress(Record):
    """Newest progress of one worker (progress.py); times are ages, since clocks differ."""

    rank: int = value(WORKER_RANK)
    pid: int = value(COUNT)
    signal: int = value(COUNT, default=0)
    """Makes it write its stack; 0: none does."""
    phase: int = value(EXIT_CODE)
    step: int = value(COUNT)
    """Optimizer steps done, of the whole run."""
    place: int = value(COUNT)
    """Position in the next step: 8 x micro batch + 0 data, 1 forward, 2 backward; 7: after all of them."""
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
    """Seconds since it noted anything."""
    slowest_s: float = value(number)
    """The longest step but for the first ones; 0 when there was none yet."""
    stall_s: float = value(number)
    """Spent on snapshots in this attempt, by the training thread."""
    evaluation_s: float = value(number)
    state: str = value(text(1))
    """The kernel's letter; T: stopped; empty, Z or X: the process has ended."""
    resumed: ResumeVerdict | None = value(nullable(ResumeVerdict.parse), default=None)
    """Verdict of the first worker before it repeated steps, if this attempt resumed from a snapshot."""
    confirmed: ResumeVerdict | None = value(nullable(ResumeVerdict.parse), default=None)
    """And after it."""


class Pong(Message):
    """The answer to a Ping."""

    op = "pong"
    workers: list[WorkerProgress] = value(valid_items(WorkerProgress.parse, WORKERS))


class ProgressReport(Message):
    """Progress of the workers, sent without a question."""

    op = "progress"
    workers: list[WorkerProgress] = value(valid_items(WorkerProgress.parse, WORKERS))
    before_stop: bool = value(flag, default=False)
    """True if the node asks them to end next."""
    time: float | None = value(nullable(number), default=None)
    """Time by the node's clock, in seconds since the epoch, where the receiver records it."""


class LiveReport(Message):
    """Report of a worker about a replacement."""

    op = "live"
    rank: int = value(WORKER_RANK)
    pid: int = value(COUNT)
    epoch: int = value(COUNT)
    """Newest epoch of the worker."""
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
    """Stack of one worker."""

    op = "stack"
    rank: int = value(WORKER_RANK)
    state: str = value(text(8))
    """The kernel's letter."""
    how: str = value(text(40))
    """py-spy, faulthandler or none"""
    text: str = value(TEXT)
    flight: str = value(TEXT)
    """The last collectives, JSON of torch's flight recorder; empty when it did not answer."""


class StacksEnd(Message):
    """All stacks of this node were sent."""

    op = "stacks-end"


RUN_REQUESTS = by_op(StartAttempt, StandBy, StopAttempt, Quit, ProbePorts, Attach, Stacks, Ping, Heal, Join)
WHILE_RUNNING = by_op(
    Started, Cold, WorkerExit, AttemptStopped, Pong, ProgressReport, PortProbed, LogGap, MetricsBegin, WorkerStack,
    StacksEnd, StopRequested, LiveReport, Refusal,
)  # fmt: skip
"""Messages of a node from the start of a run on."""
