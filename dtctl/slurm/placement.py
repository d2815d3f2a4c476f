"""Which workers are on which node of a job: as text for the programs inside it, and by component. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def to_text(slots: Sequence[int]) -> str:
    """Workers per node, in the order of the nodes: `4x8,1x2` for four nodes with eight and one with two."""
    return ",".join(f"{len(list(nodes))}x{count}" for count, nodes in groupby(slots))


def from_text(text: str) -> list[int]:
    """The workers of each node."""
    slots: list[int] = []
    for part in text.split(","):
        nodes, _, count = part.partition("x")
        slots += [int(count)] * int(nodes)
    return slots


def first_ranks(nodes: Sequence[str], slots: Sequence[int]) -> dict[str, int]:
    """Node -> rank of the first task of its component: srun numbers the tasks of each component from 0.

    Nodes with equal numbers of workers are one component. Empty when the two do not match.
    """
    ranks: dict[str, int] = {}
    if len(nodes) != len(slots):
        return ranks
    rank = begin = 0
    for index, (node, count) in enumerate(zip(nodes, slots, strict=True)):
        if index and count != slots[index - 1]:
            begin = rank
        ranks[node] = begin
        rank += count
    return ranks
