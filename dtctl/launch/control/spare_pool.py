"""Spares of a run: nodes that can replace a lost one. Two of them are kept prepared, with code and imports ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from dtctl.launch.control.node_sessions import PING_S, QUIT_LIMIT_S
from dtctl.launch.control.session import Content, LinkLost, NodeSession, SessionFailed
from dtctl.launch.records.events import Emit, Note
from dtctl.supervisor.messages.attempt import Ping
from dtctl.supervisor.messages.base import Quit, Refusal
from dtctl.supervisor.messages.setup import NodeDescription, NodeReady

STANDBYS = 2
"""Number of spares that are kept prepared: a second node can be lost before a spare has replaced the first."""
FRESH_S = 3.0
"""Seconds of silence after which a node on standby may be lost itself."""
RETIRED_S = 1.0
"""Seconds after which a lost node that was replaced is called as a spare."""
FAILED_S = 10.0
"""Seconds after which a spare that could not be prepared is contacted again."""


class WorkerNotReplaced(Exception):
    """A lost worker cannot be replaced while the others stay, for the reason in the text."""


WarmUp: TypeAlias = Callable[[NodeSession, NodeDescription], None]
"""Function that lets a node import the modules of workers, and raises WorkerNotReplaced if it cannot run them."""


@dataclass(slots=True, kw_only=True)
class StandbyNode:
    """A spare that is kept ready."""

    session: NodeSession
    description: NodeDescription | None = None
    is_ready: bool = False
    pinged_s: float = 0.0

    def is_fresh(self) -> bool:
        """Return whether the spare is ready and has sent a message in the last `FRESH_S` seconds."""
        return self.is_ready and not self.session.is_over and time.monotonic() - self.session.last_heard < FRESH_S


class SparePool:
    """The spares of a run, in the order in which they are used."""

    def __init__(self, names: list[str], emit: Emit) -> None:
        self.names = names
        """Nodes that have not been called."""
        self._emit = emit
        self._standbys: list[StandbyNode] = []
        self._not_before_s: dict[str, float] = {}
        """Earliest time of the next call of each spare that was lost or did not answer."""
        self._reported: set[str] = set()
        """Nodes that were reported to the user as unusable spares."""
        self._leaving: list[NodeSession] = []
        """Sessions with nodes that got a request to quit."""

    def connect_spares(self, call: Callable[[str], NodeSession]) -> None:
        """Prepare spares, and keep the links of the prepared ones alive."""
        now = time.monotonic()
        for standby in self._standbys:
            if standby.is_ready and now - standby.pinged_s >= PING_S:
                standby.pinged_s = now
                standby.session.send(Ping())
        for name in [name for name in self.names if now >= self._not_before_s.get(name, 0.0)]:
            if len(self._standbys) < STANDBYS:
                self.names.remove(name)
                self._standbys.append(StandbyNode(session=call(name)))
                self._standbys[-1].session.start()

    def find(self, session: NodeSession) -> StandbyNode | None:
        """Return the spare that a session belongs to; None if it is another node's."""
        return next((standby for standby in self._standbys if standby.session is session), None)

    def handle_standby_message(self, standby: StandbyNode, content: Content, warm_up: WarmUp) -> None:
        """Handle a message of a spare that is prepared or being prepared."""
        name = standby.session.name
        if isinstance(content, NodeDescription):
            standby.description = content
        elif isinstance(content, NodeReady) and standby.description is not None:
            standby.is_ready = True
            try:
                warm_up(standby.session, standby.description)
            except WorkerNotReplaced as exc:  # The node will not fit later either, so it is not called again.
                self._drop_standby(standby, str(exc))
        elif isinstance(content, SessionFailed | LinkLost | Refusal):
            reason = str(content.error) if isinstance(content, SessionFailed) else ""
            reason = content.message if isinstance(content, Refusal) else reason
            self._drop_standby(standby, reason or "the link was lost")
            self.names.append(name)
            self._not_before_s[name] = time.monotonic() + FAILED_S

    def _drop_standby(self, standby: StandbyNode, reason: str) -> None:
        name = standby.session.name
        self._standbys.remove(standby)
        standby.session.close()
        if name not in self._reported:
            self._reported.add(name)
            self._emit(Note(node=name, text=f"this spare cannot wait in readiness: {reason}"))

    def pop_standby(self) -> StandbyNode | None:
        """Remove and return a prepared spare, which replaces a lost node; None if there is none."""
        fresh = next((standby for standby in self._standbys if standby.is_fresh()), None)
        if fresh is not None:
            self._standbys.remove(fresh)
        return fresh

    def release(self) -> list[StandbyNode]:
        """Return the nodes that are still being prepared; close the prepared ones, which are contacted again later."""
        preparing = [standby for standby in self._standbys if not standby.is_ready]
        for standby in self._standbys:
            if standby.is_ready:
                standby.session.close()
                self.names.append(standby.session.name)
        self._standbys.clear()
        return preparing

    def add_lost_node(self, lost: str) -> None:
        """Add a replaced lost node to the spares; it is prepared once it answers."""
        self.names.append(lost)
        self._not_before_s[lost] = time.monotonic() + RETIRED_S
        self._reported.add(lost)

    def end_standby_runs(self) -> None:
        """End the run on prepared spares."""
        for standby in reversed(self._standbys):
            self.names.insert(0, standby.session.name)
            if standby.session.send(Quit()):
                standby.session.mute_reports()
                self._leaving.append(standby.session)
            else:
                standby.session.close()
        self._standbys.clear()

    def close(self) -> None:
        """End the run on prepared spares, and wait until none of its processes is left there."""
        self.end_standby_runs()
        deadline = time.monotonic() + QUIT_LIMIT_S
        for session in self._leaving:
            session.wait_closed(deadline - time.monotonic())
            session.close()
        self._leaving.clear()
