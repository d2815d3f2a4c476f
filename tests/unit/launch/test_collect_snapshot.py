"""What nodes have together of a snapshot: whole, corrupt or incomplete, with the node that is to blame."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from dtctl.launch.collect_snapshot import PruneRule, list_removable_snapshots, merge_node_snapshots
from dtctl.launch.snapshot_answers import SnapshotParts

FILES = ["model.00000.safetensors", "model.00001.safetensors"]


def written(step: int, salt: str = "r", **facts: Any) -> tuple[str, str]:
    """Manifest and commit record of a snapshot."""
    files = {name: {"size_bytes": 1, "digest": "0"} for name in FILES}
    told = {"salt": salt, **facts}
    manifest = json.dumps({"format": 2, "step": step, "hash": "sha256", "facts": told, "files": files})
    return manifest, f"sha256 {hashlib.sha256(manifest.encode()).hexdigest()} manifest.json\n"


def row(step: int, good: list[str], *, record: str | None = "r", bad: list[str] | None = None) -> dict[str, Any]:
    manifest, commit = written(step, record) if record else (None, None)
    return {
        "path": f"/s/step-{step:08d}",
        "step": step,
        "made_s": step * 60.0,
        "record": commit,
        "manifest": manifest,
        "good": good,
        "bad": bad or [],
    }


def parts(rows: list[dict[str, Any]]) -> SnapshotParts:
    return SnapshotParts.parse({"rows": rows})


def told(**rows: list[dict[str, Any]]) -> list[tuple[int, str, list[str], str]]:
    found = [one.to_row() for one in merge_node_snapshots({node: parts(several) for node, several in rows.items()})]
    return [(one["step"], one["status"], one["bad"], one["node"]) for one in found]


def test_halves_are_a_whole() -> None:
    both = {"a": [row(2, FILES[:1]), row(1, FILES[:1])], "b": [row(2, FILES[1:]), row(1, FILES[1:])]}
    assert told(**both) == [(2, "ok", [], "a, b"), (1, "ok", [], "a, b")]
    (newest, _) = merge_node_snapshots({node: parts(rows) for node, rows in both.items()})
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


def gone(keep: int, node: str = "a", *, all_told: bool = True, **rows: list[dict[str, Any]]) -> list[int]:
    found = merge_node_snapshots({name: parts(several) for name, several in rows.items()})
    return [one.step for one in list_removable_snapshots(found, PruneRule(keep=keep), node, all_answered=all_told)]


def test_what_is_not_kept_goes_and_what_may_be_on_its_way_does_not() -> None:
    halves = {"a": [row(step, FILES[:1]) for step in (4, 3, 2)], "b": [row(step, FILES[1:]) for step in (3, 2)]}
    assert gone(1, **halves) == [2], "that of step 4 lacks a file, and is newer than all that are whole"
    assert gone(1, a=halves["a"]) == [], "nothing vouches for anything"
    bad = f"{FILES[0]} has 3 bytes and should have 4"
    corrupt = {"a": [row(4, [], bad=[bad]), *halves["a"][1:]], "b": [row(4, FILES[1:]), *halves["b"]]}
    assert gone(2, **corrupt) == [4]
    assert gone(2, all_told=False, **corrupt) == [], "the good copy may lie where nobody has answered"
    old = {"a": [*halves["a"][1:], row(1, FILES[:1])], "b": halves["b"]}
    assert gone(2, **old) == [1]
    assert gone(2, all_told=False, **old) == []
    assert gone(1, all_told=False, **old) == [2]


WHOLE = {"a": [row(step, FILES) for step in (3, 2, 1)]}
LIES = {
    "a newest one of its own": [row(10**9, FILES, record="mine")],
    "one that lacks files, of the same steps": [row(step, [], record="mine") for step in (3, 2, 1)],
    "that it has the others' ones": [row(step, FILES) for step in (9, 3, 2, 1)],
    "that the others' ones are bad": [row(step, [], bad=["everything"]) for step in (3, 2, 1)],
    "another manifest for the same record": [{**row(step, FILES), "manifest": "{}"} for step in (3, 2, 1)],
    "files that nobody has asked for": [{**row(3, FILES), "good": ["x", *FILES]}],
    "nothing": [],
}


@pytest.mark.parametrize("lie", LIES)
def test_what_one_node_says_removes_nothing_that_others_can_read_without_it(lie: str) -> None:
    assert gone(1, "a", b=LIES[lie], **WHOLE) == [2, 1]
    assert gone(2, "a", b=LIES[lie], **WHOLE) == [1]
    assert gone(9, "a", b=LIES[lie], **WHOLE) == []


def test_the_newest_that_a_node_can_read_alone_stays_whatever_others_say_they_have() -> None:
    rows = {"a": [row(3, FILES[:1]), row(2, FILES), row(1, FILES)], "b": [row(3, FILES[1:])]}
    assert gone(1, "a", **rows) == [], "that of step 3 needs b; nothing that stays can be read without it"
    assert gone(2, "a", **rows) == [1]


@pytest.mark.parametrize("keep", [0, -1, -100, True, None, "1", 2.5, [], 1e308])
def test_a_manifest_cannot_ask_for_the_last_one_to_go(keep: Any) -> None:
    rows = []
    for step in (2, 1):
        manifest, record = written(step, retention={"keep": keep, "every_s": "x", "best": {"1": 1}})
        rows.append({**row(step, FILES), "manifest": manifest, "record": record})
    found = merge_node_snapshots({"a": parts(rows)})
    assert 2 not in [one.step for one in list_removable_snapshots(found, PruneRule(), "a", all_answered=True)]
