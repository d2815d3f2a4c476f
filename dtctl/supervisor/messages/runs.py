"""Messages about the runs of a node. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import Record, flag, integer, list_of, mapping_of, nullable, number, prose, text, value
from dtctl.supervisor.messages.base import COUNT, EXIT_CODE, NAME, Message
from dtctl.supervisor.messages.setup import RUNS


class ListRuns(Message):
    """Question: the runs on the node."""

    op = "runs"


class RunOnNode(Record):
    """A run from the records of one of its nodes."""

    run: str = value(NAME)
    token: str = value(text(64))
    attempt: int = value(COUNT)
    keep: bool = value(flag)
    is_running: bool = value(flag)
    started: float = value(number)
    """Seconds since the epoch, by the clock of its launcher; 0: not known."""
    launched_from: str = value(prose)
    command: str = value(prose)
    exit_code: int | None = value(nullable(EXIT_CODE), default=None)
    """Exit code of the first worker here that failed, or 0; None: it runs, or the code is not known."""


class RunsOnNode(Message):
    """These are."""

    op = "runs"
    runs: list[RunOnNode] = value(list_of(RunOnNode.parse, RUNS))


class ReadLogs(Message):
    """Send the output of a run's newest attempt."""

    op = "logs"
    run: str = value(NAME)
    attempt: int = value(integer(-1))
    """Attempt of the offsets; -1: none."""
    offsets: dict[str, int] = value(mapping_of(NAME, COUNT), default={})


class LogsRead(Message):
    """Answer: all of the logs so far was sent."""

    op = "logs-read"
    attempt: int = value(COUNT)
    is_running: bool = value(flag)
    exit_code: int | None = value(nullable(EXIT_CODE), default=None)
