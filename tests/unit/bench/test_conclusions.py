"""What a benchmark's figures mean."""

from __future__ import annotations

from dtctl.bench.conclusions import build_conclusions

OWNERS = ("a", "a", "b", "b", "c", "c")


def table(slow: dict[tuple[str, str], float]) -> dict[str, object]:
    rows = [
        [None if i == j else slow.get((one, other), 20.0 if one == other else 2.0) for j, other in enumerate(OWNERS)]
        for i, one in enumerate(OWNERS)
    ]
    return {"size": 1, "gb_s": rows}


def test_a_slow_node_is_named_and_its_own_workers_are_not_compared_with_others() -> None:
    ways = dict.fromkeys((("a", "b"), ("b", "a"), ("c", "b"), ("b", "c")), 0.2)
    (said,) = build_conclusions(table(ways), [], OWNERS)
    assert said["nodes"] == ["b"]
    assert "0.200 GB/s" in said["summary"]
    assert "dtctl doctor" in said["fix"]


def test_a_slow_pair_is_named_and_one_slow_worker_of_several_is_not() -> None:
    (said,) = build_conclusions(table({("a", "c"): 0.1}), [], OWNERS)
    assert said["nodes"] == ["c"]
    one = table({})
    one["gb_s"][0][4] = 0.1  # type: ignore[index]
    (said,) = build_conclusions(one, [], OWNERS)
    assert (said["nodes"], said["fix"]) == ([], "")
    assert "no pair of nodes stands out" in said["summary"]


def test_training_that_is_held_up_is_told_and_what_was_not_measured_is_not() -> None:
    assert build_conclusions({}, [], OWNERS) == []
    rows = [{"workers": 1, "efficiency": 1.0}, {"workers": 6, "efficiency": 0.4}]
    (said,) = build_conclusions({}, rows, OWNERS)
    assert "6 workers train at 40%" in said["summary"]
