"""Messages of `dtctl fetch`. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import flag, integer, list_of, pair, prose, text, value
from dtctl.supervisor.messages.base import COUNT, NAME, Message

FILES = 1_000_000
ROWS = 1000
INDEX = integer(0, FILES)


class ListOutputs(Message):
    """Question: the files that a run has left."""

    op = "list"
    run_dir: str = value(NAME)
    """Folder of the run; may begin with `~`."""
    paths: list[str] = value(list_of(NAME))
    """Relative to the working folder, or absolute; nothing: all that the run's programs wrote."""


class DigestFiles(Message):
    """Question: the digests of the beginnings of these files."""

    op = "digest"
    files: list[tuple[int, int]] = value(list_of(pair(INDEX, COUNT)))
    """Index of its row, and length in bytes."""


class SendFiles(Message):
    """Send these files."""

    op = "send"
    files: list[tuple[int, int]] = value(list_of(pair(INDEX, COUNT)))
    """Index of its row, and the offset to begin at."""


class OutputRows(Message):
    """Some of the files, until OutputsListed."""

    op = "rows"
    rows: list[tuple[str, int]] = value(list_of(pair(NAME, COUNT), ROWS))
    """Path in the working folder, and size in bytes."""


class OutputLinks(Message):
    """Some of the symbolic links, until OutputsListed."""

    op = "links"
    rows: list[tuple[str, str]] = value(list_of(pair(NAME, NAME), ROWS))
    """Path in the working folder, and where it leads."""


class OutputsListed(Message):
    """These were all."""

    op = "listed"
    is_there: bool = value(flag)
    """True if the node has a working folder of the run."""
    unnameable: int = value(COUNT)
    """Files left out because of their names."""


class FileDigest(Message):
    """Digest of the beginning of a file."""

    op = "digest"
    index: int = value(INDEX)
    digest: str = value(text(64))
    """SHA-256; empty when the file is shorter by now, or gone."""


class DigestsEnd(Message):
    """All digests that were requested have been sent."""

    op = "digested"


class FileSent(Message):
    """The contents of a file have been sent."""

    op = "sent"
    index: int = value(INDEX)
    digest: str = value(text(64))
    """SHA-256 of all of it."""
    problem: str = value(prose)
    """Reason why it could not be read; empty: it was."""
