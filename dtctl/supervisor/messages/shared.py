"""Messages about the folders of `job.shared`. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import Record, file_name, flag, integer, list_of, number, prose, text, value
from dtctl.schema import address as numeric_address
from dtctl.supervisor.messages.base import COUNT, NAME, PORT, Message

FILES = 100_000
"""Files of checkpoints on a node; more are no checkpoints."""
ROWS = 1000
INDEX = integer(0, FILES)
TIME_NS = integer(-(1 << 62), 1 << 62)
DIGEST = text(64)


class ListShared(Message):
    """Question: the files below these folders of a run."""

    op = "list-shared"
    run: str = value(file_name)
    paths: list[str] = value(list_of(NAME, 1000))
    """Folders, relative to the working folder; empty: all of it, but only files that look like checkpoints."""


class OfferShared(Message):
    """Let other nodes fetch these files.

    The answer is SharedOffer, the digests of the blocks of each file that is not gone, and SharedOfferEnd.
    """

    op = "offer-shared"
    files: list[int] = value(list_of(INDEX, FILES))
    """Indexes of their rows."""
    certificate: str = value(text(1 << 16))
    """Certificate of the run, PEM; its nodes authenticate each other with it."""
    key: str = value(text(1 << 16))
    """Private key of the run, PEM."""


class SendShared(Message):
    """Send these blocks of the offer; they follow in order, in frames of bytes."""

    op = "send-shared"
    blocks: list[int] = value(list_of(COUNT, 10_000_000))


class SharedCopy(Record):
    """A file that a node is to get."""

    path: str = value(NAME)
    """Relative to the working folder."""
    size: int = value(COUNT)
    mtime_ns: int = value(TIME_NS)
    """Time that it gets, which is that of the original."""
    origin: str = value(text(64))
    """Store of the node that has written it."""
    group: int = value(COUNT, default=0)
    """Number of the node that it is fetched from; groups are fetched one after the other."""


class TakeShared(Message):
    """Fetch files, which are answered by PushState, as in a push that goes in blocks.

    A list of SharedCopy follows as JSON, compressed, then PushManifestEnd; then PushRelay, the digests of the blocks of
    each file, and PushManifestEnd again. Each group of files ends with `done`.
    """

    op = "take-shared"
    run: str = value(file_name)
    paths: list[str] = value(list_of(NAME, 1000))
    """Folders below which files may lie, relative to the working folder."""
    share: float = value(number, default=1.0)
    """Share of the speed of the link that may be used; 1: all of it."""


class KeepShared(Message):
    """Give the files that were taken their names."""

    op = "keep-shared"


class SetAside(Message):
    """Move files out of the folders, to a place in the run's folder: it is unknown whether they are complete."""

    op = "set-aside"
    files: list[int] = value(list_of(INDEX, FILES))


class SharedFile(Record):
    """A file below one of the folders."""

    path: str = value(NAME)
    """Relative to the working folder."""
    size: int = value(COUNT)
    mtime_ns: int = value(TIME_NS)
    age_s: float = value(number)
    """Seconds since it was written to, by this node's clock."""
    origin: str = value(text(64), default="")
    """Store of the node that it was copied from; empty: it was written here."""
    end: str = value(text(8), default="")
    """Contents by their format: `whole`, or `cut` off before their end; empty: of no format that shows it."""


class SharedRows(Message):
    """Some of the files, until SharedListed."""

    op = "shared-rows"
    rows: list[SharedFile] = value(list_of(SharedFile.parse, ROWS))


class SharedListed(Message):
    """These were all."""

    op = "shared-listed"
    store: str = value(text(64))
    """Name of these folders on this node, made by chance when they were first looked at."""
    is_prepared: bool = value(flag)
    """True if the run has a working folder here."""
    skipped: list[str] = value(list_of(prose, 100), default=[])
    """Paths that are left out, with the reason each."""
    free_bytes: int = value(COUNT, default=0)
    """Room on the disk of the working folder."""


class SharedOffer(Message):
    """These files can be fetched here."""

    op = "shared-offer"
    gone: list[int] = value(list_of(INDEX, FILES), default=[])
    """Indexes of files that are not as they were listed, and are not offered."""
    address: str = value(numeric_address, default="")
    port: int = value(PORT, default=0)
    """0: it serves none; they are sent over this link."""


class SharedOfferEnd(Message):
    """The digests of the blocks were sent."""

    op = "shared-offer-end"


class SharedKept(Message):
    """Files have their names now, or were set aside."""

    op = "shared-kept"
    files: int = value(COUNT)
    folder: str = value(NAME, default="")
    """Folder that they were moved to."""
    problem: str = value(prose, default="")
    """Reason why some could not be moved."""
