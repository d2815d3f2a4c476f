"""Frames: how the control machine and a node talk over one byte stream. Used by both ends; stdlib only, Python 3.8.

A frame is a kind (one byte), a rank (4 bytes, signed), a length (4 bytes) and that many bytes, all big-endian. JSON
messages carry control, LOG frames carry a worker's output, BYTES frames carry file contents. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import struct

HEADER = struct.Struct("!cii")
JSON = b"J"
LOG = b"L"
BYTES = b"B"
MAX_FRAME = 1 << 20
"""Longest payload in bytes; a longer announced one means that the stream is not ours."""


class BrokenFrame(Exception):
    """The stream ended inside a frame, or what came is not a frame."""


def pack(kind: bytes, payload: bytes, rank: int = -1) -> bytes:
    """The bytes of one frame; `rank` is -1 for all that does not belong to a worker."""
    return HEADER.pack(kind, rank, len(payload)) + payload


def pack_json(message: object) -> bytes:
    """The bytes of one JSON frame."""
    return pack(JSON, json.dumps(message, separators=(",", ":")).encode())


class Parser:
    """Cuts a byte stream into frames, however the bytes arrive."""

    def __init__(self) -> None:
        """Start with nothing received."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, int, bytes]]:
        """Take `data` and return the frames that are now complete, as (kind, rank, payload bytes)."""
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            kind, rank, length = HEADER.unpack_from(self._buffer, start)
            if kind not in (JSON, LOG, BYTES) or not 0 <= length <= MAX_FRAME:
                raise BrokenFrame(f"not a frame: {bytes(self._buffer[start : start + 80])!r}")
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append((kind, rank, bytes(self._buffer[start + HEADER.size : end])))
            start = end
        del self._buffer[:start]
        return frames

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame that have arrived."""
        return len(self._buffer)


class FdLink:
    """Blocking frames over a pair of file descriptors: the node's end before the job starts."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        """Talk over these descriptors, which stay open when the link is dropped."""
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.parser = Parser()
        self._ready: list[tuple[bytes, int, bytes]] = []

    def send_json(self, message: object) -> None:
        """Send one JSON message."""
        self._write(pack_json(message))

    def receive(self) -> tuple[bytes, int, bytes] | None:
        """The next frame as (kind, rank, payload), or None when the other end has closed between two frames."""
        while not self._ready:
            data = os.read(self.read_fd, 1 << 16)
            if not data:
                if self.parser.pending:
                    raise BrokenFrame("the stream ended inside a frame")
                return None
            self._ready.extend(self.parser.feed(data))
        return self._ready.pop(0)

    def receive_json(self) -> dict | None:  # type: ignore[type-arg]  # typing is slow to import on a node
        """The next frame, which must be JSON, decoded; None when the other end has closed."""
        frame = self.receive()
        if frame is None:
            return None
        kind, _, payload = frame
        if kind != JSON:
            raise BrokenFrame(f"expected a message, got {len(payload)} bytes of kind {kind!r}")
        return json.loads(payload)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.write_fd, view) :]
