"""Spares of a run: nodes that can take the place of a lost one; two of them stand by, with code and imports ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from dtctl.launch.control.gang import PING_S, QUIT_LIMIT_S
from dtctl.launch.control.session import Content, LinkLost, Session, SessionFailed
from dtctl.launch.records.events import Emit, Note
from dtctl.supervisor.messages.attempt import Ping
from dtctl.supervisor.messages.base import Quit, Refusal
from dtctl.supervisor.messages.setup import NodeDescription, Ready

STANDBYS = 2
"""Spares that stand by at a time: the first loss can be followed by another before a node has taken its place."""
FRESH_S = 3.0
"""A node on standby that was silent for longer may be lost itself."""
RETIRED_S = 1.0
"""Seconds from the loss of a node that was replaced until it is called as a spare."""
FAILED_S = 10.0
"""Seconds between a spare that cannot stand by and the next call."""


class NotHealed(Exception):
    """A lost worker cannot be replaced while the others stay, for the reason in the text."""


WarmUp: TypeAlias = Callable[[Session, NodeDescription], None]
"""Lets a node that is ready import what workers need. Raises NotHealed if it does not fit."""


@dataclass(slots=True, kw_only=True)
class Standby:
    """A spare that is kept ready."""

    session: Session
    description: NodeDescription | None = None
    is_ready: bool = False
    pinged_s: float = 0.0

    def is_fresh(self) -> bool:
        """Tell whether it can be relied upon."""
        return self.is_ready and not self.session.is_over and time.monotonic() - self.session.last_heard < FRESH_S


class Spares:
    """The spares of a run, in the order in which they are used."""

    def __init__(self, names: list[str], emit: Emit) -> None:
        self.names = names
        """Nodes that have not been called."""
        self._emit = emit
        self._standbys: list[Standby] = []
        self._not_before_s: dict[str, float] = {}
        """Earliest time at which a spare may be called to stand by, of those that were lost or did not answer."""
        self._reported: set[str] = set()
        """Nodes that were reported to the user as absent."""
        self._leaving: list[Session] = []
        """Sessions with nodes that got a request to quit."""

    def keep_ready(self, call: Callable[[str], Session]) -> None:
        """Call spares to stand by, and keep their links alive."""
        now = time.monotonic()
        for standby in self._standbys:
            if standby.is_ready and now - standby.pinged_s >= PING_S:
                standby.pinged_s = now
                standby.session.send(Ping())
        for name in [name for name in self.names if now >= self._not_before_s.get(name, 0.0)]:
            if len(self._standbys) < STANDBYS:
                self.names.remove(name)
                self._standbys.append(Standby(session=call(name)))
                self._standbys[-1].session.start()

    def find(self, session: Session) -> Standby | None:
        """Find the node that stands by at the end of a session."""
        return next((standby for standby in self._standbys if standby.session is session), None)

    def take(self, standby: Standby, content: Content, warm_up: WarmUp) -> None:
        """Take in a message of a node that stands by or is to."""
        name = standby.session.name
        if isinstance(content, NodeDescription):
            standby.description = content
        elif isinstance(content, Ready) and standby.description is not None:
            standby.is_ready = True
            try:
                warm_up(standby.session, standby.description)
            except NotHealed as exc:  # nor will it fit later
                self._drop(standby, str(exc))
        elif isinstance(content, SessionFailed | LinkLost | Refusal):
            reason = str(content.error) if isinstance(content, SessionFailed) else ""
            reason = content.message if isinstance(content, Refusal) else reason
            self._drop(standby, reason or "the link was lost")
            self.names.append(name)
            self._not_before_s[name] = time.monotonic() + FAILED_S

    def _drop(self, standby: Standby, reason: str) -> None:
        name = standby.session.name
        self._standbys.remove(standby)
        standby.session.close()
        if name not in self._reported:
            self._reported.add(name)
            self._emit(Note(node=name, text=f"this spare cannot stand by: {reason}"))

    def use(self) -> Standby | None:
        """Return a node that stands by, for the place of a lost one."""
        fresh = next((standby for standby in self._standbys if standby.is_fresh()), None)
        if fresh is not None:
            self._standbys.remove(fresh)
        return fresh

    def release(self) -> list[Standby]:
        """Return the nodes that are still being prepared; close the ready ones, which are called again later."""
        preparing = [standby for standby in self._standbys if not standby.is_ready]
        for standby in self._standbys:
            if standby.is_ready:
                standby.session.close()
                self.names.append(standby.session.name)
        self._standbys.clear()
        return preparing

    def retire(self, lost: str) -> None:
        """Make a spare of a lost node that another one has replaced; it stands by once it answers."""
        self.names.append(lost)
        self._not_before_s[lost] = time.monotonic() + RETIRED_S
        self._reported.add(lost)

    def send_away(self) -> None:
        """End the run on nodes that stand by."""
        for standby in reversed(self._standbys):
            self.names.insert(0, standby.session.name)
            if standby.session.send(Quit()):
                standby.session.mute()
                self._leaving.append(standby.session)
            else:
                standby.session.close()
        self._standbys.clear()

    def close(self) -> None:
        """Wait until nothing of the run is left on nodes that stood by."""
        self.send_away()
        deadline = time.monotonic() + QUIT_LIMIT_S
        for session in self._leaving:
            session.wait_closed(deadline - time.monotonic())
            session.close()
        self._leaving.clear()
