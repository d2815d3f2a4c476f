"""The control machine's end of the link to one node: our program started there, then frames in both directions.

Decides how frames are sent and read and what an error of the node's means; `dtctl/supervisor/frames.py` has the format.
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
from dtctl.schema import InvalidMessage, prose
from dtctl.supervisor import bootstrap, frames
from dtctl.supervisor.messages.base import Message, Refusal, Working, by_op, parse
from dtctl.supervisor.messages.setup import NodeDescription
from dtctl.supervisor.requests import find_module
from dtctl.transport.base import ByteStream, Connection, Target, Transport

T = TypeVar("T")
Kind = TypeVar("Kind", bound=Message)
HINTS = {
    "disk-full": "free some space there, or set `cluster.workdir` to another disk",
    "missing-file": "is it in the folder that is pushed, and not in .gitignore or .dtctlignore?",
    "missing-there": "with `job.files.push: false` it has to be there: bring it, or set `job.files.root`",
    "missing-folder": "with `job.files.push: false` the code has to be there: bring it, or set `job.files.root`",
    "environment": "correct `job.environment`, or the file that it names, and launch again",
    "no-environment": "launch again; `dtctl clean` may have removed it",
    "no-folder": "nodes need it under the same path; a wheel that the file of requirements names is brought",
    "no-uv": "install uv there, or `pip install uv` on this machine, which brings it",
    "platform": "set `job.environment.platform`; all nodes of a job need one kind of processor",
    "missing-data": "bring it there, or correct `job.data`",
    "too-large": "name a smaller folder as `job.files.root`, and data by absolute paths; or let dtctl push the code",
    "old-python": "set `cluster.python` to a Python 3.8 or newer on that node",
    "permission": "the login user has to own `cluster.workdir`",
    "workdir": "set `cluster.workdir` to a folder that the login user may write to",
    "run-exists": "choose another `--name`",
    "foreign": "then launch again; or set `cluster.workdir` to a folder of the login user's own",
}


def error_of(refusal: Refusal, node: str) -> DtctlError:
    """Return the error that a node's refusal means."""
    code, text = refusal.code, refusal.message
    if code == "missing-program":
        return NodeError(f"{text}: there is no such program on the node", node=node, hint=_hint_of_program(text))
    if code == "disk-full":
        text = f"the disk is full: {text}"
    return NodeError(text, node=node, hint=HINTS.get(code))


def _hint_of_program(program: str) -> str:
    """Return what helps where a program is not found, by what it is."""
    if program == "torchrun" or re.fullmatch(r"(\S*/)?(python|pypy)[\d.]*", program):
        return "set `cluster.python` to the Python there that has torch, or activate it in `job.setup`"
    if "/" in program:
        return "a relative path begins in the folder that is pushed: is it there, executable, and not ignored?"
    return "install it there, write its whole path in `job.command`, or put it on PATH in `job.setup`"


class NodeLink:
    """Frames to and from one node. Reading and writing may happen in two threads, each by one."""

    def __init__(self, stream: ByteStream, *, node: str, python: str = "python3") -> None:
        """`python`: what was started there, for messages."""
        self.stream = stream
        self.node = node
        self._python = python
        self._parser = frames.Parser()
        self._ready: list[tuple[bytes, int, bytes]] = []
        self.clock: SilenceLimit | None = None
        """Started again by whatever arrives."""
        self.description: NodeDescription | None = None
        """Report of the node about itself before it is prepared."""
        self.waiting_since: float | None = None
        """Time when the wait for the next answer began, or of the last report of work; None: nothing is waited for."""

    def send(self, message: Message) -> None:
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
        for frame in frames.pack_bytes(data):
            self.stream.write(frame)

    def receive(self) -> tuple[bytes, int, bytes] | None:
        """Return the next frame as (kind, rank, payload); None when the node's end closed between two frames.

        Raises:
            NodeError: what came is not from our supervisor, for example a banner of a shell start-up file.
            ConnectError: the stream ended inside a frame.
        """
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
            if document.get("op") != Working.op:
                return document

    def decode(self, payload: bytes) -> dict[str, Any]:
        """Return the object in a frame of JSON, without further checks; see `parse_message`.

        Raises:
            NodeError: there is none.
        """
        try:
            return frames.decode(payload)
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
        return self._parse(document, kinds)

    def parse(self, payload: bytes, *kinds: type[Kind]) -> Kind:
        """Return the message in a frame of JSON, which must be of one of these kinds.

        Raises:
            NodeError: it is another one, or reports that the node cannot continue.
        """
        return self._parse(self.decode(payload), kinds)

    def _parse(self, document: Mapping[str, Any], kinds: tuple[type[Kind], ...]) -> Kind:
        message = parse_message(document, by_op(*kinds, Refusal), node=self.node)
        if isinstance(message, Refusal):
            raise error_of(message, self.node)
        return cast("Kind", message)

    def closed_error(self) -> DtctlError:
        """Return why the node's end has closed: no Python, a program that has ended, or a link that is gone."""
        status = self.stream.exit_status(2.0)
        lines = self.stream.read_stderr().decode(errors="replace").strip().splitlines()
        last = prose(lines[-1]) if lines else ""
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


def open_program(connection: Connection, first: Message, *, node: str, python: str | None, workdir: str) -> NodeLink:
    """Start dtctl's program on a node and send it its first message; frames follow.

    Args:
        connection: to the node.
        first: a request, or the first of several.
        node: its name.
        python: program name or path there; None for python3.
        workdir: the node's folder; may begin with `~`.
    """
    python = python or "python3"
    link = NodeLink(connection.open(bootstrap.command(python)), node=node, python=python)
    with contextlib.suppress(ConnectError):  # it has ended already; `why_silent` has the reason
        link.stream.write(bootstrap.opening(workdir, find_module(first.op)[0]) + frames.pack_json(first))
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


# -- what a node has sent: in the form that it should have, or the error of that node ----------------------------


def parse_message(document: Mapping[str, Any], kinds: Mapping[str, type[Message]], *, node: str) -> Message:
    """Return a node's message of one of these kinds.

    Raises:
        NodeError: it is none.
    """
    op = document.get("op")
    if not isinstance(op, str) or op not in kinds:
        raise NodeError(f"the node said {quoted(op)}, which is not valid here", node=node)
    return checked(lambda document: parse(document, kinds), document, subject=f"its message {op!r}", node=node)


def require_known(value: int, allowed: Collection[int], *, subject: str, node: str) -> int:
    """Return the value, if it is one of those that were asked about.

    Raises:
        NodeError: it is another one.
    """
    if value not in allowed:
        raise NodeError(f"the node reported {subject} {value}, which was not requested", node=node)
    return value


def checked(check: Callable[[Any], T], value: object, *, subject: str, node: str) -> T:
    """Return the value in its form.

    Raises:
        NodeError: it has another one.
    """
    try:
        return check(value)
    except InvalidMessage as exc:
        raise NodeError(
            f"{subject} is malformed: {exc}",
            node=node,
            hint="another version of dtctl may be installed there, or the node may be faulty",
        ) from None


def quoted(value: object) -> str:
    """Return a value that a node sent, shortened for an error message."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


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
