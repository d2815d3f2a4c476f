"""Who keeps whose copies: as many for everyone, and in another rack where racks are known."""

from __future__ import annotations

from collections import Counter

import pytest

from dtctl.runtime.snapshot.storage import copies
from dtctl.runtime.snapshot.storage.stores import SnapshotStores


def keepers(racks: str, replicas: int) -> dict[int, list[int]]:
    """Node -> those that keep a copy of its file; two workers a node, a letter for each node's rack."""
    ranks = tuple((2 * node, 2 * node + 1) for node in range(len(racks)))
    stores = SnapshotStores(
        ranks=ranks, racks=tuple(racks.replace("-", "")) or ("",) * len(racks), own=0, token="", hash=""
    )
    found: dict[int, list[int]] = {node: [] for node in range(len(racks))}
    for copy in copies.plan_replica_copies(stores, [[f"file-{rank}"] for rank in range(2 * len(racks))], replicas):
        assert copy.name == f"file-{copy.source}"
        if copy.source % 2 == 0:
            found[copy.source // 2].append(copy.taker // 2)
    return found


def test_without_racks_the_next_one_keeps_a_copy() -> None:
    assert keepers("---", 1) == {0: [1], 1: [2], 2: [0]}
    assert keepers("---", 2) == {0: [1, 2], 1: [2, 0], 2: [0, 1]}
    assert keepers("--", 5) == {0: [1], 1: [0]}
    assert keepers("-", 1) == {0: []}


@pytest.mark.parametrize("racks", ["AB", "AABB", "ABAB", "ABCABC", "AAABBC", "ABBA", "AABBCCDD"])
def test_a_copy_is_in_another_rack_and_everybody_keeps_one(racks: str) -> None:
    found = keepers(racks, 1)
    assert all(racks[node] != racks[keeper] for node, (keeper,) in found.items())
    assert Counter(keeper for (keeper,) in found.values()) == Counter(range(len(racks)))


@pytest.mark.parametrize("racks", ["AAB", "AAAB", "AA"])
def test_where_one_rack_has_most_nodes_everybody_keeps_one_all_the_same(racks: str) -> None:
    found = keepers(racks, 1)
    assert Counter(keeper for (keeper,) in found.values()) == Counter(range(len(racks)))
    assert all(node != keeper for node, (keeper,) in found.items())
