"""A divided model that computes something else is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import Worker
from dtctl.runtime.strategies.trial import measure, require_agreement


def test_a_model_is_measured_without_dropout_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3))
    inputs, before = torch.randn(5, 3), torch.get_rng_state()
    first = measure(lambda module: module(inputs).square().mean(), model)
    assert first == measure(lambda module: module(inputs).square().mean(), model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert int(model[1].num_batches_tracked) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("whole", "divided"), [(2.0, 2.0), (2.0, 2.0005), (1e-4, 2e-4), (1e6, 1.0001e6)])
def test_rounding_is_allowed(worker: Worker, whole: float, divided: float) -> None:
    require_agreement(whole, divided, worker, how="split")


@pytest.mark.parametrize(("whole", "divided"), [(2.0, 2.1), (2.0, math.nan), (math.nan, math.nan), (1e6, 1.01e6)])
def test_more_is_not(worker: Worker, whole: float, divided: float) -> None:
    with pytest.raises(PlanError, match="split, the model has the loss"):
        require_agreement(whole, divided, worker, how="split")
