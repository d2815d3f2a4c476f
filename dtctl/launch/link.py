"""The control machine's end of the talk with one node: frames over a transport's stream.

Decides how frames are read, nothing about their meaning; `dtctl/supervisor/frames.py` has the format.
"""

from __future__ import annotations

import threading
from typing import Any

from dtctl.errors import ConnectError, NodeError
from dtctl.supervisor import frames
from dtctl.transport.base import Connection, Stream


class Link:
    """Frames to and from one node. Reading and writing may happen in two threads, each by one."""

    def __init__(self, stream: Stream, *, node: str) -> None:
        self.stream = stream
        self.node = node
        self._parser = frames.Parser()
        self._ready: list[tuple[bytes, int, bytes]] = []

    def send_json(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            ConnectError: the link is gone.
        """
        self.stream.write(frames.pack_json(message))

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send file contents, in as many frames as it takes.

        Raises:
            ConnectError: the link is gone.
        """
        view = memoryview(data)
        for start in range(0, len(view), frames.MAX_FRAME):
            self.stream.write(frames.pack(frames.BYTES, bytes(view[start : start + frames.MAX_FRAME])))

    def last_words(self) -> tuple[int | None, str]:
        """Exit status of the node's end, None if it is not known, and what it has said on standard error."""
        status = self.stream.exit_status(2.0)
        return status, self.stream.read_stderr().decode(errors="replace").strip()

    def receive(self) -> tuple[bytes, int, bytes] | None:
        """The next frame as (kind, rank, payload); None when the node's end closed between two frames.

        Raises:
            NodeError: what came is not from our supervisor, for example a banner of a shell start-up file.
            ConnectError: the stream ended inside a frame.
        """
        while not self._ready:
            data = self.stream.read(1 << 18)
            if not data:
                if self._parser.pending:
                    raise ConnectError("the link was lost in the middle of a message", node=self.node)
                return None
            try:
                self._ready.extend(self._parser.feed(data))
            except frames.BrokenFrame as exc:
                raise NodeError(
                    f"the node answered with something that dtctl did not send: {exc}",
                    node=self.node,
                    hint="a shell start-up file of the login user probably prints text; "
                    "let it print only in interactive shells",
                ) from exc
        return self._ready.pop(0)

    def receive_json(self) -> dict[str, Any] | None:
        """The next frame, which must be a message, decoded; None when the node's end closed.

        Raises:
            NodeError: a frame of another kind came.
            ConnectError: the stream ended inside a frame.
        """
        frame = self.receive()
        if frame is None:
            return None
        kind, _, payload = frame
        if kind != frames.JSON:
            raise NodeError(f"expected a message, got {len(payload)} bytes of kind {kind!r}", node=self.node)
        return self.decode(payload)

    def decode(self, payload: bytes) -> dict[str, Any]:
        """The message in a frame of JSON, of which nothing is certain but that it is an object; see messages.py.

        Raises:
            NodeError: there is none.
        """
        try:
            return frames.decode(payload)
        except frames.BrokenFrame as exc:
            raise NodeError(f"the node sent something that is {exc}", node=self.node) from None


class Patience:
    """Drops a connection over which nothing comes for too long, so that whoever reads from it goes on."""

    def __init__(self, connection: Connection, limit_s: float) -> None:
        self._connection, self._limit_s, self._over = connection, limit_s, False
        self._timer: threading.Timer | None = None
        self.heard()

    def heard(self) -> None:
        """Begin anew."""
        self.end()
        self._timer = threading.Timer(self._limit_s, self._drop)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def check(self, node: str) -> None:
        """The end has been reached: of what there is to read, or of the time.

        Raises:
            ConnectError: the latter.
        """
        self.end()
        if self._over:
            raise ConnectError(f"nothing was heard of it for {self._limit_s:g} s", node=node)

    def _drop(self) -> None:
        self._over = True
        self._connection.close()
