"""Requests of `dtctl doctor`. Used by both ends; stdlib only, Python 3.8.

A node's answer is an object with the same `op`; dtctl/doctor/answers.py defines its form.
"""

from __future__ import annotations

from dtctl.schema import (
    any_json,
    check_number,
    define_record_key,
    list_of,
    make_text_check,
    make_two_item_check,
    mapping_of,
)
from dtctl.supervisor.messages.base import COUNT, NAME, PORT, TEXT, Message, index_message_types

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from typing import Any

_ENV = mapping_of(NAME, TEXT)


class QueryTime(Message):
    """Request for the time on the node's clock."""

    op = "time"


class QueryFacts(Message):
    """Request for the facts that need no other node."""

    op = "facts"
    workdir: str = define_record_key(NAME)
    paths: list[str] = define_record_key(list_of(NAME))
    """Paths that have to exist."""
    code: str = define_record_key(NAME)
    """Folder whose digest is computed; empty for none."""
    env: dict[str, str] = define_record_key(_ENV)
    """Variables of the job."""
    names: list[str] = define_record_key(list_of(NAME))
    """Host names to resolve."""
    peers: list[str] = define_record_key(list_of(NAME))
    """Addresses to which the route is determined."""


class QueryJobPython(Message):
    """Request for facts about the job's Python."""

    op = "job-python"
    python: str = define_record_key(NAME)
    code: str = define_record_key(NAME)
    """Folder in which the job starts; empty for none."""
    beside: list[tuple[str, str]] = define_record_key(list_of(make_two_item_check(NAME, NAME)))
    """Name and path of each module in the job's code."""
    env: dict[str, str] = define_record_key(_ENV)


class OpenPorts(Message):
    """Request to listen for connections of the other nodes."""

    op = "listen"
    name: str = define_record_key(NAME)
    """Name of the listening node."""
    token: str = define_record_key(NAME)
    """Token of this examination, which callers have to send."""
    ports: list[int] = define_record_key(list_of(PORT))
    """Ports to listen on; 0 for any free port."""


class OpenSampledPorts(Message):
    """Request to listen on one port in each part of two ranges."""

    op = "spread"
    count: int = define_record_key(COUNT)
    """Number of parts into which each range is divided."""
    meeting: tuple[int, int] = define_record_key(make_two_item_check(PORT, PORT))
    """First and last port of the second range; the first range is the kernel's."""


class CallNodes(Message):
    """Request to call other nodes at their open ports."""

    op = "call"
    token: str = define_record_key(NAME)
    targets: list[Any] = define_record_key(list_of(any_json))
    """Node, address, port and kind of each call."""
    timeout_s: float = define_record_key(check_number)


class MeasureLink(Message):
    """Request to measure the connection to one other node."""

    op = "measure"
    address: str = define_record_key(NAME)
    port: int = define_record_key(PORT)
    token: str = define_record_key(NAME)
    seconds: float = define_record_key(check_number)


class QueryNetworkSettings(Message):
    """Request for the settings that limit the node's network, after a symptom was measured there."""

    op = "network-settings"


class WriteMarks(Message):
    """Request to write a mark into each folder."""

    op = "mark"
    token: str = define_record_key(NAME)
    node: str = define_record_key(NAME)
    """Name of the node that writes the marks."""
    folders: list[str] = define_record_key(list_of(NAME))


class FindMarks(Message):
    """Request to look for the other nodes' marks."""

    op = "look"
    wanted: list[tuple[str, str]] = define_record_key(list_of(make_two_item_check(NAME, NAME)))
    """Pairs of a folder and the node whose mark may be there."""


class RemoveMarks(Message):
    """Request to remove the marks that this node has made."""

    op = "unmark"


class StartPython(Message):
    """Request to start the job's Python next to the probe."""

    op = "start-python"
    python: str = define_record_key(NAME)
    text: str = define_record_key(make_text_check(1 << 20))
    """Text of the program for that Python (dtctl/doctor/worker.py)."""
    env: dict[str, str] = define_record_key(_ENV)
    interface: str = define_record_key(NAME)
    """Network interface towards the other nodes; empty if it is not known."""
    limit_s: float = define_record_key(check_number)
    unset: list[str] = define_record_key(list_of(NAME), default=[])
    """Variables that are removed from the environment of that Python."""
    hidden: list[str] = define_record_key(list_of(NAME), default=[])
    """Names of modules that files of the job hide; the answer reports those that torch imports."""
    count: int = define_record_key(COUNT, default=1)
    """Number of processes to start."""


class QueryPython(Message):
    """Request for each started Python."""

    op = "round"
    asks: list[Any] = define_record_key(list_of(any_json))
    limit_s: float = define_record_key(check_number)


PROBE_REQUESTS = index_message_types(
    QueryTime, QueryFacts, QueryJobPython, OpenPorts, OpenSampledPorts, CallNodes, MeasureLink,
    QueryNetworkSettings, WriteMarks, FindMarks, RemoveMarks, StartPython, QueryPython,
)  # fmt: skip
