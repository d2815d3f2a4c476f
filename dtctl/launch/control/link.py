"""The control machine's end of the link to one node: our program started there, then frames in both directions.

Decides how frames are sent and read and what an error of the node's means; `dtctl/supervisor/frames.py` has the format.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from dtctl import shell
from dtctl.errors import ConnectError, DtctlError, NodeError, TransferError
from dtctl.launch.control import messages
from dtctl.supervisor import bootstrap, frames
from dtctl.transport.base import ByteStream, Connection

HINTS = {
    "disk-full": "free some space there, or set `cluster.workdir` to another disk",
    "missing-program": "install it there, name its folder in `cluster.python`, or activate it in `job.setup`",
    "missing-file": "is it in the folder that is pushed, and not in .gitignore or .dtctlignore?",
    "old-python": "set `cluster.python` to a Python 3.8 or newer on that node",
    "permission": "the login user has to own `cluster.workdir`",
    "workdir": "set `cluster.workdir` to a folder that the login user may write to",
    "run-exists": "choose another `--name`",
    "foreign": "then launch again; or set `cluster.workdir` to a folder of the login user's own",
}


def error_of(message: dict[str, Any], node: str) -> DtctlError:
    """The error that a node's `error` message means."""
    code, text = message.get("code", ""), message.get("message", "unknown error")
    if code == "missing-program":
        text = f"{text}: there is no such program on the node"
    if code == "disk-full":
        text = f"the disk is full: {text}"
    return NodeError(text, node=node, hint=HINTS.get(code))


class NodeLink:
    """Frames to and from one node. Reading and writing may happen in two threads, each by one."""

    def __init__(self, stream: ByteStream, *, node: str, python: str = "python3") -> None:
        """`python`: what was started there, for messages."""
        self.stream = stream
        self.node = node
        self._python = python
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
                    f"the node answered with output that is not dtctl's: {exc}",
                    node=self.node,
                    hint="a shell start-up file of the login user probably prints text: "
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

    def expect(self, op: str) -> dict[str, Any]:
        """The next message of a supervisor that was not started yet, which must be `op`.

        Raises:
            NodeError: the node says that it cannot go on, or there is no usable Python.
            ConnectError: the link is gone.
        """
        raw_message = self.receive_json()
        if raw_message is None:
            raise self.closed_error()
        message = messages.before_start(raw_message, node=self.node)
        if message["op"] == "error":
            raise error_of(message, self.node)
        if message["op"] != op:
            raise TransferError(f"expected {op!r} from the node and got {message['op']!r}", node=self.node)
        return message

    def closed_error(self) -> DtctlError:
        """Why the node's end has closed: no Python, a program that has ended, or a link that is gone."""
        status = self.stream.exit_status(2.0)
        lines = self.stream.read_stderr().decode(errors="replace").strip().splitlines()
        last = messages.prose(lines[-1]) if lines else ""
        if status in (126, 127):
            return NodeError(
                f"{self._python} cannot be started on the node: {last or 'not found'}",
                node=self.node,
                hint="install Python 3.8 or newer there, or set `cluster.python` to where it is",
            )
        if status is None:
            return ConnectError("the link was lost", node=self.node, hint="did the node go down just now?")
        return NodeError(
            f"dtctl's program on the node exited with status {status}{f': {last}' if last else ''}",
            node=self.node,
            hint=f"try `{shell.join([self._python, '-c', 'print(1)'])}` there",
        )


def open_supervisor(
    connection: Connection, first: dict[str, Any], *, node: str, python: str | None, workdir: str
) -> NodeLink:
    """Start the supervisor on a node and send it its first message."""
    return open_program(connection, bootstrap.opening(workdir) + frames.pack_json(first), node=node, python=python)


def open_program(connection: Connection, program: bytes, *, node: str, python: str | None) -> NodeLink:
    """Start Python on a node with a program of ours, of `bootstrap`; frames follow.

    Args:
        connection: to the node.
        program: what is sent first.
        node: its name.
        python: program name or path there; None for python3.
    """
    python = python or "python3"
    link = NodeLink(connection.open(bootstrap.command(python)), node=node, python=python)
    with contextlib.suppress(ConnectError):  # it has ended already; `why_silent` tells why
        link.stream.write(program)
    return link


class SilenceLimit:
    """Closes a connection over which nothing arrives for too long, so that a blocked reader returns."""

    def __init__(self, connection: Connection, limit_s: float) -> None:
        self._connection, self._limit_s, self._expired = connection, limit_s, False
        self._timer: threading.Timer | None = None
        self.reset()

    def reset(self) -> None:
        """Restart the timer."""
        self.cancel()
        self._timer = threading.Timer(self._limit_s, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def check(self, node: str) -> None:
        """The end has been reached: of what there is to read, or of the time.

        Raises:
            ConnectError: the latter.
        """
        self.cancel()
        if self._expired:
            raise ConnectError(f"no message arrived from it for {self._limit_s:g} s", node=node)

    def _expire(self) -> None:
        self._expired = True
        self._connection.close()
