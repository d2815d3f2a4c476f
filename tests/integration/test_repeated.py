"""With every strategy a resume repeats the steps after its snapshot, and says so; changed, it says what differs."""

from __future__ import annotations

import json
import os
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


FEATURES: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "compile": {"compile": "eager"},
    "ema": {"ema": {"decay": 0.6}},
    "accumulate": {"accumulate": 4, "micro_batch": None},
}
REFUSED = [("cp", "fp16"), ("cp", "compile")]
"""What a plan does not allow."""
CHANGES: dict[str, dict[str, Any]] = {"update": {"lr": 0.01}, "loss": {"data": {"brief": True}}}
"""What differs first, and what is changed for it: the rate; the number of samples, and with it their order."""


def make_case(strategy: Any, settings: dict[str, Any]) -> Case:
    layers = 4 if "pp" in strategy or strategy == "pipeline" else 2
    return Case(optimizer="adamw", settings={"strategy": strategy, **MIDDLE, **settings}, layers=layers)


def list_cases(workers: int, name: str) -> list[Case]:
    """Each strategy with a feature, where its plan allows it."""
    if not name:
        return [make_case(strategy, settings) for strategy, settings in CASES[workers]]
    plain = [(strategy, settings) for strategy, settings in CASES[workers] if not set(settings) - {"data", "exact"}]
    plain += [(strategy, settings) for strategy, settings in CASES[workers] if "exact" in settings]
    return [
        make_case(strategy, {**settings, **FEATURES[name]})
        for strategy, settings in plain
        if not any(word in strategy and name == refused for word, refused in REFUSED)
        and not ("exact" in settings and name == "accumulate")
    ]


def repeat_steps(tmp_path: Path, workers: int, cases: list[Case]) -> list[list[str]]:
    """Train cases, and resume each as it was and with each of the changes; return what each attempt printed."""
    # A name of a folder is as long as the settings.
    assert len({case.key() for case in cases}) == len(cases)
    written(cases, tmp_path / "cases.json")
    (tmp_path / "changes.json").write_text(json.dumps(list(CHANGES.values())))
    argv = [str(WORKER), *(str(tmp_path / name) for name in ("cases.json", "changes.json", "run"))]
    ended = forked.launch(argv, workers, cwd=tmp_path)
    assert ended.code == 0, ended.output[-6000:]
    parts = [part.split("\nchange ") for part in ended.output.split("\ncase ")[1:]]
    assert len(parts) == len(cases)
    return parts


@pytest.mark.parametrize("feature", ["", *(FEATURES if os.environ.get("DTCTL_SOAK") else ())])
@pytest.mark.parametrize("workers", CASES)
def test_the_verdict_on_a_resume_is_true(tmp_path: Path, workers: int, feature: str) -> None:
    """With features in `make soak` alone: each takes minutes."""
    cases = list_cases(workers, feature)
    for case, (same, *changed) in zip(cases, repeat_steps(tmp_path, workers, cases), strict=True):
        assert read_verdict(same) == "exact", (case.key(), same)
        assert "exact: steps 2 to 3 repeated" in same, (case.key(), same)
        assert len(changed) == len(CHANGES)
        for differs, printed in zip(CHANGES, changed, strict=True):
            # Of a training by shards, workers have other samples each time, and losses show nothing.
            kind = "gradient" if differs == "loss" and case.settings.get("exact") else differs
            assert f"not exact: the {kind} of step 2 differs" in printed, (case.key(), printed)
