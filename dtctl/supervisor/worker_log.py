"""The log of a worker on its node and on the control machine: torchrun's marks and the limit. Stdlib only, Python 3.8.

Above the limit (`job.log_mib`) the middle is cut out. A node cuts its own file, and the control machine cuts its copy,
so that a node that sends endless output does not fill the disk.
"""

from __future__ import annotations

import os

from dtctl.supervisor.frames import AGENT

RANK_MARK = b"[dtctl:"
"""Prefix of a line that worker R printed under torchrun: `[dtctl:R] `, by TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""
CUT_MARK = b"[dtctl: %d bytes were cut here, see job.log_mib]\n"
COPY_BYTES = 1 << 20


def split_prefix(line: bytes) -> tuple[int, bytes]:
    """Return the rank in torchrun's prefix and the rest of the line; without a prefix, AGENT and the whole line."""
    if line.startswith(RANK_MARK):
        end = line.find(b"]", len(RANK_MARK))
        digits = line[len(RANK_MARK) : end]
        if end > 0 and digits.isdigit():
            text = line[end + 1 :]
            return int(digits), text[1:] if text[:1] == b" " else text
    return AGENT, line


def split_limit(limit_bytes: int) -> tuple:  # type: ignore[type-arg]
    """Return the bytes that are kept at the beginning and at the end: a half and an eighth of the limit."""
    return limit_bytes // 2, limit_bytes // 8


def cut_log(fd: int, begin: int, end: int, size: int, cut_bytes: int) -> int:
    """Replace the bytes between two offsets of a file by a line with the number of bytes that were cut.

    Args:
        fd: the file.
        begin: offset at which the cut begins.
        end: offset at which the cut ends, at least the length of the line behind `begin`.
        size: size of the file in bytes.
        cut_bytes: number for the line.

    Returns:
        The new offset of the bytes after the cut.

    Raises:
        OSError: the file could not be changed.
    """
    mark = b"\n" + CUT_MARK % cut_bytes
    target = begin + os.pwrite(fd, mark, begin)
    for offset in range(0, size - end, COPY_BYTES):  # In this order, all bytes are read before they are overwritten.
        data = os.pread(fd, min(COPY_BYTES, size - end - offset), end + offset)
        os.pwrite(fd, data, target + offset)
    os.ftruncate(fd, target + size - end)
    return target
