"""The nodes that a run can use: lost nodes are called again, and spares take the places of those that do not answer.

A lost node is called at once, then after waits that double. If another node may take its place, a spare is called
when a call fails or takes long, and the first node that is ready takes the place. The time limit depends on whether
workers wait for the node: see `ReconnectPolicy`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from dtctl.errors import DtctlError
from dtctl.launch.control.node_sessions import NodeSessions, convert_session_error
from dtctl.launch.control.session import NodeMessage, NodeSession, SessionFailed
from dtctl.launch.control.spare_pool import SparePool, WarmUp
from dtctl.launch.records.events import NodeDropped, NodeReplaced, Note
from dtctl.supervisor.messages.setup import NodeDescription, NodeReady
from dtctl.transport.fanout import raise_failures

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
"""Least and most seconds between two calls of a node that does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectPolicy:
    """Schedule of the calls to a lost node."""

    limit_s: float
    """Seconds for which the lost node is called."""
    spare_after_s: float | None
    """Seconds without an answer after which a spare is called, too; None: no other node may take the place."""

    def wait_s(self, failed_calls: int) -> float:
        """Return the seconds until the next call: they double with each call, up to a tenth of the limit."""
        longest_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, self.limit_s / 10))
        return min(longest_s, FIRST_WAIT_S * 2.0 ** min(failed_calls - 1, 10))


KEPT: Final = ReconnectPolicy(limit_s=3600.0, spare_after_s=None)
"""Rule for a node whose workers continue without the launcher (`--detach`)."""
LIVE: Final = ReconnectPolicy(limit_s=15.0, spare_after_s=2.0)
"""Rule for a node while the workers of other nodes wait; before a restart of all workers, `cluster.return_s` counts."""

Call = Callable[[str, ReconnectPolicy], NodeSession]
"""Function that opens a session with a node without starting it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementNode:
    """A node that is ready to replace a lost one; it may be the same node."""

    lost: str
    session: NodeSession
    description: NodeDescription | None
    """Report of the node; None if its workers continue."""
    reason: str = "it was lost"
    """Reason why another node takes the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAttemptNodes:
    """The nodes of the next attempt."""

    names: tuple[str, ...]
    """Names in node rank order."""
    descriptions: Mapping[str, NodeDescription]
    """Descriptions of the nodes that were called."""
    replaced: tuple[str, ...]
    """Nodes that were replaced or left out."""


@dataclass(slots=True, kw_only=True)
class _NodeSearch:
    """The nodes that are contacted as a replacement for one lost node."""

    rule: ReconnectPolicy
    began_s: float
    called: dict[str, NodeSession] = field(default_factory=dict)
    descriptions: dict[str, NodeDescription] = field(default_factory=dict)
    error: DtctlError | None = None
    """Error of the lost node, or of a spare that has failed before it."""
    failed_calls: int = 0
    """Failed calls of the lost node."""
    next_call_s: float = 0.0


class NodePool:
    """Searches for nodes that can replace lost ones."""

    def __init__(self, gang: NodeSessions, spares: SparePool, call: Call, warm_up: WarmUp) -> None:
        self.spares = spares
        self._gang, self._call, self._warm_up = gang, call, warm_up
        self._searches: dict[str, _NodeSearch] = {}

    @property
    def vacant(self) -> set[str]:
        """Return the lost nodes that no node has replaced yet."""
        return set(self._searches)

    def connect_standbys(self) -> None:
        """Prepare spares while no node is lost."""
        if not self._searches:
            self.spares.connect_spares(lambda name: self._call(name, LIVE))

    def search(self, lost: str, rule: ReconnectPolicy) -> ReplacementNode | None:
        """Find a node that replaces a lost one.

        Returns:
            A prepared spare, or None: `handle_called_node_message` then returns the first node
            that is ready.
        """
        self._gang.sessions[lost].close()
        standby = self.spares.pop_standby()
        if standby is not None:
            self.spares.add_lost_node(lost)
            return ReplacementNode(lost=lost, session=standby.session, description=standby.description)
        search = self._searches[lost] = _NodeSearch(rule=rule, began_s=time.monotonic())
        self._start_node_call(search, lost)
        for standby in self.spares.release():
            search.called[standby.session.name] = standby.session
            if standby.description is not None:
                search.descriptions[standby.session.name] = standby.description
        return None

    def reconnect_detached_node(self, lost: str) -> None:
        """Call a node again that continues without the launcher; no other node takes its place."""
        self.search(lost, KEPT)

    def _start_node_call(self, search: _NodeSearch, name: str) -> None:
        search.called[name] = self._call(name, search.rule)
        search.called[name].start()

    def has_session(self, session: NodeSession) -> bool:
        """Return whether a session belongs to a node that this pool has called."""
        if self.spares.find(session) is not None:
            return True
        return any(session in search.called.values() for search in self._searches.values())

    def handle_called_node_message(self, message: NodeMessage) -> ReplacementNode | None:
        """Handle a message of a node that was called; return the node as a substitute if it is ready now."""
        session, content = message.session, message.content
        if (standby := self.spares.find(session)) is not None:
            self.spares.handle_standby_message(standby, content, self._warm_up)
            return None
        lost = next(lost for lost, search in self._searches.items() if session in search.called.values())
        search = self._searches[lost]
        if isinstance(content, NodeDescription):
            search.descriptions[session.name] = content
        elif isinstance(content, SessionFailed):
            self._end_call(lost, session, convert_session_error(content.error))
        elif isinstance(content, NodeReady):
            del search.called[session.name]
            self.cancel_search(lost)
            if session.name != lost and search.rule is LIVE:
                self.spares.add_lost_node(lost)
            reason = "it was lost" if search.error is None else str(search.error)
            description = search.descriptions.get(session.name)
            return ReplacementNode(lost=lost, session=session, description=description, reason=reason)
        return None

    def _end_call(self, lost: str, session: NodeSession, error: DtctlError) -> None:
        """End a call that has failed, and call a spare unless another call is under way."""
        search = self._searches[lost]
        del search.called[session.name]
        session.close()
        if session.name == lost or search.error is None:
            search.error = error
        if session.name == lost:
            search.failed_calls += 1
            search.next_call_s = time.monotonic() + search.rule.wait_s(search.failed_calls)
        if not search.called:
            self._call_spare(search)

    def _call_spare(self, search: _NodeSearch) -> None:
        if self.spares.names and search.rule.spare_after_s is not None:
            self._start_node_call(search, self.spares.names.pop(0))

    def check(self) -> dict[str, DtctlError]:
        """Make the calls that are due: of lost nodes again, and of spares for those that take long.

        Returns:
            The newest error of each lost node that is called no more.
        """
        now = time.monotonic()
        given_up: dict[str, DtctlError] = {}
        for lost, search in self._searches.items():
            for session in list(search.called.values()):
                if (error := self._gang.find_stall(session)) is not None:
                    self._end_call(lost, session, error)
            searched_s = now - search.began_s
            spare_after_s = search.rule.spare_after_s
            if search.called.keys() == {lost} and spare_after_s is not None and searched_s > spare_after_s:
                self._call_spare(search)
            if lost not in search.called and searched_s < search.rule.limit_s and now >= search.next_call_s:
                self._start_node_call(search, lost)
            if not search.called and search.error is not None and searched_s >= search.rule.limit_s:
                given_up[lost] = search.error
        return given_up

    def cancel_search(self, lost: str) -> None:
        """End the search for a node that replaces a lost one."""
        for name, session in self._searches.pop(lost).called.items():
            session.close()
            if name != lost:
                self.spares.names.insert(0, name)

    def end(self) -> None:
        """End all searches, and end the run on prepared spares."""
        for lost in self.vacant:
            self.cancel_search(lost)
        self.spares.end_standby_runs()

    def choose_nodes(self, lost: AbstractSet[str], *, min_nodes: int, return_s: float) -> NextAttemptNodes:
        """Fill the places of lost nodes before the next attempt, or leave nodes out; replace the gang's sessions.

        Args:
            lost: nodes to be called again.
            min_nodes: number of nodes that the run needs.
            return_s: seconds for which nodes that the run needs are called again.

        Raises:
            DtctlError: a node that the run needs does not return.
        """
        gang, order = self._gang, list(self._gang.sessions)
        descriptions: dict[str, NodeDescription] = {}
        replaced: list[str] = []
        rule = ReconnectPolicy(limit_s=return_s, spare_after_s=math.inf)
        found = [self.search(name, rule) for name in order if name in lost]
        while (self._searches or found) and not gang.signals:
            for substitute in filter(None, found):
                name = substitute.session.name
                order[order.index(substitute.lost)] = name
                gang.sessions[name] = substitute.session
                if substitute.description is not None:
                    descriptions[name] = substitute.description
                if name != substitute.lost:
                    replaced.append(substitute.lost)
                    gang.emit(NodeReplaced(node=substitute.lost, by=name, reason=substitute.reason))
            given_up = self.check()
            surplus = len(order) - min_nodes
            unanswered = self._find_unanswered()
            if len(unanswered) == len(self._searches) <= surplus:
                for name, error in unanswered.items():
                    self.cancel_search(name)
                    order.remove(name)
                    replaced.append(name)
                    gang.emit(NodeDropped(node=name, nodes=len(order), reason=str(error)))
            elif self._searches and len(given_up) == len(self._searches):
                for error in given_up.values():
                    error.extend_message(f"; it was called for {return_s:g} s (cluster.return_s)")
                raise_failures(given_up)
            message = gang.next_message(0.2) if self._searches else None
            found = []
            if message is not None and self.has_session(message.session):
                gang.emit_preparation(message)
                found.append(self.handle_called_node_message(message))
                search = self._searches.get(message.session.name)
                is_needed = len(self._searches) > surplus + len(self.spares.names)
                if search is not None and search.error is not None and is_needed and not search.called:
                    wait_s = search.rule.wait_s(search.failed_calls)
                    text = f"retrying in {wait_s:g} s, since the run needs this node: {search.error.message}"
                    gang.emit(Note(node=message.session.name, text=text))
        self.end()
        gang.sessions = {name: gang.sessions[name] for name in order}
        return NextAttemptNodes(names=tuple(order), descriptions=descriptions, replaced=tuple(replaced))

    def _find_unanswered(self) -> dict[str, DtctlError]:
        """Return the lost nodes whose calls failed and that no spare can replace, with their errors."""
        if self.spares.names:
            return {}
        return {
            lost: search.error
            for lost, search in self._searches.items()
            if search.error is not None and search.called.keys() <= {lost}
        }
