"""Messages about the folders of `job.shared`. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import (
    Record,
    check_file_name,
    check_flag,
    check_number,
    check_prose,
    define_record_key,
    list_of,
    make_integer_check,
    make_text_check,
)
from dtctl.schema import check_address as numeric_address
from dtctl.supervisor.messages.base import COUNT, NAME, PORT, Message

FILES = 100_000
"""Most files of checkpoints on a node."""
ROWS = 1000
INDEX = make_integer_check(0, FILES)
TIME_NS = make_integer_check(-(1 << 62), 1 << 62)
DIGEST = make_text_check(64)


class ListShared(Message):
    """Request for the list of files below these folders of a run."""

    op = "list-shared"
    run: str = define_record_key(check_file_name)
    paths: list[str] = define_record_key(list_of(NAME, 1000))
    """Folders relative to the working folder; empty: the whole working folder, but only files of checkpoints."""


class OfferShared(Message):
    """Request to serve files to other nodes.

    The answer is SharedOffer, the digests of the blocks of each file that is not gone, and SharedOfferEnd.
    """

    op = "offer-shared"
    files: list[int] = define_record_key(list_of(INDEX, FILES))
    """Row indexes of the files."""
    certificate: str = define_record_key(make_text_check(1 << 16))
    """Certificate of the run as PEM, with which the nodes of the run authenticate each other."""
    key: str = define_record_key(make_text_check(1 << 16))
    """Private key of the run as PEM."""


class SendShared(Message):
    """Request for blocks of the offer, which follow in order in frames of bytes."""

    op = "send-shared"
    blocks: list[int] = define_record_key(list_of(COUNT, 10_000_000))


class SharedCopy(Record):
    """A file that a node has to fetch."""

    path: str = define_record_key(NAME)
    """Path relative to the working folder."""
    size: int = define_record_key(COUNT)
    mtime_ns: int = define_record_key(TIME_NS)
    """Modification time of the original, which the copy gets, too."""
    origin: str = define_record_key(make_text_check(64))
    """Store of the node that has written the file."""
    group: int = define_record_key(COUNT, default=0)
    """Number of the node from which the file is fetched; groups are fetched one after another."""


class FetchShared(Message):
    """Request to fetch files; the answers are PushState, as in a push in blocks.

    A list of SharedCopy follows as JSON, compressed, then PushManifestEnd; then PushRelay, the digests of the blocks of
    each file, and PushManifestEnd again. Each group of files ends with `done`.
    """

    op = "take-shared"
    run: str = define_record_key(check_file_name)
    paths: list[str] = define_record_key(list_of(NAME, 1000))
    """Folders relative to the working folder below which all files have to be."""
    share: float = define_record_key(check_number, default=1.0)
    """Share of the link's speed that may be used; 1: no limit."""


class CommitShared(Message):
    """Request to give fetched files their final names."""

    op = "keep-shared"


class QuarantineShared(Message):
    """Request to move files that may be incomplete out of the shared folders, to another place in the run's folder."""

    op = "set-aside"
    files: list[int] = define_record_key(list_of(INDEX, FILES))


class RemoveShared(Message):
    """Request to remove copies of files that their writer's node no longer has."""

    op = "remove-shared"
    files: list[int] = define_record_key(list_of(INDEX, FILES))
    """Row indexes of the files; a file that was written here is not removed."""


class SharedFile(Record):
    """A file below one of the shared folders."""

    path: str = define_record_key(NAME)
    """Path relative to the working folder."""
    size: int = define_record_key(COUNT)
    mtime_ns: int = define_record_key(TIME_NS)
    age_s: float = define_record_key(check_number)
    """Seconds since the last write to the file, by this node's clock."""
    origin: str = define_record_key(make_text_check(64), default="")
    """Store of the node that wrote the file; empty: this node wrote it."""
    end: str = define_record_key(make_text_check(8), default="")
    """`whole` or `cut` (incomplete), according to the file's format; empty: the format does not show it."""


class SharedRows(Message):
    """Part of the list of files, which ends with SharedListed."""

    op = "shared-rows"
    rows: list[SharedFile] = define_record_key(list_of(SharedFile.parse, ROWS))
    removed: list[str] = define_record_key(list_of(NAME, ROWS), default=[])
    """Files that were written here, copied to other nodes, and removed here since."""


class SharedListed(Message):
    """End of the list of the files in shared folders."""

    op = "shared-listed"
    store: str = define_record_key(make_text_check(64))
    """Random name of this node's disk, made at the first list."""
    is_prepared: bool = define_record_key(check_flag)
    """True if the run has a working folder on this node."""
    skipped: list[str] = define_record_key(list_of(check_prose, 100), default=[])
    """Paths that are left out, each with the reason."""
    free_bytes: int = define_record_key(COUNT, default=0)
    """Free bytes on the disk of the working folder."""


class SharedOffer(Message):
    """Answer to OfferShared: the files that other nodes can fetch from this node."""

    op = "shared-offer"
    gone: list[int] = define_record_key(list_of(INDEX, FILES), default=[])
    """Row indexes of files that have changed since the list and are not offered."""
    address: str = define_record_key(numeric_address, default="")
    port: int = define_record_key(PORT, default=0)
    """Port at which this node serves blocks; 0: it sends blocks over this link only."""
    code: str = define_record_key(make_text_check(40), default="")
    """Code as in the state `blocks` of PushState."""


class SharedOfferEnd(Message):
    """Report: the digests of the blocks were sent."""

    op = "shared-offer-end"


class SharedCommitted(Message):
    """Report: files got their final names, or were set aside or removed."""

    op = "shared-kept"
    files: int = define_record_key(COUNT)
    folder: str = define_record_key(NAME, default="")
    """Folder to which files were set aside."""
    problem: str = define_record_key(check_prose, default="")
    """Reason why some files could not be moved or removed."""
