"""Rounds of measurements, in each of which a node takes part only once, so that pairs do not share its link. Pure."""

from __future__ import annotations

from collections.abc import Sequence

Way = tuple[str, str]
"""Names of two nodes: the caller and the called node."""


def arrange_all_pairs(names: Sequence[str]) -> list[list[Way]]:
    """Return every unordered pair once, in N-1 rounds (N for odd N), by the circle method of tournaments."""
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(one, other) for one, other in pairs if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in rounds if pairs]


def build_disjoint_rounds(ways: Sequence[Way]) -> list[list[Way]]:
    """Return these pairs in few rounds; each pair is put into the first round that has room for it."""
    rounds: list[list[Way]] = []
    for way in ways:
        for pairs in rounds:
            if not any({*way} & {*other} for other in pairs):
                pairs.append(way)
                break
        else:
            rounds.append([way])
    return rounds
