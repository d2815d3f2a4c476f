"""Choice of the worker that failed first, by pure functions over the reports of nodes.

When one worker dies, the others fail a moment later because their peer is gone. The reports arrive almost together, so
their times do not suffice. A worker that a signal ended did not fail because of a peer; a worker whose traceback ends
in a lost connection did. Of several candidates, the earliest by the control machine's clock is chosen.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dtctl.names import REQUEUE_EXIT

_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):\s*\[\d+\]:(?P<body>.*?)(?:\n\s*={10,}|\Z)",
    re.DOTALL,
)
_FIELD = re.compile(r"^\s*(rank|exitcode|traceback)\s*:\s*(-?\d+|.*)", re.MULTILINE)

_ERROR = re.compile(r"(^|\s)(Traceback|[A-Za-z_][\w.]*(Error|Exception)\b|error:)")

CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connectFullMesh failed",
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
    "Timed out waiting",
    "SIGTERM",
    "SignalException",
)
"""Texts in the last lines of a worker that failed because another worker had failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A worker, or a node, that failed."""

    node: str
    rank: int | None
    """Global rank; None when the node as a whole failed, or torchrun did not name the worker."""
    exit_code: int | None
    """Exit code in the form of a shell (128 + N for signal N); None when the node was lost."""
    signal: int | None
    time: float
    """Time of the failure in seconds since the epoch, by the control machine's clock."""
    log: str = ""
    """Path of the worker's log on the control machine."""
    summary: str = ""
    """Cause on a single line, for the user."""
    tail: tuple[str, ...] = ()
    """Last lines of the log."""
    node_reason: str = ""
    """Cause that the node has determined and the log does not show: lack of memory, a full disk."""
    hang: bool = False
    """True if the worker was ended because it made no progress."""
    early_exit: str = ""
    """Way in which the worker left the run without an error before the others, such as `ended while others ran`."""
    asked_to_stop: bool = False
    """True if a signal from outside that requests a stop (SIGTERM or SIGUSR1) ended the worker."""

    @property
    def blames_node(self) -> bool:
        """Return whether the failure is on `node`; that of a hang without a known rank may be on any node."""
        return self.rank is not None or not self.hang


def describe_failure(failure: Failure) -> str:
    """Describe a failure in one line without its place: `was ended by signal 9 (SIGKILL)`."""
    if failure.hang:
        return "made no progress"
    if failure.early_exit:
        return failure.early_exit
    if failure.exit_code is None:
        return "was lost"
    if failure.signal is not None:
        try:
            name = signal.Signals(failure.signal).name
        except ValueError:
            name = "unknown"
        reason = f": {failure.node_reason}" if failure.node_reason else ""
        return f"was ended by signal {failure.signal} ({name}){reason}"
    if failure.exit_code == REQUEUE_EXIT:
        return f"ended with exit code {REQUEUE_EXIT}: it was asked to stop, saved a snapshot and requests to be resumed"
    return f"ended with exit code {failure.exit_code}"


def find_torchrun_failure(failure: Failure, agent_log: str) -> Failure:
    """Return the worker that torchrun's agent names as the root cause on its node, if it names one.

    Source: torch/distributed/elastic/multiprocessing/errors/__init__.py, the format of ChildFailedError, torch 2.13.
    """
    root_cause = _ROOT_CAUSE.search(agent_log)
    if root_cause is None:
        return failure
    fields = dict(_FIELD.findall(root_cause["body"]))
    try:
        rank, code = int(fields["rank"].split()[0]), int(fields["exitcode"].split()[0])
    except (KeyError, ValueError, IndexError):
        return failure
    if code < 0:
        # The agent also sends SIGTERM to workers, but not to the root cause that its table names.
        asked_to_stop = -code in (signal.SIGTERM, signal.SIGUSR1)
        return replace(failure, rank=rank, exit_code=128 - code, signal=-code, asked_to_stop=asked_to_stop)
    return replace(failure, rank=rank, exit_code=code, signal=None)


def is_consequence(failure: Failure) -> bool:
    """Return whether the worker failed because another one had failed, by its signal and its last lines."""
    if failure.asked_to_stop:
        return False
    if failure.signal in (signal.SIGTERM, signal.SIGHUP):
        return True
    if failure.signal is not None or failure.exit_code is None:
        return False
    return any(text in line for line in failure.tail for text in CONSEQUENCES)


def find_early_exit_failure(
    failure: Failure, *, node: str, rank: int, early_exit: str, tail: tuple[str, ...]
) -> Failure | None:
    """Return the failure of a worker that left early and to which another worker lost its connection.

    Args:
        failure: the first reported failure, of the other worker.
        node: node of the worker that has left.
        rank: rank of the worker that has left.
        early_exit: description of how the worker left the run.
        tail: last lines of the log of that worker.

    Returns:
        None if the log has an error: then that worker may have failed because it lost a connection itself.
    """
    if any(_ERROR.search(line) or any(text in line for text in CONSEQUENCES) for line in tail):
        return None
    peer = f"rank {failure.rank} on {failure.node}"
    text = f"rank {rank} {early_exit}, without an error, and {peer} lost the connection to it"
    return Failure(
        node=node,
        rank=rank,
        exit_code=None,
        signal=None,
        time=failure.time,
        early_exit=early_exit,
        summary=text,
        tail=tail,
    )


def is_stop(failure: Failure, *, trains: bool) -> bool:
    """Return whether a failure is the result of a request to stop.

    Args:
        failure: the first failure of an attempt.
        trains: whether the job is a training run with dtctl.runtime. Workers save a snapshot at such a signal; the
            signal ends them only before their first step and after their last, when no work is lost.
    """
    return failure.exit_code == REQUEUE_EXIT or (trains and failure.asked_to_stop)


def find_root_failure(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that caused the others; None if there are no failures."""

    def order(failure: Failure) -> tuple[int, float]:
        if is_consequence(failure):
            return (2, failure.time)
        # gloo ends a worker with SIGABRT when a peer breaks the protocol, so this signal is seldom the cause.
        by_signal = failure.signal is not None and failure.signal != signal.SIGABRT
        return (0 if by_signal or failure.exit_code is None else 1, failure.time)

    return min(failures, key=order, default=None)


def take_last_lines(text: str, count: int = 12) -> tuple[str, ...]:
    """Return the last `count` lines that are not empty."""
    return tuple(line for line in text.splitlines() if line.strip())[-count:]


def find_error_line(tail: Iterable[str]) -> str:
    """Return the most informative line: the exception at the end of a traceback, else the last line."""
    lines = [re.sub(r"^\[rank\d+\]:\s?", "", line) for line in tail]
    # Libraries draw boxes around their messages.
    lines = [text for line in lines if re.search(r"\w", text := line.strip(" │┃|"))]
    return next(filter(is_error_line, reversed(lines)), lines[-1] if lines else "").strip()


def is_error_line(line: str) -> bool:
    """Return whether a line begins with an exception, or with `error:`."""
    return bool(re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b", line)) or line.startswith("error: ")
