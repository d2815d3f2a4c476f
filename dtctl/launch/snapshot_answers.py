"""Answers of `python -m dtctl.runtime.snapshot VERB` on a node: one type per verb; see its commands.py."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final, TypeVar

from dtctl.errors import NodeError, SnapshotError
from dtctl.launch.control.link import checked
from dtctl.schema import (
    InvalidMessage,
    Record,
    any_json,
    file_name,
    flag,
    form,
    integer,
    list_of,
    mapping_of,
    nullable,
    number,
    prose,
    text,
    value,
)
from dtctl.schema import path as printable_path

ANSWER_BYTES: Final = 64 << 20
"""Bytes of one answer: some 300,000 tensors."""
_COUNT: Final = integer(0)
_ROWS: Final = 100_000
_PATHS: Final = list_of(printable_path, _ROWS)


class SnapshotRow(Record):
    """One snapshot; nothing of it was verified."""

    path: str = value(printable_path)
    step: int = value(_COUNT)
    committed: bool = value(flag)
    size_bytes: int = value(_COUNT)
    time: float = value(number)
    """Time when it was made, in seconds since the epoch."""


class VerifiedRow(Record):
    """One snapshot that was read to its end."""

    path: str = value(printable_path)
    step: int = value(_COUNT)
    status: str = value(text(20))
    bad: list[str] = value(list_of(prose))


class PartRow(Record):
    """Part of one snapshot that a node has."""

    path: str = value(printable_path)
    step: int = value(_COUNT)
    record: str | None = value(nullable(text(300)))
    """Commit record."""
    manifest: str | None = value(nullable(text(ANSWER_BYTES)))
    good: list[str] = value(list_of(file_name))
    """Files that are there and right."""
    bad: list[str] = value(list_of(prose))
    made_s: float = value(number)


class FileFacts(Record):
    """A file of a manifest."""

    size_bytes: int = value(_COUNT)
    digest: str = value(text(128))
    part: str | None = value(nullable(text(255)), default=None)


class TensorFacts(Record):
    """A tensor of a snapshot."""

    dtype: str = value(text(40))
    shape: list[int] = value(list_of(_COUNT, 64))


class SnapshotAnswer(Record):
    """An answer to `verb`."""

    verb: ClassVar[str]


class Listing(SnapshotAnswer):
    """All snapshots, newest first."""

    verb = "ls"
    snapshots: list[SnapshotRow] = value(list_of(SnapshotRow.parse, _ROWS))


class Verification(SnapshotAnswer):
    """All snapshots, newest first, each read to its end."""

    verb = "verify"
    snapshots: list[VerifiedRow] = value(list_of(VerifiedRow.parse, _ROWS))
    newest_good: str | None = value(nullable(printable_path))


class Parts(SnapshotAnswer):
    """Parts of all snapshots that a node has, newest first."""

    verb = "pieces"
    rows: list[PartRow] = value(list_of(PartRow.parse, _ROWS))


class NewestGood(SnapshotAnswer):
    """The newest good snapshot."""

    path: str = value(printable_path)
    step: int = value(_COUNT)
    rejected: list[str] = value(list_of(prose, _ROWS))
    """Reason why newer ones were passed over."""


class Contents(NewestGood):
    """Parts of a snapshot, and the settings that it was made with."""

    verb = "show"
    hash: str = value(text(20))
    facts: Any = value(any_json)
    files: dict[str, FileFacts] = value(mapping_of(file_name, FileFacts.parse))
    tensors: dict[str, TensorFacts] = value(mapping_of(text(4096), TensorFacts.parse, 1_000_000))


class ContentDigest(NewestGood):
    """The digest of its model and optimizer."""

    verb = "digest"
    digest: str = value(text(128))


class Exported(NewestGood):
    """Answer: the weights were written."""

    verb = "export"
    size_bytes: int = value(_COUNT)
    out: str | None = value(nullable(printable_path))


class Pruned(SnapshotAnswer):
    """Paths of snapshots that stay, that went, and that could not be removed."""

    verb = "prune"
    kept: list[str] = value(_PATHS)
    removed: list[str] = value(_PATHS)
    left: list[str] = value(_PATHS, default=[])


class Removed(SnapshotAnswer):
    """Paths of snapshots that went, and that could not be removed."""

    verb = "remove"
    removed: list[str] = value(_PATHS)
    left: list[str] = value(_PATHS, default=[])


class Sent(SnapshotAnswer):
    """Files of this one were sent."""

    verb = "send"
    path: str = value(printable_path)
    step: int = value(_COUNT)


class SnapshotManifest(Record):
    """A snapshot's manifest, as far as it is used here."""

    format: int = value(integer(1, 1000))
    step: int = value(_COUNT)
    hash: str = value(text(20))
    facts: dict[str, Any] = value(form(optional={"retention": any_json}))
    files: dict[str, FileFacts] = value(mapping_of(file_name, FileFacts.parse))


class _Refused(Record):
    error: str = value(prose)
    where: str | None = value(nullable(prose), default=None)
    hint: str | None = value(nullable(prose), default=None)


A = TypeVar("A", bound=SnapshotAnswer)


def parse_answer(kind: type[A], output: str, *, node: str) -> A:
    """Return the answer in the last line of the command's output.

    Raises:
        InvalidMessage: there is no such line.
        NodeError: it has not the form of an answer.
        SnapshotError: the command reports that it cannot be done.
    """
    subject = f"its answer to `{kind.verb}`"
    lines = output.strip().splitlines()
    try:
        document = json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError):
        raise InvalidMessage("no answer") from None
    if isinstance(document, dict) and "error" in document:
        refused = checked(_Refused.parse, document, subject=subject, node=node)
        raise SnapshotError(refused.error, where=refused.where, hint=refused.hint)
    return checked(kind.parse, document, subject=subject, node=node)


def parse_manifest(text: str, *, node: str) -> SnapshotManifest:
    """Return a snapshot's manifest, as a node has sent it.

    Raises:
        NodeError: it is none.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise NodeError("the node sent something that is not a manifest", node=node) from None
    return checked(SnapshotManifest.parse, document, subject="a manifest", node=node)
