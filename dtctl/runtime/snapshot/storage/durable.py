"""Writes of files with contents and names that survive a power failure."""

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
from dtctl.runtime.snapshot.storage.place import Place, Remote

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class ByteSink(Protocol):
    """Destination of bytes."""

    def write(self, chunk: bytes | memoryview, /) -> int:
        """Take some, and return how many."""


@contextmanager
def written(path: Place) -> Iterator[ByteSink]:
    """Open a new file; its bytes are durable when the block has ended without an error.

    Raises:
        OSError: the disk is full, or cannot be written.
        SnapshotError: a store cannot be written.
    """
    if isinstance(path, Remote):
        with path.upload() as upload:
            yield upload
        return
    with path.open("wb", buffering=0) as out:
        yield out
        os.fsync(out.fileno())


def begin_writing(out: ByteSink, begin: int, end: int) -> None:
    """Make the kernel begin to write a stretch of a file to the disk, so that `written` has less to wait for.

    On the advice that pages will not be read soon, Linux writes those that are dirty, and keeps them in memory until
    they are clean (mm/fadvise.c). On other systems and in stores there is no such effect.
    """
    if isinstance(out, io.FileIO) and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(out.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)


def make_folder(path: Place) -> None:
    """Make a folder and those above it, with durable names.

    Raises:
        OSError: the folder cannot be made.
    """
    if not isinstance(path, Remote):  # a store has no folders
        folders.make_durable(str(path))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchanged(draft: Path, target: Path) -> Path:
    """Give a draft the name of a folder that is there, at once, so that there is never none; where that is now.

    Where the file system cannot, one is renamed after the other.
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
