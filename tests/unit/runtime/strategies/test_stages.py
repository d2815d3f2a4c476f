"""Models are cut between their blocks with their code as it is, into stages of even cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.strategies import blocks, pipeline, stages
from dtctl.train.config import PipelineConfig
from tests.facts import raises


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, stream: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return stream + torch.tanh(self.linear(stream)) * mask


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(5))})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stream, mask = self.first(inputs), inputs.sum(1, keepdim=True) > 0
        for block in self.body["layers"]:
            stream = block(stream, mask=mask)
        return self.last(stream)


def found(model: nn.Module) -> blocks.RepeatedBlocks:
    there = blocks.find_repeated_blocks(model)
    assert there is not None
    return there


def through(model: nn.Module, sizes: list[int], inputs: torch.Tensor, samples: int | None = None) -> torch.Tensor:
    """One stage after the other, as the workers of a pipeline do it."""
    ends = list(itertools.accumulate(sizes))
    stream = None
    for size, end in zip(sizes, ends, strict=True):
        cut = stages.StageModel(model, found(model), end - size, end)
        cut.entrance.source = lambda _, before=stream: before  # type: ignore[misc]
        try:
            return stages.StageCaller(cut, samples)(inputs)  # type: ignore[no-any-return]
        except stages.StageEndReached as reached:
            stream = reached.stream
            assert end < len(found(model))
    raise AssertionError("the last stage was left early")


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 3], [1, 1, 1, 1, 1]])
def test_stages_after_each_other_are_the_model(sizes: list[int]) -> None:
    model, inputs = Model(), torch.randn(6, 3)
    assert torch.equal(through(model, sizes, inputs), model(inputs))
    assert list(model.body["layers"]) == found(model).modules, "the list of blocks is back in its place"


def test_a_model_that_is_a_list_is_cut_too() -> None:
    model, inputs = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), torch.randn(6, 3)
    assert torch.equal(through(model, [1, 2], inputs), model(inputs))


def test_short_inputs_are_filled_up_on_the_way_and_cut_down_again() -> None:
    model, inputs = Model(), torch.randn(2, 3)
    assert torch.allclose(through(model, [2, 3], inputs, samples=6), model(inputs), rtol=1e-6)


def test_what_is_taken_from_a_block_elsewhere_shows() -> None:
    class Skipping(Model):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            stream, mask, seen = self.first(inputs), inputs.sum(1, keepdim=True) > 0, []
            for block in self.body["layers"]:
                stream = block(stream, mask)
                seen.append(stream)
            return self.last(stream + seen[0])

    model, inputs = Skipping(), torch.randn(6, 3)
    assert through(model, [2, 3], inputs).isnan().all()


def test_attributes_of_the_model_are_there_for_the_loss_function() -> None:
    model = Model()
    model.alpha = 3  # type: ignore[assignment]
    caller = stages.StageCaller(stages.StageModel(model, found(model), 0, 5))
    assert caller.alpha == 3
    with pytest.raises(AttributeError):
        _ = caller.beta


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(0, 40), st.integers(1, 4))
def test_no_split_has_a_lighter_heaviest_stage(costs: list[int], after: int, count: int) -> None:
    if len(costs) < count:
        with raises(PlanError, "too few"):
            stages.balance_stage_sizes(costs, after, count)
        return

    def heaviest(sizes: tuple[int, ...]) -> int:
        ends = list(itertools.accumulate(sizes))
        loads = [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        loads[-1] += after
        return max(loads)

    sizes = tuple(stages.balance_stage_sizes(costs, after, count))
    every = [parts for parts in itertools.product(range(1, len(costs) + 1), repeat=count) if sum(parts) == len(costs)]
    assert sizes in every
    assert heaviest(sizes) == min(map(heaviest, every))


def test_a_heavy_head_gets_fewer_blocks() -> None:
    assert stages.balance_stage_sizes([10] * 8, 20, 2) == [5, 3]
    assert stages.balance_stage_sizes([10] * 8, 0, 4) == [2, 2, 2, 2]


def test_costs_are_those_of_a_forward_pass() -> None:
    model, inputs = Model(), torch.randn(6, 3)
    each, after = stages.count_block_flops(found(model), lambda: model(inputs))
    assert each == [2 * 6 * 4 * 4] * 5
    assert after == 2 * 6 * (3 * 4 + 4 * 2)


@pytest.mark.parametrize(("split", "message"), [((2, 2), "5"), ((5, 0), "put"), ((5,), "2")])
def test_a_split_must_fit(split: tuple[int, ...], message: str) -> None:
    with raises(PlanError, message) as caught:
        pipeline.choose_stage_sizes(PipelineConfig(split=split), 2, [1] * 5, 0)
    assert "[" in (caught.value.hint or "")


def test_parameters_outside_of_one_stage_are_shared() -> None:
    model = Model()
    model.body["layers"][4].linear = model.body["layers"][0].linear  # type: ignore[index,union-attr]
    shared = pipeline.list_cross_stage_parameters(model, found(model), [2, 3])
    assert {id(p) for p in shared} == {
        id(p)
        for module in (model.first, model.last, model.body["layers"][0].linear)
        for p in module.parameters()  # type: ignore[index,union-attr]
    }
