"""Files of a run that a job, a full disk or a person has written: what cannot be believed is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtctl.launch.records.record import list_run_records
from dtctl.launch.records.state import read_run_state
from tests.unit.report.runs import make_run


@pytest.mark.parametrize(
    "event",
    [
        {"event": "start", "time": "z"},
        {"event": "start", "time": None, "attempt": 1},
        {"event": "plan", "nodes": None},
        {"event": "plan", "nodes": [1]},
        {"event": "allocated", "nodes": "ab"},
        {"event": "node", "node": 3, "state": "running"},
        {"event": "node", "node": "a"},
        {"event": "restart", "attempt": "x"},
        {"event": ["done"]},
        {"time": 1.0},
        [],
    ],
)
def test_a_damaged_event_is_left_out(tmp_path: Path, event: Any) -> None:
    record = make_run(tmp_path)
    before = list(record.events())
    with (record.folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n" + "[" * 100_000 + "\n")
    assert list(record.events()) == before
    assert read_run_state(record).status == "succeeded"


@pytest.mark.parametrize(
    "plan",
    [
        "[]",
        '{"nodes": 3}',
        '{"nodes": [{"name": 1}]}',
        '{"nodes": [{"name": "a", "env": [{"name": "X"}]}]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_plan_is_none(tmp_path: Path, plan: str) -> None:
    record = make_run(tmp_path)
    (record.folder / "plan.json").write_text(plan)
    assert record.plan() == {}


@pytest.mark.parametrize("ledger", ['{"phases_s": 3}', '{"phases_s": {"useful": "x"}}', '{"wall_s": []}', "3"])
def test_a_damaged_ledger_is_none(tmp_path: Path, ledger: str) -> None:
    record = make_run(tmp_path)
    (record.folder / "ledger.json").write_text(ledger)
    assert read_run_state(record).ledger is None


@pytest.mark.parametrize("damage", [{"started": "x"}, {"started": 10**400}, {"spec": 3}, {"pid": None}])
def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path, damage: dict[str, Any]) -> None:
    good, bad = make_run(tmp_path, "good"), make_run(tmp_path, "bad")
    path = bad.folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    assert [record.run for record in list_run_records(tmp_path)] == [good.run]
