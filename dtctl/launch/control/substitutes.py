"""Who takes the place of a lost node while the workers of the others wait: the node itself if it answers, or a spare.

The node is called again at once, since often only what runs there was lost. A spare is called, too, when that fails or
takes longer; the first one that is ready takes the place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dtctl.launch.control.session import NodeMessage, Session, SessionFailed
from dtctl.supervisor.messages import NodeDescription, Ready

RETURN_S = 2.0
"""How long a lost node may take to answer before a spare is called beside it."""
RETRY_S = 1.0
"""Between two calls of a lost node, which may be starting again."""
PATIENCE_S = 15.0
"""For how long it is called; a restart of all has more time (`cluster.return_s`)."""

Call = Callable[[str, bool], Session]
"""(node, whether the run is new to it) -> a session with it, not started yet."""


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


class Substitutes:
    """All searches of a run; a spare that was not needed stands by again."""

    def __init__(self, spares: list[str], call: Call) -> None:
        """Nothing is lost yet.

        Args:
            spares: nodes that stand by, in the order in which they are used; changed.
            call: opens a session.
        """
        self._spares, self._call = spares, call
        self._visited: set[str] = set()
        """Spares that know of the run."""
        self._searches: dict[str, _Search] = {}

    def search(self, lost: str) -> None:
        """Find a node for the place of this one."""
        self._searches[lost] = _Search(began_s=time.monotonic())
        self._try(self._searches[lost], lost, is_new=False)

    def _try(self, search: _Search, name: str, *, is_new: bool) -> None:
        search.called[name] = self._call(name, is_new)
        search.called[name].start()

    def owns(self, session: Session) -> bool:
        """Whether a session is with a node that was called here."""
        return any(session in search.called.values() for search in self._searches.values())

    def take(self, message: NodeMessage) -> Substitute | None:
        """A node that was called has said something; the substitute if with that one is ready."""
        session, content = message.session, message.content
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
                self._try(search, lost, is_new=False)
            if not search.called and now - search.began_s >= PATIENCE_S:
                raise NotHealed(f"no node is there for the place of {lost}: {search.error}")

    def _call_spare(self, search: _Search) -> None:
        if self._spares:
            name = self._spares.pop(0)
            self._try(search, name, is_new=name not in self._visited)
            self._visited.add(name)

    def _dismiss(self, search: _Search, lost: str) -> None:
        for name, session in search.called.items():
            session.close()
            if name != lost:
                self._spares.insert(0, name)

    def end(self) -> None:
        """Nobody is looked for any more."""
        for lost, search in self._searches.items():
            self._dismiss(search, lost)
        self._searches.clear()
