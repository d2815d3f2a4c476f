"""What makes a file and its name last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from dtctl.runtime.snapshot.place import Place, Remote


class Sink(Protocol):
    """What bytes are written to."""

    def write(self, chunk: bytes | memoryview, /) -> int:
        """Take some, and return how many."""


@contextmanager
def written(path: Place) -> Iterator[Sink]:
    """A new file whose bytes last when the block has ended without an error.

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


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
