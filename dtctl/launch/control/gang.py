"""All nodes of a run: prepared, started together, and shut down together.

Everything that happens arrives as a message in one inbox, so this reads as a loop over messages; nothing here blocks on
a single node. What a message means while an attempt is on stands in attempt.py.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable
from typing import Any

from dtctl.errors import ConnectError, DtctlError
from dtctl.launch.control.session import NodeMessage, Session
from dtctl.launch.records.events import Emit, NodeChanged, PushProgress, TimeIsUp
from dtctl.launch.records.logs import Logs

_PREPARATION = frozenset({"connected", "hello", "pushing", "pushed", "ready"})
"""Messages that say how far a node is on its way to the start."""
PING_S = 1.0
START_SILENCE_S = 120.0
"""How long a connected node may take for one step of its preparation, usually for starting Python."""
PUSH_SILENCE_S = 600.0
"""The same while it checks or copies code, which it does silently."""
QUIT_LIMIT_S = 2.0


class Gang:
    """The sessions of all nodes of a run, in node rank order."""

    def __init__(self, sessions: list[Session], inbox: queue.Queue[NodeMessage], *, logs: Logs, emit: Emit) -> None:
        self.sessions = {session.name: session for session in sessions}
        self.inbox = inbox
        self.logs = logs
        self.emit = emit
        self.signals: list[int] = []
        """Signals that the launcher received, oldest first; appended to by the signal handler."""
        self.reattach: Callable[[str], None] | None = None
        """Opens a new link to a node that goes on by itself; None when losing the link ends the run there."""
        self.time_s: float | None = None
        """`job.time_s`, from now on; at its end the run is stopped as by a signal."""
        self._begun = time.monotonic()
        self._pinged = 0.0

    # -- to the start -----------------------------------------------------------------------------------------------

    def gather(self) -> dict[str, dict[str, Any]]:
        """Wait until every node is ready; node -> what it said about itself.

        Nothing has been started anywhere when this fails.

        Raises:
            DtctlError: of the one node that failed, or NodeFailures.
        """
        hellos, failures = self.try_gather(set(self.sessions))
        if failures:
            from dtctl.transport.fanout import raise_failures

            raise_failures(failures)
        return hellos

    def try_gather(self, names: set[str]) -> tuple[dict[str, dict[str, Any]], dict[str, DtctlError]]:
        """Wait until each of `wanted` is ready or has failed: what it said about itself, or why; in node rank order."""
        waiting = set(names)
        hellos: dict[str, dict[str, Any]] = {}
        failures: dict[str, DtctlError] = {}
        while waiting and not self.signals:
            message = self.next_message(0.2)
            for name in [name for name in self.sessions if name in waiting and self._is_stuck(name)]:
                self.sessions[name].close()
                failures[name] = ConnectError(
                    "it makes no progress in its preparation",
                    node=name,
                    hint="check its load and whether its disk responds",
                )
                waiting.discard(name)
                self.emit(NodeChanged(node=name, state="failed", error=str(failures[name])))
            if (
                message is None
                or message.session.name in failures
                or message.session is not self.sessions.get(message.session.name)
            ):
                continue  # nothing, or the last message of a connection that has been replaced
            name = message.session.name
            if message.kind == "hello":
                hellos[name] = message.data
            elif message.kind == "failed":
                failures[name] = _as_dtctl_error(message.data["error"])
                waiting.discard(name)
                self.emit(NodeChanged(node=name, state="failed", error=str(failures[name])))
                continue
            elif message.kind == "ready":
                waiting.discard(name)
            if message.kind in _PREPARATION:
                push = PushProgress(**message.data) if message.kind in ("pushing", "pushed") else None
                self.emit(NodeChanged(node=name, state=message.kind, push=push))
        return hellos, {name: failures[name] for name in self.sessions if name in failures}

    def _is_stuck(self, name: str) -> bool:
        session = self.sessions[name]
        limit_s = PUSH_SILENCE_S if session.setup.push is not None else START_SILENCE_S
        return session.last_progress is not None and time.monotonic() - session.last_progress > limit_s

    def idle(self, seconds: float) -> None:
        """Wait, with all links kept alive, or until somebody wants to stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.signals:
            self.next_message(min(0.2, max(0.0, deadline - time.monotonic())))

    def probe(self, node: str, ports: tuple[int, ...]) -> int:
        """The first of `ports` that is free on `node`; 0 when none is, or the node does not answer."""
        session = self.sessions[node]
        session.send({"op": "probe", "ports": list(ports)})
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not self.signals:
            message = self.next_message(0.2)
            if message is not None and message.session is session and message.kind == "probed":
                return message.data["port"] if message.data["port"] in ports else 0
        return 0

    # -- one attempt ------------------------------------------------------------------------------------------------

    def start(self, messages: dict[str, dict[str, Any]]) -> None:
        """Send every node its start message.

        Raises:
            ConnectError: a link was lost before its message was sent.
        """
        self.logs.begin_attempt()
        for name, message in messages.items():
            if not self.sessions[name].send({"op": "start", **message}):
                raise ConnectError("the link was lost before the start", node=name)

    def quit(self) -> None:
        """Tell every supervisor to exit, and wait until they have, or until `QUIT_LIMIT_S` has passed."""
        notified = [session for session in self.sessions.values() if session.send({"op": "quit"})]
        deadline = time.monotonic() + QUIT_LIMIT_S
        for session in notified:
            session.mute()  # a full inbox must not keep its thread from ending
        for session in notified:
            session.wait_closed(deadline - time.monotonic())

    def next_message(self, timeout_s: float) -> NodeMessage | None:
        """The next message of any node, None after `timeout_s`; keeps links alive and ends the run after `time_s`."""
        now = time.monotonic()
        if now - self._pinged >= PING_S:
            self._pinged = now
            for session in self.sessions.values():
                session.send({"op": "ping", "time": time.time()})
            if self.time_s is not None and now - self._begun > self.time_s:
                self.time_s = None
                self.emit(TimeIsUp())
                self.signals.append(signal.SIGUSR1)
        try:
            message = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        message.session.acknowledge(message)
        return message


def _as_dtctl_error(error: BaseException) -> DtctlError:
    if isinstance(error, DtctlError):
        return error
    bug = DtctlError(f"{type(error).__name__}: {error}", hint="this is a bug in dtctl; please report it")
    bug.__cause__ = error
    return bug
