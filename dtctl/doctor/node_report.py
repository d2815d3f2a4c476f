"""What is known of one node after the probes have answered: the input of every check. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dtctl.errors import DtctlError


@dataclass(slots=True, kw_only=True)
class NodeReport:
    """What is known of one node."""

    name: str
    address: str = ""
    error: DtctlError | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    offset_s: float = 0.0
    """Its clock minus ours."""
    offset_error_s: float = 0.0
    ports: dict[str, int] = field(default_factory=dict)
    """kind -> port that it listens on; minus an error number where it could not."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Of its calls to the others: node, port, kind, result, ..."""
    measured: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """other node -> what was measured on the way to it, once, or several times where the first looked bad."""
    own: list[dict[str, Any]] = field(default_factory=list)
    """What was measured on its way to itself beside each repetition: what its own load leaves over."""


def good_ways(seen: Sequence[NodeReport]) -> set[tuple[str, str]]:
    """The (caller, called) ways on which every call went well."""
    said: dict[tuple[str, str], bool] = {}
    for node in seen:
        for answer in node.answers:
            way = (node.name, str(answer["node"]))
            said[way] = said.get(way, True) and answer["result"] == "ok"
    return {way for way, well in said.items() if well}
