"""All nodes of a run: prepared, started together, and shut down together.

Everything that happens arrives as a message in one inbox, so this reads as a loop over messages; nothing here blocks on
a single node. attempt.py handles the messages during an attempt.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Mapping

from dtctl.errors import ConnectError, DtctlError
from dtctl.launch.control.session import NodeMessage, Preparing, Session, SessionFailed
from dtctl.launch.records.events import Emit, NodeChanged, Note, TimeIsUp
from dtctl.launch.records.logs import Logs
from dtctl.supervisor.messages.attempt import Ping, PortProbed, ProbePorts, StartAttempt
from dtctl.supervisor.messages.base import Quit
from dtctl.supervisor.messages.setup import EnvironmentProgress, NodeDescription, Ready

PING_S = 1.0
ANSWER_S = 5.0
"""Seconds after which a node that has accepted the connection and sent nothing is named."""
START_SILENCE_S = 120.0
"""Seconds that a connected node may take for its first message, usually for starting Python."""
PUSH_SILENCE_S = 30.0
"""Seconds that it may be silent from then on; it reports every second that it checks or copies code."""
WORK_LIMIT_S = 600.0
"""Seconds that it may take for one step of that, whatever it reports."""
QUIT_LIMIT_S = 2.0
AWAY_S = 3.0
"""Seconds between two turns of the loop, which takes 0.2 s when nothing happens: after more the process did not run."""


PROBE_S = 5.0
"""Seconds in which a node reports which port is free."""


class Gang:
    """The sessions of all nodes of a run, in node rank order."""

    def __init__(self, sessions: list[Session], inbox: queue.Queue[NodeMessage], *, logs: Logs, emit: Emit) -> None:
        self.sessions = {session.name: session for session in sessions}
        self.inbox = inbox
        self.logs = logs
        self.emit = emit
        self.signals: list[int] = []
        """Signals that the launcher received, oldest first; appended to by the signal handler."""
        self.time_s: float | None = None
        """`job.time_s`, from now on; at its end the run is stopped as by a signal."""
        self.away_s = 0.0
        """Seconds for which this process did not run just now, because it was stopped or the machine slept."""
        self._begun = time.monotonic()
        self._pinged = 0.0
        self._turned = _clock()

    # -- to the start -----------------------------------------------------------------------------------------------

    def gather(self) -> dict[str, NodeDescription]:
        """Wait until every node is ready; return node -> its description.

        Nothing has been started anywhere when this fails.

        Raises:
            DtctlError: of the one node that failed, or NodeFailures.
        """
        descriptions, failures = self.try_gather(set(self.sessions))
        if failures:
            from dtctl.transport.fanout import raise_failures

            raise_failures(failures)
        return descriptions

    def try_gather(self, names: set[str]) -> tuple[dict[str, NodeDescription], dict[str, DtctlError]]:
        """Wait until each of these is ready or has failed; return descriptions and errors, in node rank order."""
        waiting = set(names)
        descriptions: dict[str, NodeDescription] = {}
        failures: dict[str, DtctlError] = {}
        while waiting and not self.signals:
            message = self.next_message(0.2)
            for name in [name for name in self.sessions if name in waiting]:
                if (error := self.find_stall(self.sessions[name])) is not None:
                    self.sessions[name].close()
                    failures[name] = error
                    waiting.discard(name)
                    self.emit(NodeChanged(node=name, state="failed", error=str(error)))
            if (
                message is None
                or message.session.name in failures
                or message.session is not self.sessions.get(message.session.name)
            ):
                continue  # nothing, or the last message of a connection that has been replaced
            name = message.session.name
            self.emit_preparation(message)
            match message.content:
                case NodeDescription() as description:
                    descriptions[name] = description
                case SessionFailed(reason):
                    failures[name] = to_dtctl_error(reason)
                    waiting.discard(name)
                case Ready():
                    waiting.discard(name)
        return descriptions, {name: failures[name] for name in self.sessions if name in failures}

    def emit_preparation(self, message: NodeMessage) -> None:
        """Emit how far a node is that is being prepared."""
        name = message.session.name
        match message.content:
            case NodeDescription():
                self.emit(NodeChanged(node=name, state="hello"))
            case SessionFailed(error):
                self.emit(NodeChanged(node=name, state="failed", error=str(to_dtctl_error(error))))
            case Ready():
                self.emit(NodeChanged(node=name, state="ready"))
            case EnvironmentProgress() as progress:
                self.emit(Note(node=name, text=progress.text))
            case Preparing(state, push, note):
                self.emit(NodeChanged(node=name, state=state, push=push))
                if note:
                    self.emit(Note(text=note))

    def find_stall(self, session: Session) -> ConnectError | None:
        """Return the error of a node that makes no progress in its preparation; one that sends nothing is named first.

        Until it is connected the transport has a limit.
        """
        if session.last_progress is None:
            return None
        idle_s = time.monotonic() - session.last_progress
        if not session.is_described:
            text = "it has accepted the connection and sent nothing for "
            if idle_s > ANSWER_S and not session.is_named:
                session.is_named = True
                note = f"{text.removeprefix('it ')}{ANSWER_S:g} s; the limit is {START_SILENCE_S:g} s"
                self.emit(Note(node=session.name, text=note))
            if idle_s <= START_SILENCE_S:
                return None
            hint = "does `python3 -c pass` end there? check its load and its disk"
            return ConnectError(f"{text}{START_SILENCE_S:g} s", node=session.name, hint=hint)
        if session.silent_s() <= PUSH_SILENCE_S and idle_s <= WORK_LIMIT_S:
            return None
        text, hint = "it makes no progress in its preparation", "check its load and whether its disk responds"
        return ConnectError(text, node=session.name, hint=hint)

    def idle(self, seconds: float) -> None:
        """Wait, with all links kept alive, or until a request to stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.signals:
            self.next_message(min(0.2, max(0.0, deadline - time.monotonic())))

    def probe(self, node: str, ports: tuple[int, ...]) -> int | None:
        """Return the first of `ports` that is free on `node`; 0 when none is, None when the node does not answer."""
        session = self.sessions[node]
        session.send(ProbePorts(ports=list(ports)))
        deadline = time.monotonic() + PROBE_S
        while time.monotonic() < deadline and not session.is_over and not self.signals:
            message = self.next_message(0.2)
            if message is not None and message.session is session and isinstance(message.content, PortProbed):
                return message.content.port if message.content.port in ports else 0
        return None

    # -- one attempt ------------------------------------------------------------------------------------------------

    def start(self, messages: Mapping[str, StartAttempt]) -> None:
        """Send every node its start message.

        Raises:
            ConnectError: a link was lost before its message was sent.
        """
        self.logs.begin_attempt()
        for name, message in messages.items():
            if not self.sessions[name].send(message):
                raise ConnectError("the link was lost before the start", node=name)

    def quit(self) -> None:
        """Tell every supervisor to exit, and wait until they have, or until `QUIT_LIMIT_S` has passed."""
        notified = [session for session in self.sessions.values() if session.send(Quit())]
        deadline = time.monotonic() + QUIT_LIMIT_S
        for session in notified:
            session.mute()  # a full inbox must not keep its thread from ending
        for session in notified:
            session.wait_closed(deadline - time.monotonic())

    def next_message(self, timeout_s: float) -> NodeMessage | None:
        """The next message of any node, None after `timeout_s`; keeps links alive and ends the run after `time_s`."""
        now = time.monotonic()
        self.notice_absence()
        if now - self._pinged >= PING_S:
            self._pinged = now
            for session in self.sessions.values():
                session.send(Ping())
            if self.time_s is not None and now - self._begun > self.time_s:
                self.time_s = None
                self.emit(TimeIsUp())
                self.signals.append(signal.SIGUSR1)
        try:
            message = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        finally:
            self.notice_absence()
        message.session.acknowledge(message)
        return message

    def notice_absence(self) -> None:
        """Check whether this process was paused since the last pass of the loop, and if so, excuse silent nodes."""
        turned, self._turned = self._turned, _clock()
        if self._turned - turned > AWAY_S:
            self.away_s = max(self.away_s, self._turned - turned)
            for session in self.sessions.values():
                session.excuse()


def _clock() -> float:
    """Return the seconds that pass while the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def to_dtctl_error(error: BaseException) -> DtctlError:
    """Return an error of a session as one for the user; an unexpected one is a bug."""
    if isinstance(error, DtctlError):
        return error
    bug = DtctlError(f"{type(error).__name__}: {error}", hint="this is a bug in dtctl; please report it")
    bug.__cause__ = error
    return bug
