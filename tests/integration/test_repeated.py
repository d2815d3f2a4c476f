"""With every strategy a resume repeats the steps after its snapshot, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.integration.equality_worker import Case, written
from tests.verdicts import read_verdict

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WORKER = Path(__file__).with_name("repeated_worker.py")
MIDDLE: dict[str, Any] = {"snapshot": {"every_steps": 1, "keep": 9}, "epochs": None, "steps": 3, "global_batch": 16}
CASES: dict[int, list[tuple[Any, dict[str, Any]]]] = {
    2: [
        ("ddp", {}),
        ("ddp", {"ddp": {"comm_hook": "powersgd"}}),
        ("ddp", {"precision": "fp16"}),
        ("ddp", {"ema": {"decay": 0.6}, "data": {"tokens": True}}),
        ("zero1", {}),
        ("fsdp", {}),
        ("fsdp", {"snapshot": {**MIDDLE["snapshot"], "layout": "whole"}}),
        ("ddp", {"snapshot": {**MIDDLE["snapshot"], "layout": "sharded"}}),
        ("tp", {}),
        ({"cp": 2}, {}),
        ("pipeline", {}),
        ("pipeline", {"pipeline": {"schedule": "zbv"}}),
        ({"ep": 2}, {"data": {"mixture": "own"}}),
        ("auto", {"exact": "elastic", "micro_batch": 4, "accumulate": None}),
    ],
    4: [
        ({"dp": 2, "fsdp": 2}, {}),
        ({"fsdp": 2, "tp": 2}, {}),
        ({"fsdp": 2, "pp": 2}, {}),
        ({"dp": 2, "cp": 2}, {}),
        ({"fsdp": 2, "ep": 2}, {"data": {"mixture": "own"}}),
    ],
}


def make_case(strategy: Any, settings: dict[str, Any]) -> Case:
    layers = 4 if "pp" in strategy or strategy == "pipeline" else 2
    return Case(optimizer="adamw", settings={"strategy": strategy, **MIDDLE, **settings}, layers=layers)


@pytest.mark.parametrize("workers", CASES)
def test_a_resume_repeats_the_steps_after_its_snapshot(tmp_path: Path, workers: int) -> None:
    cases = [make_case(strategy, settings) for strategy, settings in CASES[workers]]
    # A name of a folder is as long as the settings.
    assert len({case.key() for case in cases}) == len(cases)
    written(cases, tmp_path / "cases.json")
    ended = forked.launch([str(WORKER), str(tmp_path / "cases.json"), str(tmp_path / "run")], workers, cwd=tmp_path)
    assert ended.code == 0, ended.output[-6000:]
    parts = ended.output.split("\ncase ")[1:]
    verdicts = {case.key(): read_verdict(part) for case, part in zip(cases, parts, strict=True)}
    assert set(verdicts.values()) == {"exact"}, verdicts
    assert all("exact: steps 2 to 3 repeated" in part for part in parts)
