"""Writing of files whose contents and names survive a power failure."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from dtctl import folders
from dtctl.runtime.snapshot.format.layout import DRAFT_SUFFIX
from dtctl.runtime.snapshot.storage.place import Place, RemotePath

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class ByteSink(Protocol):
    """File-like object that bytes are written to."""

    def write(self, chunk: bytes | memoryview, /) -> int:
        """Write some of the bytes, and return their number."""


@contextmanager
def open_durable_file(path: Place) -> Iterator[ByteSink]:
    """Open a new file, whose bytes are durable when the block has ended without an error.

    Raises:
        OSError: the disk is full, or cannot be written.
        SnapshotError: a store cannot be written.
    """
    if isinstance(path, RemotePath):
        with path.upload() as upload:
            yield upload
        return
    with path.open("w+b", buffering=0) as out:
        yield out
        os.fsync(out.fileno())


def begin_writing(out: ByteSink, begin: int, end: int) -> None:
    """Make the kernel begin to write a stretch of a file to the disk, so that `open_durable_file` has less to wait for.

    Linux writes dirty pages to the disk when it gets the advice that they will not be read soon, and keeps them in
    memory until then (mm/fadvise.c). Other systems and stores do nothing.
    """
    if isinstance(out, io.FileIO) and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(out.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)


def make_durable_folder(path: Place) -> None:
    """Make a folder and its parents, with durable names.

    Raises:
        OSError: the folder cannot be made.
    """
    if not isinstance(path, RemotePath):  # a store has no folders
        folders.make_durable(str(path))


def sync_folder_names(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange_folders(draft: Path, target: Path) -> Path:
    """Swap a draft atomically with the existing folder that it replaces; return where the old folder is now.

    On a file system that cannot swap folders, rename one after the other.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        current_folder, (old, new) = ctypes.c_int(_AT_FDCWD), (os.fsencode(draft), os.fsencode(target))
        if libc.renameat2(current_folder, old, current_folder, new, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
            return draft
    aside = draft.with_suffix(".replaced" + DRAFT_SUFFIX)
    target.rename(aside)
    draft.rename(target)
    return aside
