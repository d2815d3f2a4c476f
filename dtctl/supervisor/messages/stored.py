"""Messages of `dtctl clean`. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import Record, flag, list_of, number, pair, text, value
from dtctl.supervisor.messages.base import COUNT, NAME, Message

STORED = 2000
"""Runs and trees of one node, in one list; the oldest."""


class ListStored(Message):
    """Question: the runs and trees that the node keeps."""

    op = "stored"


class StoredItem(Record):
    """A run, a tree of code or data, or an environment."""

    kind: str = value(text(8))
    """run, tree, data or env"""
    name: str = value(NAME)
    bytes: int = value(COUNT)
    """Bytes on the disk and in memory."""
    age_s: float = value(number)
    """Seconds since something of it was last written, or it was last used."""
    is_used: bool = value(flag)
    """True if a process needs it."""
    has: list[str] = value(list_of(text(40), 10), default=[])
    """Valuable contents of a run: `snapshots`, `work`, and `memory` for snapshots in memory."""


class StoredItems(Message):
    """These."""

    op = "stored"
    items: list[StoredItem] = value(list_of(StoredItem.parse, STORED))


class RemoveStored(Message):
    """Remove these."""

    op = "remove"
    items: list[tuple[str, str]] = value(list_of(pair(NAME, NAME), STORED))
    """Kind and name."""


class ItemsRemoved(Message):
    """They are gone, but for some."""

    op = "removed"
    left: list[str] = value(list_of(NAME, STORED))
