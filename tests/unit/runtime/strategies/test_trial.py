"""A divided model that computes something else is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import Worker
from dtctl.runtime.strategies.blocks import RepeatedBlocks
from dtctl.runtime.strategies.comparison import set_evaluation_mode
from dtctl.runtime.strategies.trial import (
    ROUNDING,
    ROUNDING_OF_HALVES,
    Probe,
    measure_loss,
    measure_whole_model,
    require_agreement,
    require_results_alone,
)
from tests.facts import raises


def test_a_model_is_measured_without_dropout_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3))
    inputs, before = torch.randn(5, 3), torch.get_rng_state()
    first = measure_loss(lambda module: module(inputs).square().mean(), model)
    assert first == measure_loss(lambda module: module(inputs).square().mean(), model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert int(model[1].num_batches_tracked) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("whole", "divided"), [(2.0, 2.0), (2.0, 2.0005), (1e-4, 2e-4), (1e6, 1.0001e6)])
def test_rounding_is_allowed(worker: Worker, whole: float, divided: float) -> None:
    require_agreement(whole, divided, worker, how="split")


@pytest.mark.parametrize(("whole", "divided"), [(2.0, 2.1), (2.0, math.nan), (math.nan, math.nan), (1e6, 1.01e6)])
def test_more_is_not(worker: Worker, whole: float, divided: float) -> None:
    with raises(PlanError, "model loss"):
        require_agreement(whole, divided, worker, how="split")


def test_a_gradient_that_differs_outside_of_blocks_is_named(worker: Worker) -> None:
    whole = {"embedding": torch.ones(3), "norm": torch.full((3,), 1e-9)}
    require_agreement(2.0, 2.0, worker, how="split", gradients=(whole, {**whole, "norm": torch.zeros(3)}))
    for wrong in ({"norm": whole["norm"]}, {**whole, "embedding": torch.full((3,), math.nan)}):
        with raises(PlanError, "gradient embedding"):
            require_agreement(2.0, 2.0, worker, how="split", gradients=(whole, wrong))


class Blocky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def penalized(of: str) -> Probe:
    """A loss with a penalty that is far below what rounding explains."""

    def probe(model: nn.Module) -> torch.Tensor:
        read = [value for name, value in model.named_parameters() if name.startswith(of)]
        return model(torch.ones(2, 3)).square().mean() + 1e-9 * sum(value.square().sum() for value in read)

    return probe


@pytest.mark.parametrize("training", [True, False])
def test_a_loss_that_reads_the_weights_of_blocks_is_no_loss_for_a_pipeline(training: bool) -> None:
    model = Blocky().train(training)
    found = RepeatedBlocks(name="blocks", container=model.blocks)
    before = dict(vars(model))
    for of in ("first", "none"):  # what is on all stages has its gradients added up
        require_results_alone(penalized(of), model, found)
    with raises(PlanError, "blocks.1.weight"):
        require_results_alone(penalized("blocks.1"), model, found)
    with raises(PlanError, "blocks.0.weight"):
        require_results_alone(lambda model: model.blocks[0](torch.ones(1, 3)).sum(), model, found)
    assert vars(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_recurrent_layer_stays_in_training_mode_without_its_dropout() -> None:
    model = nn.ModuleDict({"layer": nn.LSTM(3, 3, num_layers=2, dropout=0.5), "drop": nn.Dropout()}).train()
    layer, inputs = model["layer"], torch.randn(4, 3)
    with set_evaluation_mode(model):
        assert (layer.training, model["drop"].training) == (True, False)
        assert torch.equal(layer(inputs)[0], layer(inputs)[0])
    assert (layer.dropout, model["drop"].training) == (0.5, True)


def halves_only(model: nn.Module) -> torch.Tensor:
    """A loss by a kernel that takes bf16 alone, as those of flash-attn."""
    found: torch.Tensor = model(torch.ones(2, 3))
    if found.dtype != torch.bfloat16:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return found.float().square().mean()


def test_kernels_that_take_halves_alone_are_tried_in_the_format_of_the_training(worker: Worker) -> None:
    model, bf16 = nn.Linear(3, 3), torch.autocast("cpu", dtype=torch.bfloat16)
    expected, probe, rounding = measure_whole_model(halves_only, model, bf16)
    assert rounding == ROUNDING_OF_HALVES
    assert measure_loss(probe, model) == expected
    require_agreement(expected, expected * 1.01, worker, how="split", rounding=rounding)
    with pytest.raises(PlanError):
        require_agreement(1.0, 1.1, worker, how="split", rounding=rounding)
    with pytest.raises(RuntimeError, match="FlashAttention"):
        measure_whole_model(halves_only, model, None)


def test_others_are_tried_in_fp32_which_tells_more(worker: Worker) -> None:
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
    seen: list[torch.dtype] = []

    def loss(model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(torch.ones(2, 3))
        seen.append(found.dtype)
        return found.float().mean()

    assert measure_whole_model(loss, nn.Linear(3, 3), bf16)[2] == ROUNDING
    assert seen == [torch.float32]


def test_memory_that_runs_out_is_no_question_of_the_format() -> None:
    calls = []

    def short(model: nn.Module) -> torch.Tensor:
        calls.append(model)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        measure_whole_model(short, nn.Linear(3, 3), torch.autocast("cpu", dtype=torch.bfloat16))
    assert len(calls) == 1
