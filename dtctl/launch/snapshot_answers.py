"""Answers of `python -m dtctl.runtime.snapshot VERB` on a node, one type per verb; see commands.py of that package."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final, TypeVar

from dtctl.errors import NodeError, SnapshotError
from dtctl.launch.control.link import validate_node_value
from dtctl.schema import (
    InvalidMessage,
    Record,
    any_json,
    check_file_name,
    check_flag,
    check_number,
    check_prose,
    define_record_key,
    list_of,
    make_integer_check,
    make_nullable_check,
    make_object_check,
    make_text_check,
    mapping_of,
)
from dtctl.schema import check_path as printable_path

ANSWER_BYTES: Final = 64 << 20
"""Most bytes of one answer, which suffice for some 300,000 tensors."""
_COUNT: Final = make_integer_check(0)
_ROWS: Final = 100_000
_PATHS: Final = list_of(printable_path, _ROWS)


class SnapshotRow(Record):
    """A snapshot that was listed without being verified."""

    path: str = define_record_key(printable_path)
    step: int = define_record_key(_COUNT)
    committed: bool = define_record_key(check_flag)
    size_bytes: int = define_record_key(_COUNT)
    time: float = define_record_key(check_number)
    """Time when the snapshot was made, in seconds since the epoch."""


class VerifiedRow(Record):
    """A snapshot that was read completely and verified."""

    path: str = define_record_key(printable_path)
    step: int = define_record_key(_COUNT)
    status: str = define_record_key(make_text_check(20))
    bad: list[str] = define_record_key(list_of(check_prose))


class PartRow(Record):
    """Part of one snapshot that a node has."""

    path: str = define_record_key(printable_path)
    step: int = define_record_key(_COUNT)
    record: str | None = define_record_key(make_nullable_check(make_text_check(300)))
    """Text of the commit record."""
    manifest: str | None = define_record_key(make_nullable_check(make_text_check(ANSWER_BYTES)))
    good: list[str] = define_record_key(list_of(check_file_name))
    """Files whose contents are right."""
    bad: list[str] = define_record_key(list_of(check_prose))
    made_s: float = define_record_key(check_number)


class FileFacts(Record):
    """A file of a manifest."""

    size_bytes: int = define_record_key(_COUNT)
    digest: str = define_record_key(make_text_check(128))
    part: str | None = define_record_key(make_nullable_check(make_text_check(255)), default=None)


class TensorFacts(Record):
    """A tensor of a snapshot."""

    dtype: str = define_record_key(make_text_check(40))
    shape: list[int] = define_record_key(list_of(_COUNT, 64))


class SnapshotAnswer(Record):
    """An answer to `verb`."""

    verb: ClassVar[str]


class SnapshotListing(SnapshotAnswer):
    """All snapshots, newest first."""

    verb = "ls"
    snapshots: list[SnapshotRow] = define_record_key(list_of(SnapshotRow.parse, _ROWS))


class SnapshotVerification(SnapshotAnswer):
    """All snapshots, newest first, each read completely."""

    verb = "verify"
    snapshots: list[VerifiedRow] = define_record_key(list_of(VerifiedRow.parse, _ROWS))
    newest_good: str | None = define_record_key(make_nullable_check(printable_path))


class SnapshotParts(SnapshotAnswer):
    """Parts of all snapshots that a node has, newest first."""

    verb = "pieces"
    rows: list[PartRow] = define_record_key(list_of(PartRow.parse, _ROWS))


class NewestGoodSnapshot(SnapshotAnswer):
    """The newest good snapshot."""

    path: str = define_record_key(printable_path)
    step: int = define_record_key(_COUNT)
    rejected: list[str] = define_record_key(list_of(check_prose, _ROWS))
    """Reasons why newer snapshots were rejected."""


class SnapshotContents(NewestGoodSnapshot):
    """Parts of a snapshot, and the settings that it was made with."""

    verb = "show"
    hash: str = define_record_key(make_text_check(20))
    facts: Any = define_record_key(any_json)
    files: dict[str, FileFacts] = define_record_key(mapping_of(check_file_name, FileFacts.parse))
    tensors: dict[str, TensorFacts] = define_record_key(mapping_of(make_text_check(4096), TensorFacts.parse, 1_000_000))


class SnapshotDigest(NewestGoodSnapshot):
    """Digest of the model and the optimizer in a snapshot."""

    verb = "digest"
    digest: str = define_record_key(make_text_check(128))


class ExportAnswer(NewestGoodSnapshot):
    """Answer to `export`: the weights were written."""

    verb = "export"
    size_bytes: int = define_record_key(_COUNT)
    out: str | None = define_record_key(make_nullable_check(printable_path))


class PruneAnswer(SnapshotAnswer):
    """Paths of the snapshots that were kept, that were removed, and that could not be removed."""

    verb = "prune"
    kept: list[str] = define_record_key(_PATHS)
    removed: list[str] = define_record_key(_PATHS)
    left: list[str] = define_record_key(_PATHS, default=[])


class RemoveAnswer(SnapshotAnswer):
    """Paths of the snapshots that were removed, and that could not be removed."""

    verb = "remove"
    removed: list[str] = define_record_key(_PATHS)
    left: list[str] = define_record_key(_PATHS, default=[])


class SendAnswer(SnapshotAnswer):
    """Answer to `send`: files of this snapshot were sent."""

    verb = "send"
    path: str = define_record_key(printable_path)
    step: int = define_record_key(_COUNT)


class SnapshotManifest(Record):
    """Part of a snapshot's manifest that is used on this machine."""

    format: int = define_record_key(make_integer_check(1, 1000))
    step: int = define_record_key(_COUNT)
    hash: str = define_record_key(make_text_check(20))
    facts: dict[str, Any] = define_record_key(make_object_check(optional={"retention": any_json}))
    files: dict[str, FileFacts] = define_record_key(mapping_of(check_file_name, FileFacts.parse))


class _RefusedAnswer(Record):
    error: str = define_record_key(check_prose)
    where: str | None = define_record_key(make_nullable_check(check_prose), default=None)
    hint: str | None = define_record_key(make_nullable_check(check_prose), default=None)


A = TypeVar("A", bound=SnapshotAnswer)


def parse_answer(kind: type[A], output: str, *, node: str) -> A:
    """Return the answer in the last line of the command's output.

    Raises:
        InvalidMessage: there is no such line.
        NodeError: the line does not have the form of an answer.
        SnapshotError: the command reports that it has failed.
    """
    subject = f"its answer to `{kind.verb}`"
    lines = output.strip().splitlines()
    try:
        document = json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError):
        raise InvalidMessage("no answer") from None
    if isinstance(document, dict) and "error" in document:
        refused = validate_node_value(_RefusedAnswer.parse, document, subject=subject, node=node)
        raise SnapshotError(refused.error, where=refused.where, hint=refused.hint)
    return validate_node_value(kind.parse, document, subject=subject, node=node)


def parse_node_manifest(text: str, *, node: str) -> SnapshotManifest:
    """Return a snapshot's manifest from the text that a node has sent.

    Raises:
        NodeError: the text is not a manifest.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise NodeError("the node sent something that is not a manifest", node=node) from None
    return validate_node_value(SnapshotManifest.parse, document, subject="a manifest", node=node)
