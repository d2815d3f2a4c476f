"""Text of a log file that may be compressed, in UTF-16 or cut off, or the reason why it cannot be read."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import os
import select
import time
import zlib
from collections import deque
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from dtctl.errors import UsageError

HEAD_BYTES = 32 << 20
TAIL_BYTES = 32 << 20
"""Number of bytes that are read at the beginning and at the end of a longer file, where the failure is."""
CHUNK = 1 << 20
PATIENCE_S = 5.0
"""Longest time to read a compressed file, or a path that is not a regular file, in seconds."""
MOST_BYTES = 16 << 30
"""Limit on the unpacked bytes of compressed data, since a small file may contain any amount."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_LOOK = 64 << 10
_NO_TEXT = bytes([*range(1, 7), *range(14, 27), *range(28, 32)])
_NO_TEXT_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContent:
    """Lines of a log file."""

    text: str
    trouble: str
    """Reason why the file was not read, or not to its end; empty if it was read completely."""


def read_log_content(file: Path) -> LogContent:
    """Return the text of a log.

    Raises:
        UsageError: the system does not allow to read the file.
    """
    try:
        if not file.is_file():
            data, trouble = _read_pipe_data(file)
            return LogContent(text=data.replace(b"\0", b"").decode(errors="replace"), trouble=trouble)
        with file.open("rb") as opened:
            magic = opened.peek(6)[:6]
            if magic.startswith(b"\x28\xb5\x2f\xfd"):
                return LogContent(text="", trouble="it is compressed with zstd, which is not read; unpack it first")
            packed = _open_decompressor(opened, magic)
            data, trouble = _read_plain_file(opened, file) if packed is None else _read_compressed_file(packed)
    except OSError as exc:
        raise UsageError(f"it cannot be read: {exc.strerror or exc}", where=str(file)) from exc
    if not data:
        return LogContent(text="", trouble=trouble or "it is empty")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return LogContent(text=data.decode("utf-16", errors="replace"), trouble=trouble)
    data = data.replace(b"\0", b"")  # holes that a log rotation has left
    first = data[:_LOOK]
    if len(first) - len(first.translate(None, _NO_TEXT)) > _NO_TEXT_SHARE * len(first) or not first:
        return LogContent(text="", trouble="it is not text")
    return LogContent(text=data.decode(errors="replace"), trouble=trouble)


def _read_pipe_data(file: Path) -> tuple[bytes, str]:
    """Return the data that a pipe or a device has now, without waiting for a missing writer or the end."""
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    data, deadline = bytearray(), time.monotonic() + PATIENCE_S
    try:
        while len(data) < HEAD_BYTES and (left_s := deadline - time.monotonic()) > 0:
            try:
                piece = os.read(fd, CHUNK)
            except BlockingIOError:  # a writer is connected, but has not written yet
                select.select([fd], [], [], left_s)
                continue
            if not piece:
                return bytes(data), "" if data else "it is a pipe without a writer"
            data += piece
    finally:
        os.close(fd)
    return bytes(data), f"it is not a file, and its data did not end within {len(data) >> 20} MiB and {PATIENCE_S:g} s"


def _open_decompressor(opened: BufferedReader, magic: bytes) -> gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile | None:
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=opened)
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(opened)
    return lzma.LZMAFile(opened) if magic == b"\xfd7zXZ\x00" else None


def _read_plain_file(opened: BufferedReader, file: Path) -> tuple[bytes, str]:
    data = opened.read(HEAD_BYTES)
    size = file.stat().st_size if file.is_file() else 0
    if size > HEAD_BYTES + TAIL_BYTES:
        opened.seek(size - TAIL_BYTES)
    return data + opened.read(), ""


def _read_compressed_file(packed: gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile) -> tuple[bytes, str]:
    """Return beginning and end of the unpacked data, and the error if the data is damaged."""
    head = bytearray()
    tail: deque[bytes] = deque()
    total, kept, trouble = 0, 0, ""
    deadline = time.monotonic() + PATIENCE_S
    try:
        while chunk := packed.read1(CHUNK):  # returns the data before an error, unlike read
            total += len(chunk)
            if len(head) < HEAD_BYTES:
                head += chunk
                continue
            tail.append(chunk)
            kept += len(chunk)
            while kept - len(tail[0]) >= TAIL_BYTES:
                kept -= len(tail.popleft())
            if total > MOST_BYTES or time.monotonic() > deadline:
                trouble = f"it is longer than {total >> 20} MiB unpacked; the rest was left out"
                break
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as exc:
        trouble = f"its compressed data is damaged or cut off ({exc})"
        trouble += "; what comes before was read" if total else ""
    return bytes(head) + b"".join(tail), trouble
