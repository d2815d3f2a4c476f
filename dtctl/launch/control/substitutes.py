"""Who takes the place of a lost node while the workers of the others wait: a spare that stands by, or the node itself.

Spares are kept ready beside the training: connected, with the code, and with everything imported that workers need.
Where none stands by, the lost node is called again at once, since often only what runs there was lost; a spare is
called, too, when that fails or takes longer, and the first one that is ready takes the place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dtctl.launch.control.session import LinkLost, NodeMessage, Session, SessionFailed
from dtctl.supervisor.messages.attempt import Ping
from dtctl.supervisor.messages.base import Quit, Refusal
from dtctl.supervisor.messages.setup import NodeDescription, Ready

RETURN_S = 2.0
"""How long a lost node may take to answer before a spare is called beside it."""
RETRY_S = 1.0
"""Between two calls of a lost node, which may be starting again."""
PATIENCE_S = 15.0
"""For how long it is called; a restart of all has more time (`cluster.return_s`)."""
STANDBYS = 2
"""Spares that stand by at a time: the first loss can be followed by another before a node has taken its place."""
PING_S = 1.0
FRESH_S = 3.0
"""A node on standby that was silent for longer may be lost itself."""
STANDBY_RETRY_S = 10.0
"""Between a spare that cannot stand by and the next call."""
QUIT_S = 2.0

Call = Callable[[str], Session]
"""Opens a session with a node; it is not started yet."""


class NotHealed(Exception):
    """A healing is given up; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitute:
    """A node that is ready to take the place of a lost one."""

    lost: str
    session: Session
    description: NodeDescription


@dataclass(slots=True, kw_only=True)
class _Search:
    """The nodes that were called for one place."""

    began_s: float
    called: dict[str, Session] = field(default_factory=dict)
    descriptions: dict[str, NodeDescription] = field(default_factory=dict)
    error: str = ""
    """Of the one that has failed last."""
    again_s: float = 0.0
    """When the lost node is to be called again, if it has failed."""


@dataclass(slots=True, kw_only=True)
class _Standby:
    """A spare that is kept ready."""

    session: Session
    description: NodeDescription | None = None
    is_ready: bool = False
    pinged_s: float = 0.0

    def is_fresh(self) -> bool:
        """Whether it can be relied upon."""
        return self.is_ready and not self.session.is_over and time.monotonic() - self.session.last_heard < FRESH_S


class Substitutes:
    """All searches of an attempt; a spare that was not needed stands by again, and so does a lost node that answers."""

    def __init__(
        self,
        spares: list[str],
        call: Call,
        *,
        warm_up: Callable[[Session, NodeDescription], None],
        complain: Callable[[str, str], None],
    ) -> None:
        """Nothing is lost yet.

        Args:
            spares: nodes that can be used, in the order in which they are; changed.
            call: opens a session.
            warm_up: lets a node that is ready import what workers need. Raises NotHealed if it does not fit.
            complain: told which spare cannot be used, and why; `complain(node, reason)`.
        """
        self._spares, self._call = spares, call
        self._warm_up, self._complain = warm_up, complain
        self._searches: dict[str, _Search] = {}
        self._standbys: list[_Standby] = []
        self._not_before_s: dict[str, float] = {}
        """When a spare may be called to stand by, of those that were lost or did not answer."""
        self._complained: set[str] = set()
        """Nodes of which it is known already that they are not there."""
        self._leaving: list[Session] = []
        """Sessions with nodes that were told that they are not needed."""

    # -- spares that stand by ---------------------------------------------------------------------------------------

    def keep_standbys(self) -> None:
        """See that spares stand by; called all the time."""
        now = time.monotonic()
        for standby in self._standbys:
            if standby.is_ready and now - standby.pinged_s >= PING_S:
                standby.pinged_s = now
                standby.session.send(Ping())
        if self._searches:
            return
        for name in [name for name in self._spares if now >= self._not_before_s.get(name, 0.0)]:
            if len(self._standbys) < STANDBYS:
                self._spares.remove(name)
                self._standbys.append(_Standby(session=self._call(name)))
                self._standbys[-1].session.start()

    def _standby_of(self, session: Session) -> _Standby | None:
        return next((standby for standby in self._standbys if standby.session is session), None)

    def _take_standby(self, standby: _Standby, content: object) -> None:
        """A spare that is to stand by has said something."""
        name = standby.session.name
        if isinstance(content, NodeDescription):
            standby.description = content
        elif isinstance(content, Ready) and standby.description is not None:
            standby.is_ready = True
            try:
                self._warm_up(standby.session, standby.description)
            except NotHealed as exc:  # nor will it fit later
                self._drop(standby, str(exc))
        elif isinstance(content, SessionFailed | LinkLost | Refusal):
            reason = str(content.error) if isinstance(content, SessionFailed) else ""
            reason = content.message if isinstance(content, Refusal) else reason
            self._drop(standby, reason or "the link was lost")
            self._spares.append(name)
            self._not_before_s[name] = time.monotonic() + STANDBY_RETRY_S

    def _drop(self, standby: _Standby, reason: str) -> None:
        name = standby.session.name
        self._standbys.remove(standby)
        standby.session.close()
        if name not in self._complained:
            self._complained.add(name)
            self._complain(name, reason)

    # -- searches ---------------------------------------------------------------------------------------------------

    def search(self, lost: str) -> Substitute | None:
        """Find a node for the place of this one; at once if one stands by, else as soon as `take` has found it."""
        for standby in self._standbys:
            if standby.is_fresh() and standby.description is not None:
                self._standbys.remove(standby)
                self._retire(lost)
                return Substitute(lost=lost, session=standby.session, description=standby.description)
        search = self._searches[lost] = _Search(began_s=time.monotonic())
        self._try(search, lost)
        for standby in self._standbys:
            name = standby.session.name
            if standby.is_ready:  # and silent
                standby.session.close()
                self._spares.append(name)
                continue
            search.called[name] = standby.session
            if standby.description is not None:
                search.descriptions[name] = standby.description
        self._standbys.clear()
        return None

    def _retire(self, lost: str) -> None:
        """Another node has the place of a lost one, which may stand by once it answers."""
        self._spares.append(lost)
        self._not_before_s[lost] = time.monotonic() + RETRY_S
        self._complained.add(lost)

    def _try(self, search: _Search, name: str) -> None:
        search.called[name] = self._call(name)
        search.called[name].start()

    def owns(self, session: Session) -> bool:
        """Whether a session is with a node that was called here."""
        if self._standby_of(session) is not None:
            return True
        return any(session in search.called.values() for search in self._searches.values())

    def take(self, message: NodeMessage) -> Substitute | None:
        """A node that was called has said something; the substitute if with that one is ready."""
        session, content = message.session, message.content
        if (standby := self._standby_of(session)) is not None:
            self._take_standby(standby, content)
            return None
        lost = next(lost for lost, search in self._searches.items() if session in search.called.values())
        search = self._searches[lost]
        if isinstance(content, NodeDescription):
            search.descriptions[session.name] = content
        elif isinstance(content, SessionFailed):
            del search.called[session.name]
            session.close()
            search.error, search.again_s = str(content.error), time.monotonic() + RETRY_S
            if not search.called:
                self._call_spare(search)
        elif isinstance(content, Ready):
            del self._searches[lost], search.called[session.name]
            self._dismiss(search, lost)
            if session.name != lost:
                self._retire(lost)
            return Substitute(lost=lost, session=session, description=search.descriptions[session.name])
        return None

    def check(self) -> None:
        """Look at the time: a lost node that takes long to answer is not the only one to be called, nor once only.

        Raises:
            NotHealed: nobody is there.
        """
        now = time.monotonic()
        for lost, search in self._searches.items():
            if search.called.keys() == {lost} and now - search.began_s > RETURN_S:
                self._call_spare(search)
            if lost not in search.called and now - search.began_s < PATIENCE_S and now >= search.again_s:
                self._try(search, lost)
            if not search.called and now - search.began_s >= PATIENCE_S:
                raise NotHealed(f"no node is there for the place of {lost}: {search.error}")

    def _call_spare(self, search: _Search) -> None:
        if self._spares:
            self._try(search, self._spares.pop(0))

    def _dismiss(self, search: _Search, lost: str) -> None:
        for name, session in search.called.items():
            session.close()
            if name != lost:
                self._spares.insert(0, name)

    def end(self) -> None:
        """Nobody is looked for any more, and nobody stands by."""
        for lost, search in self._searches.items():
            self._dismiss(search, lost)
        self._searches.clear()
        for standby in reversed(self._standbys):
            self._spares.insert(0, standby.session.name)
            if standby.session.send(Quit()):
                standby.session.mute()
                self._leaving.append(standby.session)
            else:
                standby.session.close()
        self._standbys.clear()

    def close(self) -> None:
        """As `end`, and wait until nothing of the run is left on nodes that stood by."""
        self.end()
        deadline = time.monotonic() + QUIT_S
        for session in self._leaving:
            session.wait_closed(deadline - time.monotonic())
            session.close()
        self._leaving.clear()
