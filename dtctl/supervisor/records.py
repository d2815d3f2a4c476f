"""Writing of small files that a supervisor leaves in the folder of its run. Stdlib only, Python 3.8."""

from __future__ import annotations

import errno
import os

from dtctl import folders

EXIT_RECORD = "exit.json"
RECORD_BYTES = 64 << 10
"""Bytes that are reserved for an exit record, enough for some 300 workers."""
STOP_REQUEST = "stop-request"
"""File in the run's folder with the requester of a stop, which is written before the supervisor gets SIGTERM."""


def write_atomically(path: str, data: bytes) -> None:
    """Replace the file at `path` in one step; the new contents are durable when this function returns."""
    partial = path + ".partial"
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folders.sync_folder_entries(os.path.dirname(path))


def reserve_record_space(path: str, size: int) -> None:
    """Reserve space on the disk for a record that has to be written at the end, even if the disk is full then.

    Raises:
        OSError: the disk has no space.
    """
    fd = os.open(path + ".reserved", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as exc:
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.pwrite(fd, bytes(size), 0)  # The system or the file system has no call for this.
    finally:
        os.close(fd)


def write_reserved(path: str, data: bytes) -> None:
    """Write a record into the reserved space, and rename the file to its final name.

    Raises:
        OSError: the record is longer than the reserved space, and the disk is full.
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
    folders.sync_folder_entries(os.path.dirname(path))
