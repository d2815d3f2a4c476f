"""Questions of `dtctl doctor`. Used by both ends; stdlib only, Python 3.8.

A node's answer is an object with the same `op`; dtctl/doctor/answers.py has its form.
"""

from __future__ import annotations

from dtctl.schema import any_json, list_of, mapping_of, number, pair, text, value
from dtctl.supervisor.messages.base import COUNT, NAME, PORT, TEXT, Message, by_op

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from typing import Any

_ENV = mapping_of(NAME, TEXT)


class AskTime(Message):
    """Question: the time on the node's clock."""

    op = "time"


class AskFacts(Message):
    """Question: the facts that need no other node."""

    op = "facts"
    workdir: str = value(NAME)
    paths: list[str] = value(list_of(NAME))
    """Paths that have to exist."""
    code: str = value(NAME)
    """Folder to digest; empty for none."""
    env: dict[str, str] = value(_ENV)
    """Variables of the job."""
    names: list[str] = value(list_of(NAME))
    """Names to look up."""
    peers: list[str] = value(list_of(NAME))
    """Addresses to find the way to."""


class AskJobPython(Message):
    """Question: the job's Python."""

    op = "job-python"
    python: str = value(NAME)
    code: str = value(NAME)
    """Folder that the job starts in; empty for none."""
    beside: list[tuple[str, str]] = value(list_of(pair(NAME, NAME)))
    """Modules that the job brings along: name, path."""
    env: dict[str, str] = value(_ENV)


class OpenPorts(Message):
    """Listen for the other nodes' calls."""

    op = "listen"
    name: str = value(NAME)
    """Name of the node that is called."""
    token: str = value(NAME)
    """Token of this examination, which callers have to send."""
    ports: list[int] = value(list_of(PORT))
    """0: any."""


class OpenSpread(Message):
    """Listen at a port of each stretch of two ranges."""

    op = "spread"
    count: int = value(COUNT)
    """Number of stretches."""
    meeting: tuple[int, int] = value(pair(PORT, PORT))
    """First and last port of the second range; the first one is the kernel's."""


class CallNodes(Message):
    """Call the others."""

    op = "call"
    token: str = value(NAME)
    targets: list[Any] = value(list_of(any_json))
    """Node, address, port, kind."""
    timeout_s: float = value(number)


class MeasureWay(Message):
    """Measure the way to one other node."""

    op = "measure"
    address: str = value(NAME)
    port: int = value(PORT)
    token: str = value(NAME)
    seconds: float = value(number)


class LeaveMarks(Message):
    """Leave a mark in each folder."""

    op = "mark"
    token: str = value(NAME)
    node: str = value(NAME)
    """Node that made the marks."""
    folders: list[str] = value(list_of(NAME))


class LookForMarks(Message):
    """Look for the other nodes' marks."""

    op = "look"
    wanted: list[tuple[str, str]] = value(list_of(pair(NAME, NAME)))
    """Folder, node."""


class RemoveMarks(Message):
    """Remove your marks."""

    op = "unmark"


class StartPython(Message):
    """Start the job's Python next to the probe."""

    op = "start-python"
    python: str = value(NAME)
    text: str = value(text(1 << 20))
    """Text of the program that it runs (dtctl/doctor/worker.py)."""
    env: dict[str, str] = value(_ENV)
    interface: str = value(NAME)
    """Towards the other nodes; empty where that is not known."""
    limit_s: float = value(number)
    unset: list[str] = value(list_of(NAME), default=[])
    """Variables that it does not get."""
    hidden: list[str] = value(list_of(NAME), default=[])
    """Modules that are not found as they were."""
    count: int = value(COUNT, default=1)
    """Number of processes."""


class AskPython(Message):
    """Ask each Python something."""

    op = "round"
    asks: list[Any] = value(list_of(any_json))
    limit_s: float = value(number)


PROBE_REQUESTS = by_op(
    AskTime, AskFacts, AskJobPython, OpenPorts, OpenSpread, CallNodes, MeasureWay, LeaveMarks, LookForMarks,
    RemoveMarks, StartPython, AskPython,
)  # fmt: skip
