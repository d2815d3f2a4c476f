"""Frames: how the control machine and a node talk over one byte stream. Used by both ends; stdlib only, Python 3.8.

A frame is a kind (one byte), a rank (4 bytes, signed), a length (4 bytes) and that many bytes, all big-endian. JSON
messages carry control, LOG frames carry a worker's output, BYTES frames carry file contents. Nothing is ever unpickled.
"""

from __future__ import annotations

import _thread
import json
import os
import select
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
    """Return the bytes of one frame; `rank` is -1 for all that does not belong to a worker."""
    return HEADER.pack(kind, rank, len(payload)) + payload


def pack_bytes(data: bytes | memoryview) -> list[bytes]:
    """Return the frames of a long payload."""
    view = memoryview(data)
    return [pack(BYTES, bytes(view[start : start + MAX_FRAME])) for start in range(0, len(view), MAX_FRAME)]


def encode(message: object) -> bytes:
    """Return the JSON of a message: a dictionary, or of messages.py."""
    return json.dumps(message, separators=(",", ":"), default=lambda record: record.to_json()).encode()


def pack_json(message: object) -> bytes:
    """Return the bytes of one JSON frame."""
    return pack(JSON, encode(message))


def decode(payload: bytes) -> dict:  # type: ignore[type-arg]  # typing is slow to import on a node
    """Return the message in a JSON frame.

    Raises:
        BrokenFrame: the payload is not a JSON object.
    """
    try:
        message = json.loads(payload.decode())
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise BrokenFrame(f"not a message: {payload[:80]!r}")
    return message


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

    def __init__(self, read_fd: int, write_fd: int, idle_limit_s: float = 120.0) -> None:
        """Talk over these descriptors, which stay open when the link is dropped.

        Args:
            read_fd: where the other end's bytes come from.
            write_fd: where ours go.
            idle_limit_s: silence after which the other end is taken for lost.
        """
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.idle_limit_s = idle_limit_s
        self.parser = Parser()
        self._writing = _thread.allocate_lock()
        self.ready: list[tuple[bytes, int, bytes]] = []
        """Frames that have arrived and were not asked for yet."""

    def send_json(self, message: object) -> None:
        """Send one JSON message."""
        self._write(pack_json(message))

    def send_frame(self, kind: bytes, payload: bytes, rank: int) -> None:
        """Send one frame of any kind."""
        self._write(pack(kind, payload, rank))

    def send_bytes(self, data: bytes) -> None:
        """Send contents, in as many frames as they take."""
        for frame in pack_bytes(data):
            self._write(frame)

    def receive(self) -> tuple[bytes, int, bytes] | None:
        """The next frame as (kind, rank, payload), pings aside; None when the other end has closed between frames.

        Raises:
            BrokenFrame: the stream ended inside a frame, is not ours, or was silent for too long.
        """
        while True:
            while not self.ready:
                if not select.select([self.read_fd], [], [], self.idle_limit_s)[0]:
                    raise BrokenFrame(f"no message arrived for {self.idle_limit_s:g} seconds")
                data = os.read(self.read_fd, 1 << 18)
                if not data:
                    if self.parser.pending:
                        raise BrokenFrame("the stream ended inside a frame")
                    return None
                self.ready.extend(self.parser.feed(data))
            frame = self.ready.pop(0)
            if frame[0] != JSON or frame[2][:12] != b'{"op":"ping"':
                return frame

    def receive_json(self) -> dict | None:  # type: ignore[type-arg]  # typing is slow to import on a node
        """Return the next frame, which must be JSON, decoded; None when the other end has closed.

        Raises:
            BrokenFrame: as `receive`, or the frame is not JSON.
        """
        frame = self.receive()
        if frame is None:
            return None
        kind, _, payload = frame
        if kind != JSON:
            raise BrokenFrame(f"expected a message, got {len(payload)} bytes of kind {kind!r}")
        return decode(payload)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._writing:  # a frame is whole, whichever thread sends it
            while view:
                view = view[os.write(self.write_fd, view) :]
