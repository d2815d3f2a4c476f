"""One node's part of a run, seen from the control machine: connect, push, prepare, then listen.

Each session has a thread that reads; what it learns goes into one inbox that all sessions share, so that the launcher
itself is a single loop over messages. The launcher writes (start, stop, ping); a lock keeps frames whole.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from typing import Literal, TypeAlias

from dtctl.errors import ConnectError, NodeError
from dtctl.launch.control.link import NodeLink, open_program, parse_message, require_known
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.schema import prose
from dtctl.supervisor import frames
from dtctl.supervisor.messages.attempt import WHILE_RUNNING, Attach
from dtctl.supervisor.messages.base import Message
from dtctl.supervisor.messages.setup import (
    EnvironmentProgress,
    Hello,
    NodeDescription,
    Prepare,
    Ready,
    Sweep,
    Swept,
)
from dtctl.transport.base import Connection, Target, Transport

MAX_QUEUED_BYTES = 1 << 20
"""Unprocessed data of one node, above which its link is not read. A node that sends more than the others takes neither
their share nor all memory."""
MIN_MESSAGE_BYTES = 1 << 10
"""Bytes that any message counts as."""
MAX_UNSENT = 1000
"""Messages that a node may leave unread before it counts as one that is gone."""


@dataclass(frozen=True, slots=True)
class Preparing:
    """A node is one step nearer to its start."""

    state: Literal["connected", "pushing", "pushed"]
    push: PushProgress | None = None
    note: str = ""
    """Note for the user."""


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of what a rank has printed, or of metrics.jsonl."""

    rank: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The node's end has closed."""

    stderr: str
    """Output of its program on standard error."""


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """The session has ended with an error."""

    error: Exception


Content: TypeAlias = Preparing | OutputChunk | LinkLost | SessionFailed | Message


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """Message from a session to the launcher: its own, or one of its node's supervisor."""

    session: Session
    content: Content
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """Steps by which a session prepares its node before the launcher takes over."""

    python: str | None
    workdir: str
    ports: tuple[int, ...]
    """Candidates for the rendezvous port; empty on all nodes but the head."""
    push: Callable[[NodeLink, PushReport], PushProgress] | None
    """Function that brings the code and returns what it did; None when there is nothing to bring."""
    prepare: Callable[[str], Prepare]
    """Request to check the node, by the folder of the code, which the push decides."""
    code: str = ""
    """Folder of the code, where it was brought before."""
    attach: Attach | None = None
    """Request to take up a kept run again instead of preparing one."""
    environment: str = ""
    """Digest of the environment that the job needs; empty: none."""
    sweep: Sweep | None = None
    """Request to end the processes that are left of the run before it is prepared again."""


class NodeInbox:
    """The launcher's inbox for one node. Its messages wait while too many of them are unread there."""

    def __init__(self, inbox: Queue[NodeMessage]) -> None:
        self._inbox = inbox
        self._room = threading.Condition()
        self._queued_bytes = 0
        self._is_closed = False

    def put(self, message: NodeMessage) -> None:
        """Put a message there; blocks while too much of this node is unread."""
        with self._room:
            while self._queued_bytes > MAX_QUEUED_BYTES and not self._is_closed:
                self._room.wait()
            self._queued_bytes += message.size_bytes
        if not self._is_closed:
            self._inbox.put(message)

    def release(self, size_bytes: int) -> None:
        """So much was taken out."""
        with self._room:
            self._queued_bytes -= size_bytes
            self._room.notify_all()

    def close(self) -> None:
        """Drop whatever comes from now on."""
        self._is_closed = True
        self.release(0)


class SecondCall:
    """Another connection to a node that is silent: does it answer that?"""

    def __init__(self, target: Target, transport: Transport) -> None:
        self._target, self._transport = target, transport
        self._answer: list[bool] | None = None
        """The answer, once it is known; None before the question."""

    def is_answered(self) -> bool | None:
        """Return whether the node answers a new connection; None until that is known. Never waits."""
        if self._answer is None:
            self._answer = []
            name = f"again {self._target.name}"
            threading.Thread(target=self._try_connection, args=(self._answer,), name=name, daemon=True).start()
        return self._answer[0] if self._answer else None

    def forget(self) -> None:
        """Forget the answer: the node has sent something since."""
        self._answer = None

    def _try_connection(self, answer: list[bool]) -> None:
        try:
            connection = self._transport.connect(self._target)
            try:  # of srun only a command shows that there is a node
                answers = connection.open("exit 0").exit_status(self._target.connect_timeout_s) == 0
            finally:
                connection.close()
        except Exception:  # noqa: BLE001 - whatever it is, there is no connection
            answers = False
        answer.append(answers)


class Session:
    """The link to one node and the thread that reads it."""

    def __init__(self, target: Target, transport: Transport, setup: NodeSetup, inbox: Queue[NodeMessage]) -> None:
        self.target = target
        self.name = target.name
        self.setup = setup
        self.connection: Connection | None = None
        self.last_heard = time.monotonic()
        self.last_progress: float | None = None
        """Time at which it last came nearer to its start; None until it is connected, for which the transport has a
        limit."""
        self.is_described = False
        """True if it has sent its first message."""
        self.is_named = False
        """True if its silence has been reported to the user."""
        self.code = setup.code
        self.is_over = False
        """True if the link was lost, or never came to be; also while the message about it is unread."""
        self._transport = transport
        self._inbox = NodeInbox(inbox)
        self._link: NodeLink | None = None
        self._outbox: Queue[Message | None] = Queue(maxsize=MAX_UNSENT)
        self._closed = False
        self._asked: NodeLink | None = None
        self.second_call = SecondCall(target, transport)
        self._thread = threading.Thread(target=self._run, name=f"node {self.name}", daemon=True)

    def start(self) -> None:
        """Begin, in the background."""
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Queue a message; False when the link is gone, which the reading thread reports.

        Never waits: a node that does not read would keep the launcher from all others.
        """
        if self._link is None or self._closed:
            return False
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            return False
        return True

    def excuse(self) -> None:
        """Excuse the node for its silence until now: this process did not run and could not receive."""
        self.last_heard = time.monotonic()
        if self.last_progress is not None:
            self.last_progress = self.last_heard

    def silent_s(self) -> float:
        """Return for how long the node has owed an answer without a report that it is at work on it."""
        since = None if self._asked is None else self._asked.waiting_since
        return 0.0 if since is None else time.monotonic() - max(since, self.last_heard)

    def mute(self) -> None:
        """Report nothing more, but keep reading."""
        self._inbox.close()

    def acknowledge(self, message: NodeMessage) -> None:
        """The launcher has taken a message from the inbox."""
        self._inbox.release(message.size_bytes)

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until the node's end has closed the link: then not even the supervisor is left there."""
        self._thread.join(max(0.0, timeout_s))

    def close(self) -> None:
        """Drop the link; no messages follow."""
        self._closed = True
        self._inbox.close()
        with contextlib.suppress(queue.Full):
            self._outbox.put_nowait(None)
        if self.connection is not None:
            self.connection.close()

    def report(self, content: Content) -> None:
        """Put a message into the launcher's inbox; blocks while too much of this node is unread there."""
        size_bytes = MIN_MESSAGE_BYTES + (len(content.payload) if isinstance(content, OutputChunk) else 0)
        self.last_progress = time.monotonic()
        self._inbox.put(NodeMessage(self, content, size_bytes))

    def _send_all(self, link: NodeLink) -> None:
        with contextlib.suppress(ConnectError):  # the reading thread reports it
            while (message := self._outbox.get()) is not None:
                link.send(message)

    def _run(self) -> None:
        try:
            self.connection = self._transport.connect(self.target)
            self.report(Preparing("connected"))
            setup = self.setup
            first = setup.attach or Hello(ports=list(setup.ports), environment=setup.environment)
            link = open_program(self.connection, first, node=self.name, python=setup.python, workdir=setup.workdir)
            if setup.attach is None:
                self._prepare(link)
            threading.Thread(target=self._send_all, args=(link,), name=f"to {self.name}", daemon=True).start()
            self._link = link
            self.report(Ready())
            self._listen(link)
        except Exception as exc:  # noqa: BLE001 - also a bug must end the run, not leave the launcher waiting
            self.is_over = True
            self.report(SessionFailed(exc))

    def _prepare(self, link: NodeLink) -> None:
        setup = self.setup
        self._asked = link
        is_simple = setup.push is None and setup.sweep is None
        if is_simple:  # all of it at once
            with contextlib.suppress(ConnectError):  # it has ended already; its output or exit status has the reason
                link.send(setup.prepare(self.code))
        description = link.expect(NodeDescription)
        require_known(description.port, (0, *setup.ports), subject="port", node=self.name)
        self.is_described, link.description = True, description
        self.report(description)
        if setup.sweep is not None:
            link.send(setup.sweep)
            link.expect(Swept)
        if setup.push is not None:
            self._report_push(0)
            try:
                pushed = setup.push(link, self._report_push)
            except ConnectError as exc:
                raise link.closed_error() from exc
            self.code = pushed.path or self.code
            self.report(Preparing("pushed", pushed))
        if not is_simple:
            link.send(setup.prepare(self.code))
        while isinstance(message := link.expect(EnvironmentProgress, Ready), EnvironmentProgress):
            self.report(message)

    def _report_push(self, sent_bytes: int, note: str = "", /) -> None:
        self.report(Preparing("pushing", PushProgress(sent=sent_bytes), note))

    def _listen(self, link: NodeLink) -> None:
        while True:
            frame = link.receive()
            if frame is None:
                break
            self.last_heard = time.monotonic()
            kind, rank, payload = frame
            if kind == frames.LOG:
                self.report(OutputChunk(rank, payload))
            elif kind == frames.JSON:
                self.report(parse_message(link.decode(payload), WHILE_RUNNING, node=self.name))
            else:
                raise NodeError("the node sent files that were not requested", node=self.name)
        self.is_over = True
        self.report(LinkLost(prose(link.stream.read_stderr().decode(errors="replace").strip())))
