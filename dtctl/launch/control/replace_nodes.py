"""The nodes of the next attempt: the survivors, with spares in place of lost nodes, or fewer nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtctl.launch.control.gang import Gang
from dtctl.launch.control.session import Session
from dtctl.launch.records.events import NodeLeftOut, NodeReplaced, Note
from dtctl.supervisor.messages.setup import NodeDescription
from dtctl.transport.fanout import raise_failures

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
"""Between two calls of nodes that do not answer."""

Call = Callable[[str], Session]
"""Opens a session with a node; it is not started yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextNodes:
    """The nodes that take part from now on."""

    names: tuple[str, ...]
    """In node rank order."""
    descriptions: Mapping[str, NodeDescription]
    """What the nodes that were called have said about themselves."""
    replaced: tuple[str, ...]
    """Nodes that were replaced or left out."""


def choose_nodes(
    gang: Gang, silent: set[str], spares: list[str], *, min_nodes: int, return_s: float, call: Call
) -> NextNodes:
    """Contact nodes whose link was lost again, and replace or drop those that do not answer.

    Args:
        gang: its sessions are changed to those of the next attempt.
        silent: nodes to be called again.
        spares: nodes that stand by; the ones that are called are taken out.
        min_nodes: number of nodes that the run needs.
        return_s: for how long nodes that it cannot do without are called again.
        call: opens a session.

    Raises:
        DtctlError: of a node that the run cannot do without.
    """
    for name in gang.sessions.keys() & silent:
        gang.sessions[name].close()
        gang.sessions[name] = call(name)
        gang.sessions[name].start()
    descriptions, failures = gang.try_gather(silent)
    names = list(gang.sessions)
    deadline, wait_s = time.monotonic() + return_s, FIRST_WAIT_S
    while len(failures) > len(spares) + len(names) - min_nodes and time.monotonic() < deadline and not gang.signals:
        for name, error in failures.items():
            text = f"retrying in {wait_s:g} s, since the run needs this node: {error.message}"
            gang.emit(Note(node=name, text=text))
        gang.idle(wait_s)
        wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
        for name in failures:
            gang.sessions[name].close()
            gang.sessions[name] = call(name)
            gang.sessions[name].start()
        new_descriptions, failures = gang.try_gather(set(failures))
        descriptions |= new_descriptions
    replaced = []
    for lost in [name for name in names if name in failures]:
        spare = _spare(gang, spares, call, descriptions)
        if spare is not None:
            names[names.index(lost)] = spare
            gang.emit(NodeReplaced(node=lost, by=spare, reason=str(failures[lost])))
        elif len(names) > min_nodes:
            names.remove(lost)
            gang.emit(NodeLeftOut(node=lost, nodes=len(names), reason=str(failures[lost])))
        else:
            raise_failures(failures)
        gang.sessions[lost].close()
        replaced.append(lost)
    gang.sessions = {name: gang.sessions[name] for name in names}
    return NextNodes(names=tuple(names), descriptions=descriptions, replaced=tuple(replaced))


def _spare(gang: Gang, spares: list[str], call: Call, descriptions: dict[str, NodeDescription]) -> str | None:
    """The first spare that can be made ready; its description is added to `descriptions`."""
    while spares and not gang.signals:
        name = spares.pop(0)
        gang.sessions[name] = call(name)
        gang.sessions[name].start()
        answers, failures = gang.try_gather({name})
        if name in answers and not failures:
            descriptions |= answers
            return name
        gang.sessions.pop(name).close()
    return None
