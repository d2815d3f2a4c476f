"""Small files that a supervisor leaves in the folder of its run, and how they are written. Stdlib only, Python 3.8."""

from __future__ import annotations

import errno
import os

from dtctl import folders

EXIT_RECORD = "exit.json"
RECORD_BYTES = 64 << 10
"""Room for an exit record: some 300 workers."""
STOP_REQUEST = "stop-request"
"""File in the run's folder that names the requester of a stop; written before the supervisor gets SIGTERM."""


def write_atomically(path: str, data: bytes) -> None:
    """Replace the file at `path` in one step, durable when this returns."""
    partial = path + ".partial"
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folders.sync_folder(os.path.dirname(path))


def reserve(path: str, size: int) -> None:
    """Take room on the disk for a record that has to be written at the end, however full the disk is then.

    Raises:
        OSError: there is none.
    """
    fd = os.open(path + ".reserved", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as exc:
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.pwrite(fd, bytes(size), 0)  # not Linux, or a file system that cannot
    finally:
        os.close(fd)


def write_reserved(path: str, data: bytes) -> None:
    """Write a record into the room that was taken for it, and give it its name.

    Raises:
        OSError: it is longer, and the disk is full.
    """
    fd = os.open(path + ".reserved", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while data:
            data = data[os.write(fd, data) :]
        os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(path + ".reserved", path)
    folders.sync_folder(os.path.dirname(path))
