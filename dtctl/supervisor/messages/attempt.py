"""Messages of a run. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import (
    Record,
    check_flag,
    check_number,
    check_prose,
    define_record_key,
    list_of,
    make_integer_check,
    make_nullable_check,
    make_text_check,
    mapping_of,
    valid_items,
)
from dtctl.schema import check_address as numeric_address
from dtctl.schema import check_path as printable_path
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
    index_message_types,
)

SIGNAL = make_nullable_check(make_integer_check(1, 64))


class WorkerSpec(Record):
    """A process to start as a worker."""

    rank: int = define_record_key(RANK)
    env: dict[str, str] = define_record_key(mapping_of(NAME, TEXT))


class RunOrigin(Record):
    """Launcher of a run, recorded on the run's nodes for other control machines."""

    launched_from: str = define_record_key(NAME)
    """User and machine of the launcher: `user@host`."""
    command: str = define_record_key(NAME)
    started: float = define_record_key(check_number)
    """Start of the launcher in seconds since the epoch."""


class StartAttempt(Message):
    """Request to start an attempt; the process that receives the first one becomes the run's supervisor."""

    op = "start"
    run: str = define_record_key(NAME)
    token: str = define_record_key(NAME)
    """Mark of the run's processes."""
    attempt: int = define_record_key(COUNT)
    script: str = define_record_key(TEXT)
    """Bash script that each worker runs."""
    workers: list[WorkerSpec] = define_record_key(list_of(WorkerSpec.parse, WORKERS))
    preload: list[str] = define_record_key(list_of(NAME), default=[])
    """Modules to import before workers are forked; empty: each worker starts its own Python."""
    split_ranks: bool = define_record_key(check_flag)
    """True if lines of output name their worker, as torchrun's do."""
    env: dict[str, str] = define_record_key(mapping_of(NAME, TEXT))
    live: bool = define_record_key(check_flag, default=False)
    """True if a lost worker is replaced while the others stay, when the launcher requests it."""
    live_epoch: int = define_record_key(COUNT, default=0)
    """Number of replacements in this attempt, on a node that joins it later."""
    outputs: list[str] = define_record_key(list_of(NAME), default=[])
    """Paths of `job.outputs` in the working folder."""
    log_bytes: int = define_record_key(COUNT, default=0)
    """Most bytes that are kept of the output of a rank; 0: all output is kept."""
    peer: str = define_record_key(NAME)
    """Address of the head node."""
    meeting_port: int = define_record_key(PORT, default=0)
    """Port at which the workers meet on this node; 0: they meet elsewhere, or not at all."""
    grace_s: float = define_record_key(check_number)
    """Seconds between SIGTERM and SIGKILL."""
    snapshots: str = define_record_key(NAME, default="")
    """Folder of snapshots; empty: the run's own."""
    keep: bool = define_record_key(check_flag)
    """True if the workers continue when the link is lost."""
    link_timeout_s: float = define_record_key(check_number)
    origin: RunOrigin | None = define_record_key(make_nullable_check(RunOrigin.parse), default=None)


class StandBy(StartAttempt):
    """Request to import the modules of an attempt's workers without starting them: the node may replace a lost one."""

    op = "stand-by"


class StopAttempt(Message):
    """Request to end the attempt's processes."""

    op = "stop"
    now: bool = define_record_key(check_flag, default=False)
    """True to end the processes without a grace period."""
    requested: bool = define_record_key(check_flag, default=False)
    """True if a user or the launcher's machine stops the run, and not a failure."""


class Attach(Message):
    """Request to reattach to a kept run that has lost its link."""

    op = "attach"
    run: str = define_record_key(NAME)
    offsets: dict[str, int] = define_record_key(mapping_of(NAME, COUNT), default={})
    """Bytes of each rank's output that the control machine has."""


class ProbePorts(Message):
    """Question for the first free port among these."""

    op = "probe"
    ports: list[int] = define_record_key(list_of(PORT))


class RequestStacks(Message):
    """Request for the stacks of the workers."""

    op = "stacks"


class Heal(Message):
    """Order to replace lost workers of this node, and to interrupt the wait of the other workers for lost ones."""

    op = "heal"
    epoch: int = define_record_key(COUNT)
    """Number of times that workers of this attempt were replaced, this time included."""
    lost: list[int] = define_record_key(list_of(WORKER_RANK, WORKERS))
    """Lost ranks, on any node."""
    host: int = define_record_key(WORKER_RANK)
    """Rank of the worker that opens the store of the new group."""


class Join(Message):
    """Order to join the new group, for which all workers are ready."""

    op = "join"
    epoch: int = define_record_key(COUNT)
    address: str = define_record_key(numeric_address)
    """Address of the node whose worker has the store."""
    port: int = define_record_key(PORT)


class Ping(Message):
    """Heartbeat, which the node answers with Pong."""

    op = "ping"


class AttemptStarted(Message):
    """Report: the processes of an attempt were started."""

    op = "started"
    interface: str | None = define_record_key(make_nullable_check(make_text_check(64)), default=None)
    """Network interface towards the other nodes; empty if it is not known."""


class PreloadSkipped(Message):
    """Report: workers start without preloaded modules."""

    op = "cold"
    why: str = define_record_key(check_prose)


class WorkerExit(Message):
    """Report: a process that the supervisor started has ended."""

    op = "exit"
    rank: int = define_record_key(RANK)
    code: int = define_record_key(EXIT_CODE)
    """Exit code as in a shell: 128 + N for signal N."""
    signal: int | None = define_record_key(SIGNAL)
    why: str = define_record_key(check_prose, default="")
    """Cause that the node has determined and that is not in the log."""
    asked: bool = define_record_key(check_flag, default=False)
    """True if SIGTERM or SIGUSR1 from outside has ended the process."""
    told: bool = define_record_key(check_flag, default=False)
    """True if the attempt was being ended, so that the supervisor had sent SIGTERM to the process."""
    killed: bool = define_record_key(check_flag, default=False)
    """True if the supervisor has killed the process, since it did not end within the grace period."""
    time: float = define_record_key(check_number, default=0.0)
    """Time of the end by the node's clock, in seconds since the epoch."""


class OutputSummary(Record):
    """Files that a run's programs wrote on a node."""

    folder: str = define_record_key(printable_path)
    files: int = define_record_key(COUNT)
    bytes: int = define_record_key(COUNT)


class AttemptStopped(Message):
    """Report: an attempt has ended on this node. Its exit record, exit.json, has the same form."""

    op = "stopped"
    left: int = define_record_key(PROCESSES)
    """Number of the run's processes that remain."""
    exits: list[WorkerExit] = define_record_key(list_of(WorkerExit.parse, WORKERS))
    log_bytes_lost: int = define_record_key(COUNT, default=0)
    """Bytes of output that neither the node's disk nor the link accepted."""
    log_bytes_unstored: int = define_record_key(COUNT, default=0)
    """Bytes of output that the node's disk did not accept."""
    segments: dict[str, list[list[int]]] = define_record_key(mapping_of(NAME, list_of(list_of(COUNT, 3))), default={})
    """Segments of each incomplete log in the exit record, by rank (output_log.py)."""
    outputs: OutputSummary | None = define_record_key(make_nullable_check(OutputSummary.parse), default=None)
    """Outputs of the run's programs so far."""
    met: bool | None = define_record_key(make_nullable_check(check_flag), default=None)
    """True if a process has opened the port at which the workers meet; None: this node does not check it."""
    requested: bool = define_record_key(check_flag, default=False)
    """True if the run was stopped on request, so that the exits of its workers are no failures."""
    gone: bool = define_record_key(check_flag, default=False)
    """True if the run had ended before the link was made, so that no supervisor waits for another attempt."""
    record: str = define_record_key(check_prose, default="")
    """Reason why the exit record could not be written; empty: it was written."""


class ResumeVerdict(Record):
    """Verdict of a resume."""

    step: int = define_record_key(COUNT)
    """Step of the snapshot."""
    verdict: str | None = define_record_key(make_nullable_check(make_text_check(20)))
    """Verdict: exact, not-exact or not-confirmed; None: the steps that show it have not been repeated yet."""
    steps: int = define_record_key(COUNT)
    """Number of steps that were repeated bit for bit."""
    differs: str | None = define_record_key(make_nullable_check(make_text_check(20)))
    """First value that differs: state, loss, gradient or update."""
    why: list[str] = define_record_key(list_of(check_prose, 100))
    """Phrase for each known difference."""


class WorkerProgress(Record):
    """Newest progress of one worker (progress.py); times are given as ages in seconds, since clocks differ."""

    rank: int = define_record_key(WORKER_RANK)
    pid: int = define_record_key(COUNT)
    signal: int = define_record_key(COUNT, default=0)
    """Signal that makes the worker write its stack; 0: there is none."""
    phase: int = define_record_key(EXIT_CODE)
    step: int = define_record_key(COUNT)
    """Optimizer steps done in the whole run."""
    place: int = define_record_key(COUNT)
    """Position in the next step: 8 x micro batch + 0 (data), 1 (forward), 2 (backward) or 7 (after all of them)."""
    first: int = define_record_key(COUNT)
    """Step after which this attempt began."""
    saved: int = define_record_key(COUNT)
    """Step of the last snapshot that was begun."""
    until: int = define_record_key(COUNT)
    """Last step of the whole training; 0 if it is not known."""
    committed: int = define_record_key(COUNT, default=0)
    """Step of the newest snapshot that this worker has committed in this attempt; 0: none, or other workers commit."""
    begun_s: float = define_record_key(check_number)
    """Seconds since the first step of this attempt began."""
    stale_s: float = define_record_key(check_number)
    """Seconds since the worker last recorded progress."""
    slowest_s: float = define_record_key(check_number)
    """Seconds of the longest step, without the first ones; 0 if there was none yet."""
    stall_s: float = define_record_key(check_number)
    """Seconds that the training thread has spent on snapshots in this attempt."""
    evaluation_s: float = define_record_key(check_number)
    state: str = define_record_key(make_text_check(1))
    """State of the process as the kernel's letter; T: stopped; empty, Z or X: ended."""
    resumed: ResumeVerdict | None = define_record_key(make_nullable_check(ResumeVerdict.parse), default=None)
    """Verdict of the first worker before it repeated steps, if this attempt resumed from a snapshot."""
    confirmed: ResumeVerdict | None = define_record_key(make_nullable_check(ResumeVerdict.parse), default=None)
    """Verdict of the first worker after it has repeated steps."""


class Pong(Message):
    """Answer to a Ping, with the progress of the workers."""

    op = "pong"
    workers: list[WorkerProgress] = define_record_key(valid_items(WorkerProgress.parse, WORKERS))


class ProgressReport(Message):
    """Progress of the workers, sent without a request."""

    op = "progress"
    workers: list[WorkerProgress] = define_record_key(valid_items(WorkerProgress.parse, WORKERS))
    before_stop: bool = define_record_key(check_flag, default=False)
    """True if the node sends SIGTERM to the workers after this report."""
    time: float | None = define_record_key(make_nullable_check(check_number), default=None)
    """Time by the node's clock in seconds since the epoch, if the receiver records it."""


class LiveReport(Message):
    """Report of a worker about a replacement."""

    op = "live"
    rank: int = define_record_key(WORKER_RANK)
    pid: int = define_record_key(COUNT)
    epoch: int = define_record_key(COUNT)
    """Newest epoch of the worker."""
    state: str = define_record_key(make_text_check(20))
    """State of the worker: hosting, ready, unable, joined, failed or cut."""
    port: int = define_record_key(PORT, default=0)
    """Port of the store (hosting)."""
    step: int = define_record_key(make_integer_check(-1), default=0)
    """Number of steps done (ready, joined); -1: none yet, from a worker that takes the place of a lost one."""
    repeats: bool = define_record_key(check_flag, default=False)
    """True if the worker repeats a step that it had begun (joined)."""
    why: str = define_record_key(check_prose, default="")
    """Reason why only a restart helps (unable)."""


class PortProbed(Message):
    """Answer to ProbePorts: the first free port; 0: none."""

    op = "probed"
    port: int = define_record_key(PORT)


class StopRequested(Message):
    """Report: another control machine has requested the end of the run on this node."""

    op = "stop-requested"
    by: str = define_record_key(check_prose)


class LogGap(Message):
    """Report: the node no longer has the next bytes in the output of a rank."""

    op = "log-gap"
    rank: int = define_record_key(RANK)
    bytes: int = define_record_key(COUNT)


class MetricsBegin(Message):
    """Report: the next frames of metrics.jsonl begin with its first line."""

    op = "metrics-begin"


class WorkerStack(Message):
    """Stack of one worker."""

    op = "stack"
    rank: int = define_record_key(WORKER_RANK)
    state: str = define_record_key(make_text_check(8))
    """State of the process as the kernel's letter, such as S or T."""
    how: str = define_record_key(make_text_check(40))
    """Tool that took the stack: py-spy, faulthandler or none."""
    text: str = define_record_key(TEXT)
    flight: str = define_record_key(TEXT)
    """The last collectives, as JSON of torch's flight recorder; empty if the recorder returned nothing."""


class StacksEnd(Message):
    """Report: all stacks of this node were sent."""

    op = "stacks-end"


RUN_REQUESTS = index_message_types(
    StartAttempt, StandBy, StopAttempt, Quit, ProbePorts, Attach, RequestStacks, Ping, Heal, Join
)
WHILE_RUNNING = index_message_types(
    AttemptStarted, PreloadSkipped, WorkerExit, AttemptStopped, Pong, ProgressReport, PortProbed, LogGap, MetricsBegin,
    WorkerStack, StacksEnd, StopRequested, LiveReport, Refusal,
)  # fmt: skip
"""Messages that a node sends after the start of a run."""
