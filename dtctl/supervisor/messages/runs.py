"""Messages about the runs of a node. Used by both ends; stdlib only, Python 3.8."""

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
)
from dtctl.supervisor.messages.base import COUNT, EXIT_CODE, NAME, Message
from dtctl.supervisor.messages.setup import RUNS


class ListRuns(Message):
    """Request for the runs on the node."""

    op = "runs"


class RunOnNode(Record):
    """A run according to the records of one of its nodes."""

    run: str = define_record_key(NAME)
    token: str = define_record_key(make_text_check(64))
    attempt: int = define_record_key(COUNT)
    keep: bool = define_record_key(check_flag)
    is_running: bool = define_record_key(check_flag)
    started: float = define_record_key(check_number)
    """Start of the run in seconds since the epoch, by the clock of its launcher; 0: not known."""
    launched_from: str = define_record_key(check_prose)
    command: str = define_record_key(check_prose)
    exit_code: int | None = define_record_key(make_nullable_check(EXIT_CODE), default=None)
    """Exit code of the first worker that failed on this node, or 0; None: the run continues, or it is not known."""
    is_stopped: bool = define_record_key(check_flag, default=False)
    """True if the run was stopped on request."""


class RunsOnNode(Message):
    """Answer: the runs on this node."""

    op = "runs"
    runs: list[RunOnNode] = define_record_key(list_of(RunOnNode.parse, RUNS))


class ReadLogs(Message):
    """Request for the output of a run's newest attempt."""

    op = "logs"
    run: str = define_record_key(NAME)
    attempt: int = define_record_key(make_integer_check(-1))
    """Attempt that the offsets belong to; -1: none."""
    offsets: dict[str, int] = define_record_key(mapping_of(NAME, COUNT), default={})


class LogsRead(Message):
    """Answer: all output so far has been sent."""

    op = "logs-read"
    attempt: int = define_record_key(COUNT)
    is_running: bool = define_record_key(check_flag)
    exit_code: int | None = define_record_key(make_nullable_check(EXIT_CODE), default=None)
    is_stopped: bool = define_record_key(check_flag, default=False)
