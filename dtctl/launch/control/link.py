"""The control machine's end of the link to one node: the start of dtctl's program, then frames in both directions.

This module sends and reads frames, and turns a node's errors into exceptions; `dtctl/supervisor/frames.py` defines the
format.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

from dtctl import shell
from dtctl.errors import ConnectError, DtctlError, NodeError
from dtctl.schema import InvalidMessage, check_prose
from dtctl.supervisor import bootstrap, frames
from dtctl.supervisor.messages.base import Message, Refusal, StillWorking, index_message_types, parse_message_document
from dtctl.supervisor.messages.setup import NodeDescription
from dtctl.supervisor.requests import find_module
from dtctl.transport.base import ByteStream, Connection, Target, Transport

T = TypeVar("T")
Kind = TypeVar("Kind", bound=Message)
HINTS = {
    "disk-full": "free some space there, or set `cluster.workdir` to another disk",
    "missing-file": "is it in the folder that is pushed, and not in .gitignore or .dtctlignore?",
    "missing-there": "with `job.files.push: false` it must exist on the node: copy it there, or set `job.files.root`",
    "missing-folder": "with `job.files.push: false` the code must exist on the node: copy it there, or set "
    "`job.files.root`",
    "environment": "correct `job.environment`, or the file that it names, and launch again",
    "no-python": "install it there, or set `job.environment.python` to a version that nodes have; with `wheels: relay` "
    "they fetch none",
    "no-environment": "launch again; `dtctl clean` may have removed it",
    "no-folder": "nodes need it under the same path; a wheel that the file of requirements names is brought",
    "unreachable": "set `job.environment.index` to an index that nodes reach, or to a folder of wheels that all have; "
    "or set `job.environment.wheels: relay`, with which this machine downloads the wheels and sends them; a Python "
    "that a node lacks comes from github.com, unless you install it there",
    "no-uv": "install uv there, or run `pip install uv` on this machine, from which dtctl copies it",
    "platform": "set `job.environment.platform`; all nodes of a job need one kind of processor",
    "missing-data": "copy it there, or correct `job.data`",
    "too-large": "name a smaller folder as `job.files.root`, and data by absolute paths; or let dtctl push the code",
    "old-python": "set `cluster.python` to a Python 3.8 or newer on that node",
    "permission": "the login user has to own `cluster.workdir`",
    "workdir": "set `cluster.workdir` to a folder that the login user may write to",
    "run-exists": "choose another `--name`",
    "foreign": "then launch again; or set `cluster.workdir` to a folder of the login user's own",
}


def build_refusal_error(refusal: Refusal, node: str) -> DtctlError:
    """Return the error that a node's refusal means."""
    code, text = refusal.code, refusal.message
    if code == "missing-program":
        return NodeError(f"{text}: there is no such program on the node", node=node, hint=_hint_of_program(text))
    if code == "disk-full":
        text = f"the disk is full: {text}"
    return NodeError(text, node=node, hint=HINTS.get(code))


def _hint_of_program(program: str) -> str:
    """Return the hint for a program that was not found."""
    if program == "torchrun" or re.fullmatch(r"(\S*/)?(python|pypy)[\d.]*", program):
        return "set `cluster.python` to the Python there that has torch, or activate it in `job.setup`"
    if "/" in program:
        return "a relative path begins in the folder that is pushed: is it there, executable, and not ignored?"
    return "install it there, write its whole path in `job.command`, or put it on PATH in `job.setup`"


class NodeLink:
    """Frames to and from one node; one thread may read while another one writes."""

    def __init__(self, stream: ByteStream, *, node: str, python: str = "python3") -> None:
        """Use a stream for frames; `python` is the program that was started on the node, for error messages."""
        self.stream = stream
        self.node = node
        self._python = python
        self._parser = frames.FrameParser()
        self._ready: list[tuple[bytes, int, bytes]] = []
        self._writing = threading.Lock()
        self.answering = ""
        """Module that answers on the node, whose text the node has not requested yet."""
        self.clock: SilenceLimit | None = None
        """Limit on the node's silence, which each message restarts."""
        self.description: NodeDescription | None = None
        """Report of the node about itself before it is prepared."""
        self.waiting_since: float | None = None
        """Time when the wait for an answer began, or of the last report of work since; None: no answer is awaited."""

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ConnectError: the link is gone.
        """
        self._write_frame(frames.pack_json(message))

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send file contents, in as many frames as needed.

        Raises:
            ConnectError: the link is gone.
        """
        for frame in frames.pack_bytes(data):
            self._write_frame(frame)

    def _write_frame(self, frame: bytes) -> None:
        with self._writing:  # The reading thread writes, too, if the node requests texts.
            self.stream.write(frame)

    def _send_texts(self) -> None:
        """Send the program as text to a node whose Python cannot run the code."""
        if not self.answering:
            raise NodeError("the node requested the text of dtctl's program twice", node=self.node)
        answering, self.answering = self.answering, ""
        self._write_frame(frames.pack_frame(frames.TEXTS, bootstrap.load_texts(answering)))

    def receive(self) -> tuple[bytes, int, bytes] | None:
        """Return the next frame as (kind, rank, payload); None when the node's end closed between two frames.

        Raises:
            NodeError: the bytes are not from dtctl's supervisor, for example a banner of a shell start-up file.
            ConnectError: the stream ended inside a frame.
        """
        frame = self._receive_frame()
        while frame is not None and frame[0] == frames.TEXTS:
            self._send_texts()
            frame = self._receive_frame()
        return frame

    def _receive_frame(self) -> tuple[bytes, int, bytes] | None:
        while not self._ready:
            data = self.stream.read(1 << 18)
            if self.clock is not None:
                self.clock.reset()
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
        """Return the next frame, which must be a message, decoded; None when the node's end closed.

        Raises:
            NodeError: a frame of another kind came.
            ConnectError: the stream ended inside a frame.
        """
        while True:
            self.waiting_since = time.monotonic()
            frame = self.receive()
            self.waiting_since = None
            if frame is None:
                return None
            kind, _, payload = frame
            if kind != frames.JSON:
                raise NodeError(f"expected a message, got {len(payload)} bytes of kind {kind!r}", node=self.node)
            document = self.decode(payload)
            if document.get("op") != StillWorking.op:
                return document

    def decode(self, payload: bytes) -> dict[str, Any]:
        """Return the object in a frame of JSON, without further checks; see `parse_message`.

        Raises:
            NodeError: the frame has no JSON object.
        """
        try:
            return frames.decode_message(payload)
        except frames.BrokenFrame as exc:
            raise NodeError(f"the node sent something that is {exc}", node=self.node) from None

    def expect(self, *kinds: type[Kind]) -> Kind:
        """Return the next message, which must be of one of these kinds.

        Raises:
            NodeError: the node reports that it cannot continue, or there is no usable Python.
            ConnectError: the link is gone.
        """
        document = self.receive_json()
        if document is None:
            raise self.closed_error()
        return self._parse_node_reply(document, kinds)

    def parse(self, payload: bytes, *kinds: type[Kind]) -> Kind:
        """Return the message in a frame of JSON, which must be of one of these kinds.

        Raises:
            NodeError: the message is of another kind, or reports that the node cannot continue.
        """
        return self._parse_node_reply(self.decode(payload), kinds)

    def _parse_node_reply(self, document: Mapping[str, Any], kinds: tuple[type[Kind], ...]) -> Kind:
        message = parse_message(document, index_message_types(*kinds, Refusal), node=self.node)
        if isinstance(message, Refusal):
            raise build_refusal_error(message, self.node)
        return cast("Kind", message)

    def closed_error(self) -> DtctlError:
        """Return the reason why the node's end has closed: no Python, an exit of the program, or a lost link."""
        status = self.stream.exit_status(2.0)
        lines = self.stream.read_stderr().decode(errors="replace").strip().splitlines()
        last = check_prose(lines[-1]) if lines else ""
        if status in (126, 127):
            return NodeError(
                f"{self._python} cannot be started on the node: {last or 'not found'}",
                node=self.node,
                hint="install Python 3.8 or newer there, or set `cluster.python` to where it is",
            )
        if status is None:
            return ConnectError("the link was lost", node=self.node, hint="check whether the node is still up")
        return NodeError(
            f"dtctl's program on the node exited with status {status}{f': {last}' if last else ''}",
            node=self.node,
            hint=f"try `{shell.join_command([self._python, '-c', 'print(1)'])}` there",
        )


def open_program(connection: Connection, first: Message, *, node: str, python: str | None, workdir: str) -> NodeLink:
    """Start dtctl's program on a node and send it its first message; frames follow.

    Args:
        connection: connection to the node.
        first: the request, or the first of several.
        node: name of the node.
        python: name or path of a program on the node; None: python3.
        workdir: the node's folder; may begin with `~`.
    """
    python = python or "python3"
    link = NodeLink(connection.open(bootstrap.format_bootstrap_command(python)), node=node, python=python)
    link.answering = find_module(first.op)[0]
    with contextlib.suppress(ConnectError):  # If the program has ended already, `closed_error` has the reason.
        link.stream.write(bootstrap.build_opening_bytes(workdir, link.answering) + frames.pack_json(first))
    return link


@contextlib.contextmanager
def open_node(
    transport: Transport, target: Target, first: Message, *, python: str | None, workdir: str = "", silence_s: float
) -> Iterator[NodeLink]:
    """Connect to a node and start dtctl's program there, for as long as the context lasts; see `open_program`.

    Raises:
        ConnectError: nothing has arrived for `silence_s`.
    """
    connection = transport.connect(target)
    clock = SilenceLimit(connection, silence_s)
    try:
        link = open_program(connection, first, node=target.name, python=python, workdir=workdir)
        link.clock = clock
        try:
            yield link
        finally:
            clock.check(target.name)
    finally:
        clock.cancel()
        connection.close()


# -- checks of the values that nodes send -------------------------------------------------------------------------


def parse_message(document: Mapping[str, Any], kinds: Mapping[str, type[Message]], *, node: str) -> Message:
    """Return a node's message of one of these kinds.

    Raises:
        NodeError: it is not a message of these kinds.
    """
    op = document.get("op")
    if not isinstance(op, str) or op not in kinds:
        raise NodeError(f"the node sent {quote_node_value(op)}, which is not valid here", node=node)
    return validate_node_value(
        lambda document: parse_message_document(document, kinds), document, subject=f"its message {op!r}", node=node
    )


def require_requested_value(value: int, allowed: Collection[int], *, subject: str, node: str) -> int:
    """Return a value that a node reports, if it was part of the request.

    Raises:
        NodeError: the value was not requested.
    """
    if value not in allowed:
        raise NodeError(f"the node reported {subject} {value}, which was not requested", node=node)
    return value


def validate_node_value(check: Callable[[Any], T], value: object, *, subject: str, node: str) -> T:
    """Return a value that a node reports, as checked by `check`.

    Raises:
        NodeError: the value is malformed.
    """
    try:
        return check(value)
    except InvalidMessage as exc:
        raise NodeError(
            f"{subject} is malformed: {exc}",
            node=node,
            hint="another version of dtctl may be installed there, or the node may be faulty",
        ) from None


def quote_node_value(value: object) -> str:
    """Return a value that a node sent, shortened for an error message."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class SilenceLimit:
    """Timer that closes a connection over which nothing arrives for too long, so that a blocked reader returns."""

    def __init__(self, connection: Connection, limit_s: float) -> None:
        self._connection, self._limit_s, self._expired = connection, limit_s, False
        self._timer: threading.Timer | None = None
        self.reset()

    def reset(self) -> None:
        """Restart the limit from now."""
        self.cancel()
        self._timer = threading.Timer(self._limit_s, self._close_silent_connection)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Stop the timer; the connection stays open."""
        if self._timer is not None:
            self._timer.cancel()

    def check(self, node: str) -> None:
        """Stop the timer at the end of the stream, and check whether the timer has closed the connection.

        Raises:
            ConnectError: the timer has closed the connection.
        """
        self.cancel()
        if self._expired:
            raise ConnectError(f"no message arrived from it for {self._limit_s:g} s", node=node)

    def _close_silent_connection(self) -> None:
        self._expired = True
        self._connection.close()
