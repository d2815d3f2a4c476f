"""What nodes have together of a snapshot: whole, corrupt or incomplete, with the node that is to blame."""

from __future__ import annotations

from typing import Any

from dtctl.launch.gathering import removable, spread

FILES = ["model.00000.safetensors", "model.00001.safetensors"]


def row(step: int, good: list[str], *, record: str | None = "r", bad: list[str] | None = None) -> dict[str, Any]:
    files = FILES if record else []
    return {
        "path": f"/s/step-{step:08d}",
        "step": step,
        "made_s": step * 60.0,
        "record": record,
        "files": files,
        "good": good,
        "bad": bad or [],
    }


def told(**rows: list[dict[str, Any]]) -> list[tuple[int, str, list[str], str]]:
    found = [one.row() for one in spread({node: {"rows": several} for node, several in rows.items()})]
    return [(one["step"], one["status"], one["bad"], one["node"]) for one in found]


def test_halves_are_a_whole() -> None:
    both = {"a": [row(2, FILES[:1]), row(1, FILES[:1])], "b": [row(2, FILES[1:]), row(1, FILES[1:])]}
    assert told(**both) == [(2, "ok", [], "a, b"), (1, "ok", [], "a, b")]
    (newest, _) = spread({node: {"rows": rows} for node, rows in both.items()})
    assert (newest.complete, newest.holders) == ([], {FILES[0]: "a", FILES[1]: "b"})


def test_what_lacks_is_missing_and_what_is_bad_is_named_with_its_node() -> None:
    assert told(a=[row(2, FILES[:1])]) == [(2, "incomplete", [f"{FILES[1]} is missing"], "a")]
    bad = f"{FILES[1]} has 3 bytes and should have 4"
    assert told(a=[row(2, FILES[:1])], b=[row(2, [], bad=[bad])]) == [(2, "corrupt", [f"b: {bad}"], "a, b")]


def test_a_bad_copy_does_not_spoil_a_snapshot_and_is_named() -> None:
    bad = f"{FILES[1]} does not have the digest that was recorded"
    assert told(a=[row(2, FILES[:1], bad=[bad])], b=[row(2, FILES)]) == [(2, "ok", [f"a: {bad}"], "a, b")]


def test_snapshots_of_one_step_with_other_records_are_two() -> None:
    found = told(a=[row(2, FILES[:1], record="r")], b=[row(2, FILES[1:], record="q")])
    assert [status for _, status, _, _ in found] == ["incomplete", "incomplete"]
    without = told(a=[row(2, [], record=None, bad=["COMMIT is missing"])])
    assert without == [(2, "incomplete", ["a: COMMIT is missing"], "a")]


def test_what_is_not_kept_goes_and_what_may_be_on_its_way_does_not() -> None:
    def gone(stays: set[int], *, all_told: bool = True, **rows: list[dict[str, Any]]) -> list[int]:
        found = spread({node: {"rows": several} for node, several in rows.items()})
        return [one.step for one in removable(found, stays, all_told=all_told)]

    halves = {"a": [row(step, FILES[:1]) for step in (4, 3, 2)], "b": [row(step, FILES[1:]) for step in (3, 2)]}
    assert gone({3}, **halves) == [2], "that of step 4 lacks a file, and is newer than all that are whole"
    assert gone({4}, a=halves["a"]) == [], "nothing vouches for anything"
    bad = f"{FILES[0]} has 3 bytes and should have 4"
    corrupt = {"a": [row(4, [], bad=[bad]), *halves["a"][1:]], "b": [row(4, FILES[1:]), *halves["b"]]}
    assert gone({3, 2}, **corrupt) == [4]
    assert gone({3, 2}, all_told=False, **corrupt) == [], "the good copy may lie where nobody has answered"
    old = {"a": [*halves["a"][1:], row(1, FILES[:1])], "b": halves["b"]}
    assert gone({3, 2}, **old) == [1]
    assert gone({3, 2}, all_told=False, **old) == []
    assert gone({3}, all_told=False, **old) == [2]
