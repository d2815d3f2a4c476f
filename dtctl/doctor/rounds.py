"""Rounds of measurements: no node takes part twice in a round, or two would share its link. Pure."""

from __future__ import annotations

from collections.abc import Sequence

Way = tuple[str, str]
"""Caller and called."""


def all_pairs(names: Sequence[str]) -> list[list[Way]]:
    """Every unordered pair once, in N-1 rounds (N of an odd number of nodes): the circle method of tournaments."""
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(one, other) for one, other in pairs if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in rounds if pairs]


def disjoint(ways: Sequence[Way]) -> list[list[Way]]:
    """Return these ways in few rounds, each put into the first round that has room for it."""
    rounds: list[list[Way]] = []
    for way in ways:
        for pairs in rounds:
            if not any({*way} & {*other} for other in pairs):
                pairs.append(way)
                break
        else:
            rounds.append([way])
    return rounds
