"""Sessions with all nodes of a run, which are prepared, started and shut down together.

Everything that happens arrives as a message in one inbox, and no function of this module waits for a single node.
attempt.py handles the messages during an attempt.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from dtctl.errors import ConnectError, DtctlError
from dtctl.launch.control.session import NodeMessage, NodeSession, PrepareProgress, SessionFailed
from dtctl.launch.records.events import Emit, NodeChanged, Note, PushAdvanced, PushProgress, TimeLimitReached
from dtctl.launch.records.logs import RunLogs
from dtctl.supervisor.messages.attempt import Ping, PortProbed, ProbePorts, StartAttempt
from dtctl.supervisor.messages.base import Quit
from dtctl.supervisor.messages.setup import EnvironmentProgress, NodeDescription, NodeReady

PING_S = 1.0
ANSWER_S = 5.0
"""Seconds after which a node that has accepted the connection and sent nothing is reported."""
START_SILENCE_S = 120.0
"""Seconds that a connected node may take for its first message, usually for starting Python."""
PUSH_SILENCE_S = 30.0
"""Seconds that a node may be silent after that; while it checks or copies code, it reports every second."""
WORK_LIMIT_S = 600.0
"""Seconds that a node may take for one step of its preparation, even if it reports progress."""
QUIT_LIMIT_S = 2.0
AWAY_S = 3.0
"""Seconds between two passes of the loop from which the process was paused; a pass without messages takes 0.2 s."""


STALL_CHECK_S = 0.2
"""Seconds between two checks of all nodes' preparations for progress."""
PROBE_S = 5.0
"""Seconds in which a node has to report a free port."""
PUSH_REPORT_S = 0.5
"""Seconds between two events about a push, so that the display moves and the record stays small."""
PUSH_RATE_S = 5.0
"""Seconds over which the rate of a push is averaged, since data arrive in blocks of 4 MiB."""


class PushTotals:
    """Progress of the pushes to all nodes together, so that not every block of every node makes an event."""

    def __init__(self) -> None:
        self._nodes: dict[str, PushProgress] = {}
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._marks: list[tuple[float, int]] = []
        """Times, each with the bytes that all nodes had received by that time, oldest first."""
        self._reported = 0.0
        self._is_over = False

    def update(self, name: str, progress: PushProgress, *, is_done: bool) -> bool:
        """Record the progress of the push to a node; return whether this push has just begun or ended."""
        is_change = is_done or name not in self._nodes or name in self._done
        self._nodes[name] = replace(progress, sent=progress.of) if is_done else progress
        self._done = self._done | {name} if is_done else self._done - {name}
        self._failed.discard(name)
        self._marks = self._marks or [(time.monotonic(), 0)]
        self._is_over = False
        return is_change

    def remove(self, name: str) -> None:
        """Remove a node that has failed from the totals."""
        self._failed.add(name)
        self._nodes.pop(name, None)
        self._done.discard(name)

    def make_event(self, expected: Collection[str]) -> PushAdvanced | None:
        """Return the event that is due; None if nothing is sent, or too soon after the last event.

        Args:
            expected: nodes that will get files, also those that have not begun.
        """
        now, of = time.monotonic(), sum(each.of or 0 for each in self._nodes.values())
        nodes = (self._nodes.keys() | expected) - self._failed
        is_over = len(self._done) == len(nodes)
        if not of or self._is_over or (now - self._reported < PUSH_REPORT_S and not is_over):
            return None
        got = sum(each.sent or 0 for each in self._nodes.values())
        self._marks.append((now, got))
        while len(self._marks) > 2 and now - self._marks[1][0] >= PUSH_RATE_S:
            self._marks.pop(0)
        (since, before), self._reported, self._is_over = self._marks[0], now, is_over
        rate = max(0, got - before) / max(now - since, 1e-3)
        return PushAdvanced(nodes=len(nodes), nodes_done=len(self._done), bytes=got, of=of, bytes_per_s=round(rate, 1))


class NodeSessions:
    """The sessions of all nodes of a run, in node rank order."""

    def __init__(
        self, sessions: list[NodeSession], inbox: queue.Queue[NodeMessage], *, logs: RunLogs, emit: Emit
    ) -> None:
        self.sessions = {session.name: session for session in sessions}
        self.inbox = inbox
        self.logs = logs
        self.emit = emit
        self.signals: list[int] = []
        """Signals that the launcher received, oldest first; appended to by the signal handler."""
        self.time_s: float | None = None
        """Seconds of `job.time_s`, counted from now; at their end, the run is stopped as by a signal."""
        self.away_s = 0.0
        """Seconds for which this process was just paused, because it was stopped or the machine slept."""
        self._pushes = PushTotals()
        self._begun = time.monotonic()
        self._pinged = 0.0
        self._turned = _read_boot_clock()

    # -- preparation ------------------------------------------------------------------------------------------------

    def gather(self) -> dict[str, NodeDescription]:
        """Wait until every node is ready; return the description of each node.

        If this fails, nothing has been started on any node.

        Raises:
            DtctlError: one node failed; NodeFailures if several did.
        """
        descriptions, failures = self.try_gather(set(self.sessions))
        if failures:
            from dtctl.transport.fanout import raise_failures

            raise_failures(failures)
        return descriptions

    def try_gather(self, names: set[str]) -> tuple[dict[str, NodeDescription], dict[str, DtctlError]]:
        """Wait until each of these nodes is ready or has failed; return descriptions and errors, in node rank order."""
        waiting = set(names)
        descriptions: dict[str, NodeDescription] = {}
        failures: dict[str, DtctlError] = {}
        checked = time.monotonic()
        while waiting and not self.signals:
            message = self.next_message(STALL_CHECK_S)
            if message is None or time.monotonic() - checked >= STALL_CHECK_S:
                for name, error in self._find_stalled_nodes(waiting).items():
                    self.sessions[name].close()
                    failures[name] = error
                    waiting.discard(name)
                    self._pushes.remove(name)
                    self.emit(NodeChanged(node=name, state="failed", error=str(error)))
                self._emit_push_totals()
                checked = time.monotonic()
            if (
                message is None
                or message.session.name in failures
                or message.session is not self.sessions.get(message.session.name)
            ):
                continue  # There is no message, or it is the last one of a connection that has been replaced.
            name = message.session.name
            self.emit_preparation(message)
            match message.content:
                case NodeDescription() as description:
                    descriptions[name] = description
                case SessionFailed(reason):
                    failures[name] = convert_session_error(reason)
                    waiting.discard(name)
                case NodeReady():
                    waiting.discard(name)
        return descriptions, {name: failures[name] for name in self.sessions if name in failures}

    def _find_stalled_nodes(self, names: set[str]) -> dict[str, DtctlError]:
        """Return the errors of those of the nodes whose preparation makes no progress, in node rank order."""
        errors = {name: self.find_stall(session) for name, session in self.sessions.items() if name in names}
        return {name: error for name, error in errors.items() if error is not None}

    def emit_preparation(self, message: NodeMessage) -> None:
        """Emit the progress of a node's preparation."""
        name = message.session.name
        match message.content:
            case NodeDescription():
                self.emit(NodeChanged(node=name, state="hello"))
            case SessionFailed(error):
                self._pushes.remove(name)
                self.emit(NodeChanged(node=name, state="failed", error=str(convert_session_error(error))))
            case NodeReady():
                self.emit(NodeChanged(node=name, state="ready"))
            case EnvironmentProgress() as progress:
                self.emit(Note(node=name, text=progress.text))
            case PrepareProgress("connected"):
                self.emit(NodeChanged(node=name, state="connected"))
            case PrepareProgress(state, push, note):
                if self._pushes.update(name, push or PushProgress(), is_done=state == "pushed"):
                    self.emit(NodeChanged(node=name, state=state, push=push))
                if note:
                    self.emit(Note(text=note))
                self._emit_push_totals()

    def _emit_push_totals(self) -> None:
        """Emit the progress of all pushes together, if an event is due."""
        sessions = self.sessions.values()
        expected = {each.name for each in sessions if each.setup.push is not None and not each.code}
        if (event := self._pushes.make_event(expected)) is not None:
            self.emit(event)

    def find_stall(self, session: NodeSession) -> ConnectError | None:
        """Return the error of a node whose preparation makes no progress; a node that sends nothing is reported first.

        Before the connection, the limit of the transport applies.
        """
        if session.last_progress is None:
            return None
        idle_s = time.monotonic() - session.last_progress
        if not session.is_described:
            text = "it has accepted the connection, but sent nothing for "
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
        text, hint = "its preparation makes no progress", "check its load and whether its disk responds"
        return ConnectError(text, node=session.name, hint=hint)

    def wait_with_keepalive(self, seconds: float) -> None:
        """Wait for so long or until a request to stop, and keep all links alive meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.signals:
            self.next_message(min(0.2, max(0.0, deadline - time.monotonic())))

    def find_free_node_port(self, node: str, ports: tuple[int, ...]) -> int | None:
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

    def quit_supervisors(self) -> None:
        """Send every supervisor the order to exit, and wait until they have, or until `QUIT_LIMIT_S` has passed."""
        notified = [session for session in self.sessions.values() if session.send(Quit())]
        deadline = time.monotonic() + QUIT_LIMIT_S
        for session in notified:
            session.mute_reports()  # A full inbox must not prevent the end of the session's thread.
        for session in notified:
            session.wait_closed(deadline - time.monotonic())

    def next_message(self, timeout_s: float) -> NodeMessage | None:
        """Return the next message of any node, None after `timeout_s`; keep links alive, end the run after `time_s`."""
        now = time.monotonic()
        self.detect_launcher_pause()
        if now - self._pinged >= PING_S:
            self._pinged = now
            for session in self.sessions.values():
                session.send(Ping())
            if self.time_s is not None and now - self._begun > self.time_s:
                self.time_s = None
                self.emit(TimeLimitReached())
                self.signals.append(signal.SIGUSR1)
        try:
            message = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        finally:
            self.detect_launcher_pause()
        message.session.acknowledge(message)
        return message

    def detect_launcher_pause(self) -> None:
        """Reset the deadlines of all nodes if this process was paused since the last pass of the loop."""
        turned, self._turned = self._turned, _read_boot_clock()
        if self._turned - turned > AWAY_S:
            self.away_s = max(self.away_s, self._turned - turned)
            for session in self.sessions.values():
                session.reset_deadline()


def _read_boot_clock() -> float:
    """Return the seconds of a clock that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def convert_session_error(error: BaseException) -> DtctlError:
    """Return an error of a session as a DtctlError; an error of any other class is a bug."""
    if isinstance(error, DtctlError):
        return error
    bug = DtctlError(f"{type(error).__name__}: {error}", hint="this is a bug in dtctl; please report it")
    bug.__cause__ = error
    return bug
