"""The moving average of weights: right, resumed exactly, used in evaluations and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import SnapshotError
from dtctl.runtime.ema import Ema
from dtctl.train.config import EmaConfig
from tests.facts import raises
from tests.unit.runtime.conftest import Make, points
from tests.unit.runtime.test_loop import Killed, dies_at


def test_the_average_is_the_average() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ema = Ema(model, EmaConfig(decay=0.5, every=2))
    expected = 0.0
    for step in range(1, 41):
        nn.init.constant_(model.weight, float(step))
        ema.update(step)
        if step % 2 == 0:
            decay = min(0.5, (1 + step / 2) / (10 + step / 2))
            expected = decay * expected + (1 - decay) * step
    assert float(ema.state()["weight"]) == pytest.approx(expected, rel=1e-5)
    with ema.using_averages():
        assert float(model.weight.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(model.weight.detach()) == 40.0


def test_other_parameters_are_refused() -> None:
    ema = Ema(nn.Linear(1, 1), EmaConfig())
    with raises(SnapshotError, "parameters"):
        ema.load({"other": torch.zeros(1)})


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(tensor.detach().square().sum() for tensor in tensors))


def value(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"norm": torch.full((len(batch[0]),), norm(model.parameters()))}


def test_evaluations_use_it_and_a_resume_has_it(make: Make, tmp_path: Path) -> None:
    ends, rows = [], []
    for folder in ("straight", "killed"):
        settings = {"lr": 0.05, "ema": {"decay": 0.9}, "eval_every": 4, "snapshot": {"dir": folder, "every_steps": 4}}
        if folder == "killed":
            with pytest.raises(Killed):
                make(settings, validation=points(3), score=value, loss=dies_at(10)).run()
        trainer = make(settings, validation=points(3), score=value)
        trainer.run()
        assert trainer.training.trained.ema is not None
        ends.append(trainer.training.trained.ema.state())
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        rows.append([row["val_norm"] for row in map(json.loads, lines) if "val_norm" in row])
        weights = norm(trainer.model.parameters())
        averages = norm(ends[-1].values())
        assert rows[-1][-1] == pytest.approx(averages, rel=1e-5)
        assert averages != pytest.approx(weights, rel=1e-5)
        (tmp_path / "metrics.jsonl").unlink()
    assert rows[0] == rows[1]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_it_may_begin_late(make: Make) -> None:
    make({"steps": 4}).run()
    trainer = make({"steps": 4, "ema": {}})
    trainer.run()
    assert trainer.training.trained.ema is not None
    weights = dict(trainer.model.named_parameters())
    assert all(torch.equal(average, weights[name]) for name, average in trainer.training.trained.ema.state().items())
