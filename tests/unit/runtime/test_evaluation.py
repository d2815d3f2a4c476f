"""Evaluation: means over samples, not over batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import TensorData, Worker, evaluate
from tests.facts import raises


class Recording(nn.Module):
    """Notes in which mode it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        return inputs


def score(model: nn.Module, batch: tuple[torch.Tensor]) -> dict[str, torch.Tensor]:
    found = model(batch[0])
    return {"value": found, "large": found > 4}


@pytest.mark.parametrize("batch", [1, 3, 4, 100])
def test_every_sample_counts_once(worker: Worker, batch: int) -> None:
    model = Recording()
    means = evaluate(model, TensorData(torch.arange(7.0)), score, worker, batch=batch)
    assert means == {"large": pytest.approx(2 / 7), "value": 3.0}
    assert not any(model.modes)
    assert model.training


def test_the_share_of_each_rank_adds_up(worker: Worker) -> None:
    class Part(Worker):
        """A worker of three whose sums are its own."""

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            return values

    fields: dict[str, Any] = {name: getattr(worker, name) for name in Worker.__dataclass_fields__}
    parts = [
        evaluate(
            Recording(), TensorData(torch.arange(2.0)), score, Part(**fields | {"rank": rank, "world_size": 3}), batch=2
        )
        for rank in range(3)
    ]
    assert [part["value"] for part in parts] == [0.0, 0.5, 0.0]


def test_nothing_to_evaluate_on(worker: Worker) -> None:
    with raises(PlanError, "samples"):
        evaluate(Recording(), TensorData(torch.zeros(0)), score, worker, batch=2)
