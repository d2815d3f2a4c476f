"""Session with one node of a run: it connects, pushes the code, prepares the node, and then receives messages.

Each session has a thread that reads the link; its messages go into one inbox that all sessions share, so that the
launcher itself is a single loop over messages. The launcher's messages (start, stop, ping) are queued for a second
thread.
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
from dtctl.launch.control.link import NodeLink, open_program, parse_message, require_requested_value
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.schema import check_prose
from dtctl.supervisor import frames
from dtctl.supervisor.messages.attempt import WHILE_RUNNING, Attach
from dtctl.supervisor.messages.base import Message
from dtctl.supervisor.messages.setup import (
    EndOrphanedRun,
    EnvironmentProgress,
    Hello,
    NodeDescription,
    NodeReady,
    OrphanedRunEnded,
    Prepare,
)
from dtctl.transport.base import Connection, Target, Transport

MAX_QUEUED_BYTES = 1 << 20
"""Bytes of unprocessed messages of one node above which its link is not read, so that a node that sends more than the
others takes neither their share nor all memory."""
MIN_MESSAGE_BYTES = 1 << 10
"""Bytes that each message counts as in addition to its payload."""
MAX_UNSENT = 1000
"""Number of unsent messages at which the link to a node counts as lost."""


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """Message: the preparation of a node has made progress."""

    state: Literal["connected", "pushing", "pushed"]
    push: PushProgress | None = None
    note: str = ""
    """Note for the user."""


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of a rank's output, or of metrics.jsonl."""

    rank: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Message: the node's end of the link has closed."""

    stderr: str
    """Output of the node's program on standard error."""


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """Message: the session has ended with an error."""

    error: Exception


Content: TypeAlias = PrepareProgress | OutputChunk | LinkLost | SessionFailed | Message


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """Message from a session to the launcher, made by the session itself or received from the node's supervisor."""

    session: NodeSession
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
    """Function that brings the code and returns its final progress; None if nothing is pushed."""
    prepare: Callable[[str], Prepare]
    """Function that makes the request to check the node, given the folder of the code, which follows from the push."""
    code: str = ""
    """Folder of the code, if it was brought earlier."""
    attach: Attach | None = None
    """Request to reattach to a kept run instead of preparing one."""
    environment: str = ""
    """Digest of the environment that the job needs; empty: none."""
    sweep: EndOrphanedRun | None = None
    """Request to end the remaining processes of the run before the node is prepared again."""


class NodeInbox:
    """Access of one node's session to the launcher's inbox, with a limit on the node's unread messages."""

    def __init__(self, inbox: Queue[NodeMessage]) -> None:
        self._inbox = inbox
        self._room = threading.Condition()
        self._queued_bytes = 0
        self._is_closed = False

    def put(self, message: NodeMessage) -> None:
        """Put a message into the inbox; wait while too many bytes of this node are unread."""
        with self._room:
            while self._queued_bytes > MAX_QUEUED_BYTES and not self._is_closed:
                self._room.wait()
            self._queued_bytes += message.size_bytes
        if not self._is_closed:
            self._inbox.put(message)

    def release(self, size_bytes: int) -> None:
        """Count bytes as read."""
        with self._room:
            self._queued_bytes -= size_bytes
            self._room.notify_all()

    def close(self) -> None:
        """Drop all messages from now on."""
        self._is_closed = True
        self.release(0)


class ReconnectProbe:
    """Check whether a silent node answers another connection."""

    def __init__(self, target: Target, transport: Transport) -> None:
        self._target, self._transport = target, transport
        self._answer: list[bool] | None = None
        """List that gets the answer once it is known; None before the check begins."""

    def is_answered(self) -> bool | None:
        """Return whether the node answers a new connection, without waiting; None until that is known."""
        if self._answer is None:
            self._answer = []
            name = f"again {self._target.name}"
            threading.Thread(target=self._try_connection, args=(self._answer,), name=name, daemon=True).start()
        return self._answer[0] if self._answer else None

    def discard_answer(self) -> None:
        """Discard the answer, because the node has sent something since."""
        self._answer = None

    def _try_connection(self, answer: list[bool]) -> None:
        try:
            connection = self._transport.connect(self._target)
            try:  # With srun, only a command shows that the node is there.
                answers = connection.open("exit 0").exit_status(self._target.connect_timeout_s) == 0
            finally:
                connection.close()
        except Exception:  # noqa: BLE001 - any error means that the node does not answer
            answers = False
        answer.append(answers)


class NodeSession:
    """The link to one node and the thread that reads it."""

    def __init__(self, target: Target, transport: Transport, setup: NodeSetup, inbox: Queue[NodeMessage]) -> None:
        self.target = target
        self.name = target.name
        self.setup = setup
        self.connection: Connection | None = None
        self.last_heard = time.monotonic()
        self.last_progress: float | None = None
        """Time of the last progress of the preparation; None before the connection, for which the transport has a
        limit."""
        self.is_described = False
        """True if the node has sent its first message."""
        self.is_named = False
        """True if the node's silence has been reported to the user."""
        self.code = setup.code
        self.is_over = False
        """True if the link was lost or never made, also while the message about that is unread."""
        self._transport = transport
        self._inbox = NodeInbox(inbox)
        self._link: NodeLink | None = None
        self._outbox: Queue[Message | None] = Queue(maxsize=MAX_UNSENT)
        self._closed = False
        self._asked: NodeLink | None = None
        self.second_call = ReconnectProbe(target, transport)
        self._thread = threading.Thread(target=self._run_session, name=f"node {self.name}", daemon=True)

    def start(self) -> None:
        """Start the session in the background."""
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Queue a message without waiting; return False if the link is gone, which the reading thread reports.

        The launcher must not wait here, since a node that does not read would block it for all others.
        """
        if self._link is None or self._closed:
            return False
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            return False
        return True

    def reset_deadline(self) -> None:
        """Count the node's silence from now: this process did not run and could not receive."""
        self.last_heard = time.monotonic()
        if self.last_progress is not None:
            self.last_progress = self.last_heard

    def silent_s(self) -> float:
        """Return the seconds for which an answer of the node is due without a report that it works on the request."""
        since = None if self._asked is None else self._asked.waiting_since
        return 0.0 if since is None else time.monotonic() - max(since, self.last_heard)

    def mute_reports(self) -> None:
        """Report no more messages to the launcher, but continue to read."""
        self._inbox.close()

    def acknowledge(self, message: NodeMessage) -> None:
        """Record that the launcher has taken a message from the inbox."""
        self._inbox.release(message.size_bytes)

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until the node's end has closed the link: then the supervisor has exited, too."""
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
        """Put a message into the launcher's inbox; wait while too many bytes of this node are unread."""
        size_bytes = MIN_MESSAGE_BYTES + (len(content.payload) if isinstance(content, OutputChunk) else 0)
        self.last_progress = time.monotonic()
        self._inbox.put(NodeMessage(self, content, size_bytes))

    def _send_all(self, link: NodeLink) -> None:
        with contextlib.suppress(ConnectError):  # The reading thread reports the error.
            while (message := self._outbox.get()) is not None:
                link.send(message)

    def _run_session(self) -> None:
        try:
            self.connection = self._transport.connect(self.target)
            self.report(PrepareProgress("connected"))
            setup = self.setup
            first = setup.attach or Hello(ports=list(setup.ports), environment=setup.environment)
            link = open_program(self.connection, first, node=self.name, python=setup.python, workdir=setup.workdir)
            if setup.attach is None:
                self._prepare_session_node(link)
            threading.Thread(target=self._send_all, args=(link,), name=f"to {self.name}", daemon=True).start()
            self._link = link
            self.report(NodeReady())
            self._receive_frames(link)
        except Exception as exc:  # noqa: BLE001 - also a bug must end the run, not leave the launcher waiting
            self.is_over = True
            self.report(SessionFailed(exc))

    def _prepare_session_node(self, link: NodeLink) -> None:
        setup = self.setup
        self._asked = link
        is_simple = setup.push is None and setup.sweep is None
        if is_simple:  # The request can be sent before the description arrives.
            # If the program has ended already, its output or exit status has the reason.
            with contextlib.suppress(ConnectError):
                link.send(setup.prepare(self.code))
        description = link.expect(NodeDescription)
        require_requested_value(description.port, (0, *setup.ports), subject="port", node=self.name)
        self.is_described, link.description = True, description
        self.report(description)
        if setup.sweep is not None:
            link.send(setup.sweep)
            link.expect(OrphanedRunEnded)
        if setup.push is not None:
            self._report_push(0, 0)
            try:
                pushed = setup.push(link, self._report_push)
            except ConnectError as exc:
                raise link.closed_error() from exc
            self.code = pushed.path or self.code
            self.report(PrepareProgress("pushed", pushed))
        if not is_simple:
            link.send(setup.prepare(self.code))
        while isinstance(message := link.expect(EnvironmentProgress, NodeReady), EnvironmentProgress):
            self.report(message)

    def _report_push(self, sent_bytes: int, of_bytes: int, note: str = "", /) -> None:
        self.report(PrepareProgress("pushing", PushProgress(sent=sent_bytes, of=of_bytes), note))

    def _receive_frames(self, link: NodeLink) -> None:
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
        self.report(LinkLost(check_prose(link.stream.read_stderr().decode(errors="replace").strip())))
