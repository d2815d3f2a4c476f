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
from typing import Any

from dtctl.errors import ConnectError, DtctlError, NodeError
from dtctl.launch.control import messages
from dtctl.launch.control.link import NodeLink, open_supervisor
from dtctl.supervisor import frames
from dtctl.transport.base import Connection, Target, Transport

MAX_QUEUED_BYTES = 1 << 20
"""Unprocessed data of one node, above which its link is not read. A node that sends more than the others takes neither
their share nor all memory."""
MIN_MESSAGE_BYTES = 1 << 10
"""What any message counts as."""
MAX_UNSENT = 1000
"""Messages that a node may leave unread before it counts as one that is gone."""


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A message from a session to the launcher.

    `what` is one of: connected, hello, pushing, pushed, ready, log, lost, failed, or the `op` of a message from the
    supervisor in the form that messages.py gives it.
    """

    session: Session
    kind: str
    data: dict[str, Any]
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """How a session prepares its node before the launcher takes over."""

    python: str | None
    workdir: str
    ports: tuple[int, ...]
    """Candidates for the rendezvous port; empty on all nodes but the head."""
    push: Callable[[NodeLink, Callable[[int], None]], dict[str, Any]] | None
    """Brings the code and returns `path`, `files`, `bytes`; None when there is nothing to bring."""
    prepare: dict[str, Any]
    """The `prepare` message, without the folder that the push decides."""
    attach: dict[str, Any] | None = None
    """To take up a kept run again instead of preparing one: the `attach` message."""


class Session:
    """The link to one node and the thread that reads it."""

    def __init__(self, target: Target, transport: Transport, setup: NodeSetup, inbox: Queue[NodeMessage]) -> None:
        self.target = target
        self.name = target.name
        self.setup = setup
        self.connection: Connection | None = None
        self.last_heard = time.monotonic()
        self.last_progress: float | None = None
        """When it last came nearer to its start; None until it is connected, for which the transport has a limit."""
        self.code = ""
        self._transport = transport
        self._inbox = inbox
        self._link: NodeLink | None = None
        self._outbox: Queue[dict[str, Any] | None] = Queue(maxsize=MAX_UNSENT)
        self._room = threading.Condition()
        self._queued_bytes = 0
        self._closed = False
        self._muted = False
        self._thread = threading.Thread(target=self._run, name=f"node {self.name}", daemon=True)

    def start(self) -> None:
        """Begin, in the background."""
        self._thread.start()

    def send(self, message: dict[str, Any]) -> bool:
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

    def mute(self) -> None:
        """Report nothing more, but keep reading."""
        self._muted = True
        self._release()

    def acknowledge(self, message: NodeMessage) -> None:
        """The launcher has taken a message from the inbox."""
        self._release(message.size_bytes)

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until the node's end has closed the link: then not even the supervisor is left there."""
        self._thread.join(max(0.0, timeout_s))

    def close(self) -> None:
        """Drop the link; nothing more is said after this."""
        self._closed = True
        self._release()
        with contextlib.suppress(queue.Full):
            self._outbox.put_nowait(None)
        if self.connection is not None:
            self.connection.close()

    def report(self, kind: str, /, **data: Any) -> None:
        """Put a message into the launcher's inbox; blocks while too much of this node is unread there."""
        size_bytes = MIN_MESSAGE_BYTES + len(data.get("payload", b""))
        with self._room:
            while self._queued_bytes > MAX_QUEUED_BYTES and not (self._closed or self._muted):
                self._room.wait()
            self._queued_bytes += size_bytes
        self.last_progress = time.monotonic()
        if not (self._closed or self._muted):
            self._inbox.put(NodeMessage(self, kind, data, size_bytes))

    def _release(self, size_bytes: int = 0) -> None:
        with self._room:
            self._queued_bytes -= size_bytes
            self._room.notify_all()

    def _send_all(self, link: NodeLink) -> None:
        with contextlib.suppress(ConnectError):  # the reading thread reports it
            while (message := self._outbox.get()) is not None:
                link.send_json(message)

    def _run(self) -> None:
        try:
            self.connection = self._transport.connect(self.target)
            self.report("connected", address=self.connection.peer_address())
            link = self._open(self.connection)
            if self.setup.attach is None:
                self._prepare(link)
            threading.Thread(target=self._send_all, args=(link,), name=f"to {self.name}", daemon=True).start()
            self._link = link
            self.report("ready")
            self._listen(link)
        except DtctlError as exc:
            self.report("failed", error=exc)
        except Exception as exc:  # noqa: BLE001 - a bug here must end the run, not leave the launcher waiting
            self.report("failed", error=exc)

    def _open(self, connection: Connection) -> NodeLink:
        setup = self.setup
        first = setup.attach or {"op": "hello", "ports": list(setup.ports)}
        return open_supervisor(connection, first, node=self.name, python=setup.python, workdir=setup.workdir)

    def _prepare(self, link: NodeLink) -> None:
        setup = self.setup
        prepare = setup.prepare
        if setup.push is None:
            with contextlib.suppress(ConnectError):  # it has ended already; what it said, or its exit status, tells why
                link.send_json(prepare)
        hello = link.expect("hello")
        messages.require_known(hello["port"], (0, *setup.ports), subject="port", node=self.name)
        self.report("hello", **hello)
        if setup.push is not None:
            self.report("pushing", sent=0)
            try:
                pushed = setup.push(link, lambda sent: self.report("pushing", sent=sent))
            except ConnectError as exc:
                raise link.closed_error() from exc
            self.code = str(pushed["path"])
            self.report("pushed", **pushed)
            link.send_json({**prepare, "cwd": self.code})
        link.expect("ready")

    def _listen(self, link: NodeLink) -> None:
        while True:
            frame = link.receive()
            if frame is None:
                break
            self.last_heard = time.monotonic()
            kind, rank, payload = frame
            if kind == frames.LOG:
                self.report("log", rank=rank, payload=payload)
            elif kind == frames.JSON:
                message = messages.while_running(link.decode(payload), node=self.name)
                self.report(message.pop("op"), **message)
            else:
                raise NodeError("the node sent files that were not requested", node=self.name)
        self.report("lost", stderr=messages.prose(link.stream.read_stderr().decode(errors="replace").strip()))
