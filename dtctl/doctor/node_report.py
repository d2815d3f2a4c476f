"""Facts about one node after the probes have answered: the input of every check. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dtctl.errors import DtctlError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginShell:
    """Result of `echo WORD` in the login shell of a node."""

    answered: bool
    """True if it came to an end in time."""
    refused: bool = False
    """True if the server opened no session for it at all."""
    has_run: bool = False
    """True if the word came back."""
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
    """At which its workers will be called; that of its address unless the spec names another interface."""
    meeting: str = ""
    """Address of the rendezvous on this node; empty if it cannot resolve the name."""
    target: str = ""
    """The address that the spec gives, or its name."""
    slots: int = 1
    error: DtctlError | None = None
    login_s: list[float] = field(default_factory=list)
    """Seconds from the connection to the first answer of a program, once or twice."""
    python_s: list[float] = field(default_factory=list)
    """Seconds that Python took to start, twice; asked only where the first time was long."""
    shell: LoginShell | None = None
    """Result of a plain command in its login shell; only where a program of ours has not answered."""
    facts: dict[str, Any] = field(default_factory=dict)
    offset_s: float = 0.0
    """Seconds of its clock minus ours."""
    offset_error_s: float = 0.0
    ports: dict[str, int] = field(default_factory=dict)
    """kind -> port that it listens on; minus an error number where it could not."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Answers to its calls of the others: node, port, kind, result, ..."""
    measured: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """other node -> what was measured on the way to it, once, or several times where the first looked bad."""
    own: list[dict[str, Any]] = field(default_factory=list)
    """Measurements of its way to itself next to each repetition: the speed that its own load leaves."""


SPREAD, MEETING = "spread", "meeting"
"""Kinds of calls to many ports of a node: of those that workers are given, and of those at which they may meet."""
REACHED = "reached"
"""Kind of a call to the address that we came by, where the workers will be called at another one."""


def good_ways(reports: Sequence[NodeReport]) -> set[tuple[str, str]]:
    """Return the (caller, called) ways on which every call went well."""
    said: dict[tuple[str, str], bool] = {}
    for node in reports:
        for answer in node.answers:
            if answer["kind"] == REACHED:
                continue
            way = (node.name, str(answer["node"]))
            said[way] = said.get(way, True) and answer["result"] == "ok"
    return {way for way, well in said.items() if well}
