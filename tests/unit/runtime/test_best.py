"""The best evaluation: found, remembered over a resume, its snapshot kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.best import BestScores
from dtctl.runtime.snapshot import commands
from dtctl.runtime.snapshot.format import layout
from dtctl.train.config import BestConfig
from tests.facts import raises
from tests.unit.runtime.conftest import Make, points


def scripted(values: list[float]) -> Callable[[nn.Module, Any], dict[str, torch.Tensor]]:
    left = iter(values)
    return lambda _, batch: {"loss": torch.full((len(batch[0]),), next(left))}


def test_low_or_high_is_best_and_nan_never() -> None:
    low, high = BestScores(BestConfig()), BestScores(BestConfig(metric="val_hits", mode="max"))
    assert [
        low.record_scores(step, {"val_loss": value}) for step, value in enumerate([math.nan, 3.0, 4.0, 2.0, 2.0])
    ] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert (low.step, low.value) == (3, 2.0)
    assert [high.record_scores(step, {"val_hits": value}) for step, value in enumerate([-1.0, -2.0, 0.0])] == [
        True,
        False,
        True,
    ]
    with raises(PlanError, "val_loss"):
        low.record_scores(9, {"val_hits": 1.0})


def test_its_snapshot_outlives_newer_ones_and_a_resume(make: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 8, "eval_every": 2, "best": {}, "micro_batch": 4}
    settings["snapshot"] = {"every_steps": 1, "keep": 2}
    parts = {"validation": points(3)}
    make(settings, **parts, score=scripted([3.0, 1.0, 2.0, 5.0])).run()
    assert [step for step, _ in layout.list_step_folders(tmp_path / "snapshots")] == [8, 7, 4]
    trainer = make({**settings, "steps": 14}, **parts, score=scripted([1.5, 0.5, 7.0]))
    trainer.run()
    assert trainer.training.snapshots.best is not None
    assert (trainer.training.snapshots.best.step, trainer.training.snapshots.best.value) == (12, 0.5)
    assert [step for step, _ in layout.list_step_folders(tmp_path / "snapshots")] == [14, 13, 12]


def test_several_of_the_best_are_kept_if_so_wanted(make: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_every": 1, "best": {"mode": "max"}, "snapshot": {"keep": 1, "keep_best": 3}}
    scores = [5.0, 1.0, 7.0, 2.0, 6.0]
    make({"steps": 5, **settings}, validation=points(3), score=scripted(scores)).run()
    assert [step for step, _ in layout.list_step_folders(tmp_path / "snapshots")] == [5, 3, 1]
    make({"steps": 7, **settings}, validation=points(3), score=scripted([5.5, 0.0])).run()
    assert [step for step, _ in layout.list_step_folders(tmp_path / "snapshots")] == [7, 6, 5, 3]
    assert commands.prune_snapshot_folder(tmp_path / "snapshots")["removed"] == []
    commands.prune_snapshot_folder(tmp_path / "snapshots", keep_best=False)
    assert [step for step, _ in layout.list_step_folders(tmp_path / "snapshots")] == [7]


def test_a_best_step_is_kept_although_no_snapshot_was_due(make: Make, tmp_path: Path) -> None:
    settings = {"steps": 9, "eval_every": 3, "best": {}, "snapshot": {"keep": 1}}
    make(settings, validation=points(3), score=scripted([3.0, 1.0, 2.0])).run()
    assert [step for step, _ in layout.list_step_folders(tmp_path / "snapshots")] == [9, 6]
