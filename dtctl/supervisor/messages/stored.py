"""Messages of `dtctl clean`. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import (
    Record,
    check_flag,
    check_number,
    define_record_key,
    list_of,
    make_text_check,
    make_two_item_check,
)
from dtctl.supervisor.messages.base import COUNT, NAME, Message

STORED = 2000
"""Most runs and trees of one node in one list, which has the oldest."""


class ListStored(Message):
    """Request for the runs and trees that the node stores."""

    op = "stored"


class StoredItem(Record):
    """A run, a tree of code or data, or an environment."""

    kind: str = define_record_key(make_text_check(8))
    """Kind of the item: run, tree, data or env."""
    name: str = define_record_key(NAME)
    bytes: int = define_record_key(COUNT)
    """Bytes on the disk and in memory."""
    age_s: float = define_record_key(check_number)
    """Seconds since the item was last written to or used."""
    is_used: bool = define_record_key(check_flag)
    """True if a process needs the item."""
    has: list[str] = define_record_key(list_of(make_text_check(40), 10), default=[])
    """Contents of a run that the user may want to keep: `snapshots`, `work`, and `memory` for snapshots in memory."""


class StoredItems(Message):
    """Answer: the runs, trees and environments that the node stores."""

    op = "stored"
    items: list[StoredItem] = define_record_key(list_of(StoredItem.parse, STORED))


class RemoveStored(Message):
    """Request to remove these items."""

    op = "remove"
    items: list[tuple[str, str]] = define_record_key(list_of(make_two_item_check(NAME, NAME), STORED))
    """Kind and name of each item to remove."""


class ItemsRemoved(Message):
    """Answer to RemoveStored, with the items that could not be removed."""

    op = "removed"
    left: list[str] = define_record_key(list_of(NAME, STORED))
