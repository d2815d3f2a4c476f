"""Which workers are on which node of a job: as text for the programs inside it, and by component. Pure.

Neighbouring nodes that ask for the same are one component of the job; srun numbers the tasks of each component from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple


class Component(NamedTuple):
    """Nodes of one kind."""

    nodes: int
    slots: int
    """Workers on each."""


def components(nodes: Iterable[tuple[int, str | None]]) -> list[Component]:
    """The components of nodes, each with its workers and its generic resources."""
    return [Component(len(list(alike)), slots) for (slots, _), alike in groupby(nodes)]


def of_plan(plan: dict[str, Any]) -> list[Component]:
    """The components of a recorded plan."""
    return components((node.get("slots", 0), node.get("gres")) for node in plan.get("nodes", []))


def to_text(parts: Iterable[Component]) -> str:
    """Workers per node: `4x8,1x2` for four nodes with eight and one with two."""
    return ",".join(f"{part.nodes}x{part.slots}" for part in parts)


def from_text(text: str) -> list[Component]:
    """The components of such a text."""
    return [Component(*map(int, part.split("x"))) for part in text.split(",")]


def slots(parts: Iterable[Component]) -> list[int]:
    """The workers of each node."""
    return [part.slots for part in parts for _ in range(part.nodes)]


def first_ranks(nodes: Sequence[str], parts: Sequence[Component]) -> dict[str, int]:
    """Node -> rank of the first task of its component. Empty when the two do not match."""
    if len(nodes) != sum(part.nodes for part in parts):
        return {}
    ranks: dict[str, int] = {}
    begin = at = 0
    for part in parts:
        ranks.update(dict.fromkeys(nodes[at : at + part.nodes], begin))
        at += part.nodes
        begin += part.nodes * part.slots
    return ranks
