"""Facts about one node from the answers of its probe, which are the input of every check. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dtctl.errors import DtctlError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginShell:
    """Result of `echo WORD` in the login shell of a node."""

    answered: bool
    """True if the login shell ended in time."""
    refused: bool = False
    """True if the server did not open a session for the login shell."""
    has_run: bool = False
    """True if the output has the word."""
    other: str = ""
    """Further output on standard output."""
    complaint: str = ""
    """Output on standard error."""
    status: int | None = None


@dataclass(slots=True, kw_only=True)
class NodeReport:
    """Facts about one node."""

    name: str
    address: str = ""
    data_address: str = ""
    """Address at which the node's workers will be called; the node's own unless the spec names another interface."""
    meeting: str = ""
    """Address of the rendezvous on this node; empty if it cannot resolve the name."""
    target: str = ""
    """Address in the spec, or the node's name."""
    slots: int = 1
    error: DtctlError | None = None
    login_s: list[float] = field(default_factory=list)
    """Seconds from the connection to the first answer of a program, measured once or twice."""
    python_s: list[float] = field(default_factory=list)
    """Seconds of two starts of Python; measured only if the first login was slow."""
    shell: LoginShell | None = None
    """Result of a plain command in the login shell; only set if the probe has not answered in time."""
    facts: dict[str, Any] = field(default_factory=dict)
    offset_s: float = 0.0
    """Clock of the node minus the clock of this machine, in seconds."""
    offset_error_s: float = 0.0
    ports: dict[str, int] = field(default_factory=dict)
    """Kind -> port on which the node listens, or a negative error number."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Results of this node's calls to the others: node, port, kind, result, ..."""
    measured: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Other node -> measurements of the link to it; one, or several if the first looked bad."""
    own: list[dict[str, Any]] = field(default_factory=list)
    """Measurements of the connection to itself, one per repetition; they show the speed that the node's load allows."""


SPREAD, MEETING = "spread", "meeting"
"""Kinds of calls to many ports of a node: ports that workers get, and possible rendezvous ports."""
REACHED = "reached"
"""Kind of a call to the address at which this machine reaches the node, if workers use another one."""


def find_good_ways(reports: Sequence[NodeReport]) -> set[tuple[str, str]]:
    """Return the (caller, called) pairs whose calls all succeeded."""
    said: dict[tuple[str, str], bool] = {}
    for node in reports:
        for answer in node.answers:
            if answer["kind"] == REACHED:
                continue
            way = (node.name, str(answer["node"]))
            said[way] = said.get(way, True) and answer["result"] == "ok"
    return {way for way, well in said.items() if well}
