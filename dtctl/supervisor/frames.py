"""Frames between the control machine and a node in one byte stream. Used by both ends; stdlib only, Python 3.8.

A frame is a kind (one byte), a rank (4 bytes, signed), a length (4 bytes) and that many bytes, all big-endian. JSON
frames carry messages, LOG frames a worker's output, BYTES frames file contents. A node whose Python cannot run the sent
code requests the texts of the modules with a TEXTS frame, and gets them in one. No data are ever unpickled.
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
TEXTS = b"T"
AGENT = -1
"""Rank of the output of torchrun's agent, or of a command that is not a worker."""
METRICS = -2
"""Rank under which nodes send the lines of metrics.jsonl."""
AGENT_FILE = "agent.log"
MAX_FRAME = 1 << 20
"""Most bytes of a payload; a longer announced payload means that the stream is not from dtctl."""


class BrokenFrame(Exception):
    """The stream ended inside a frame, or the received bytes are not a frame."""


def format_log_name(rank: int) -> str:
    """Return the name of the file with a rank's output."""
    return AGENT_FILE if rank < 0 else "rank-%d.log" % rank


def parse_log_name(name: str) -> int:
    """Return the rank whose output is in a file with this name.

    Raises:
        ValueError: The name is not that of a log.
    """
    return AGENT if name == AGENT_FILE else int(name[len("rank-") : -len(".log")])


def pack_frame(kind: bytes, payload: bytes, rank: int = -1) -> bytes:
    """Return the bytes of one frame; `rank` is -1 for a frame that does not belong to a worker."""
    return HEADER.pack(kind, rank, len(payload)) + payload


def pack_bytes(data: bytes | memoryview) -> list[bytes]:
    """Return the frames of a long payload."""
    view = memoryview(data)
    return [pack_frame(BYTES, bytes(view[start : start + MAX_FRAME])) for start in range(0, len(view), MAX_FRAME)]


def encode_message(message: object) -> bytes:
    """Return the JSON of a message, which is a dictionary or a class of `messages`."""
    return json.dumps(message, separators=(",", ":"), default=lambda record: record.to_json()).encode()


def pack_json(message: object) -> bytes:
    """Return the bytes of one JSON frame."""
    return pack_frame(JSON, encode_message(message))


def decode_message(payload: bytes) -> dict:  # type: ignore[type-arg]  # typing is slow to import on a node
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


class FrameParser:
    """Parser that splits a byte stream into frames, whatever pieces arrive."""

    def __init__(self) -> None:
        """Start without received bytes."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, int, bytes]]:
        """Take `data` and return the frames that are now complete, as (kind, rank, payload bytes)."""
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            kind, rank, length = HEADER.unpack_from(self._buffer, start)
            if kind not in (JSON, LOG, BYTES, TEXTS) or not 0 <= length <= MAX_FRAME:
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
        """Return the number of received bytes of an incomplete frame."""
        return len(self._buffer)


class FdLink:
    """Blocking frames over a pair of file descriptors: the node's end before the job starts."""

    def __init__(self, read_fd: int, write_fd: int, idle_limit_s: float = 120.0) -> None:
        """Use two descriptors, which stay open when the link is dropped.

        Args:
            read_fd: descriptor for the bytes of the other end.
            write_fd: descriptor for the bytes of this end.
            idle_limit_s: seconds of silence after which the other end counts as lost.
        """
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.idle_limit_s = idle_limit_s
        self.parser = FrameParser()
        self._writing = _thread.allocate_lock()
        self.ready: list[tuple[bytes, int, bytes]] = []
        """Frames that have arrived and were not yet returned by `receive`."""

    def send_json(self, message: object) -> None:
        """Send one JSON message."""
        self._write_whole_frame(pack_json(message))

    def send_frame(self, kind: bytes, payload: bytes, rank: int) -> None:
        """Send one frame of any kind."""
        self._write_whole_frame(pack_frame(kind, payload, rank))

    def send_bytes(self, data: bytes) -> None:
        """Send contents, in as many frames as needed."""
        for frame in pack_bytes(data):
            self._write_whole_frame(frame)

    def receive(self) -> tuple[bytes, int, bytes] | None:
        """Return the next frame that is not a ping as (kind, rank, payload); None if the other end has closed.

        Raises:
            BrokenFrame: the stream ended inside a frame, is not from dtctl, or was silent for too long.
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
        """Return the next frame, which must be JSON, decoded; None if the other end has closed.

        Raises:
            BrokenFrame: as `receive`, or the frame is not JSON.
        """
        frame = self.receive()
        if frame is None:
            return None
        kind, _, payload = frame
        if kind != JSON:
            raise BrokenFrame(f"expected a message, got {len(payload)} bytes of kind {kind!r}")
        return decode_message(payload)

    def _write_whole_frame(self, data: bytes) -> None:
        view = memoryview(data)
        with self._writing:  # Each frame is sent as a whole, whatever threads send.
            while view:
                view = view[os.write(self.write_fd, view) :]
