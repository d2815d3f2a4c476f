"""Messages of `dtctl fetch`. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import (
    check_flag,
    check_prose,
    define_record_key,
    list_of,
    make_integer_check,
    make_text_check,
    make_two_item_check,
)
from dtctl.supervisor.messages.base import COUNT, NAME, Message

FILES = 1_000_000
ROWS = 1000
INDEX = make_integer_check(0, FILES)


class ListOutputs(Message):
    """Request for the list of files that a run has left."""

    op = "list"
    run_dir: str = define_record_key(NAME)
    """Folder of the run; may begin with `~`."""
    paths: list[str] = define_record_key(list_of(NAME))
    """Paths relative to the working folder, or absolute; empty: all files that the run's programs wrote."""


class DigestFiles(Message):
    """Request for the digests of the beginnings of these files."""

    op = "digest"
    files: list[tuple[int, int]] = define_record_key(list_of(make_two_item_check(INDEX, COUNT)))
    """Row index of each file, and length in bytes."""


class SendFiles(Message):
    """Request for the contents of these files."""

    op = "send"
    files: list[tuple[int, int]] = define_record_key(list_of(make_two_item_check(INDEX, COUNT)))
    """Row index of each file, and offset of the first byte to send."""


class OutputRows(Message):
    """Part of the list of files, which ends with OutputsListed."""

    op = "rows"
    rows: list[tuple[str, int]] = define_record_key(list_of(make_two_item_check(NAME, COUNT), ROWS))
    """Path of each file in the working folder, and its size in bytes."""


class OutputLinks(Message):
    """Part of the list of symbolic links, which ends with OutputsListed."""

    op = "links"
    rows: list[tuple[str, str]] = define_record_key(list_of(make_two_item_check(NAME, NAME), ROWS))
    """Path of each link in the working folder, and its target."""


class OutputsListed(Message):
    """End of the list of a run's outputs."""

    op = "listed"
    is_there: bool = define_record_key(check_flag)
    """True if the node has a working folder of the run."""
    unnameable: int = define_record_key(COUNT)
    """Number of files left out because of their names."""


class FileDigest(Message):
    """Digest of the beginning of a file."""

    op = "digest"
    index: int = define_record_key(INDEX)
    digest: str = define_record_key(make_text_check(64))
    """SHA-256; empty if the file has become shorter or is gone."""


class DigestsEnd(Message):
    """Report: all requested digests have been sent."""

    op = "digested"


class FileSent(Message):
    """Report: the contents of a file have been sent."""

    op = "sent"
    index: int = define_record_key(INDEX)
    digest: str = define_record_key(make_text_check(64))
    """SHA-256 of the whole file."""
    problem: str = define_record_key(check_prose)
    """Reason why the file could not be read; empty: it was read."""
