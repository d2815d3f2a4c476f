"""Copies of modules with random weights, by which divided modules are compared, and what they leave untouched."""

from __future__ import annotations

import copy as copies
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.strategies.blocks import RepeatedBlocks
from dtctl.runtime.strategies.comparison import (
    ModuleCall,
    ModuleComparison,
    compute_outputs_and_gradients,
    copy_with_random_weights,
    describe_module_kind,
    record_module_calls,
)
from dtctl.runtime.strategies.tensor import (
    TensorParallelPlan,
    _list_style_attempts,
    list_split_modules,
    parse_fused_proportions,
    require_divisible_modules,
)
from dtctl.runtime.strategies.trial import BlockInputRecorder, measure_loss
from tests.facts import raises


class Branch(nn.Module):
    """A residual branch that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.same = self.up
        nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += torch.rand(())  # in place, and drawn
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return self.down(gate * value)


def test_a_copy_has_other_weights_and_shares_nothing() -> None:
    module = Branch().train()
    module.up.register_forward_hook(lambda *_: None)
    before, drawn = copies.deepcopy(module.state_dict()), torch.get_rng_state()
    twin = copy_with_random_weights(module, torch.float64)
    answer = compute_outputs_and_gradients(twin, ModuleCall((torch.ones(3, 4),), {}), torch.float64, nullcontext())
    assert answer.outputs[0].dtype == torch.float64
    assert all(value is not None for value in [*answer.of_inputs, *answer.of_parameters.values()])
    assert float(twin.get_parameter("down.weight").detach().abs().min()) > 0
    assert twin.get_submodule("same") is twin.get_submodule("up")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert module.training
    twin.get_submodule("up").register_forward_hook(lambda *_: None)
    assert len(module.up._forward_hooks) == 1


def test_a_copy_computes_the_same_each_time() -> None:
    module, call = Branch(), ModuleCall((torch.ones(3, 4),), {})
    one, other = (
        compute_outputs_and_gradients(copy_with_random_weights(module, None), call, None, nullcontext())
        for _ in range(2)
    )
    assert torch.equal(one.outputs[0], other.outputs[0])
    for name, value in one.of_parameters.items():
        assert value is not None
        assert torch.equal(value, other.of_parameters[name])  # type: ignore[arg-type]


class Halves(nn.Linear):
    """Takes the format of its own parameters only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype == torch.float64 or (torch.is_autocast_enabled("cpu") is False and self.out_features == 2):
            raise RuntimeError("only support fp16 and bf16 data type")
        return super().forward(x)


@pytest.mark.parametrize(("outputs", "dtype"), [(3, torch.float32), (2, torch.bfloat16)])
def test_what_takes_no_fp64_is_computed_in_its_own_format(outputs: int, dtype: torch.dtype) -> None:
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
    found = ModuleComparison(Halves(4, outputs), ModuleCall((torch.ones(2, 4),), {}), bf16)
    assert found.whole.outputs[0].dtype == dtype
    with pytest.raises(RuntimeError, match="only support"):
        ModuleComparison(Halves(4, 2), ModuleCall((torch.ones(2, 4),), {}), None)


def test_the_first_call_is_recorded_as_it_was() -> None:
    model = nn.Sequential(Branch(), nn.Linear(4, 2))
    inputs = torch.ones(3, 4)
    with record_module_calls(model, ["", "0", "1"]) as calls:
        model(inputs.clone())
        model(torch.zeros(3, 4))
    assert torch.equal(calls["0"].args[0], inputs)
    assert torch.equal(calls[""].args[0], inputs)
    assert not model[0]._forward_pre_hooks


class Fused(nn.Module):
    """Queries, keys and values of one matrix, either one behind the other or head by head; and a gated pair."""

    def __init__(self, *, heads_first: bool) -> None:
        super().__init__()
        self.qkv, self.o, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(16, 8)
        self.shape = (4, 3, 2) if heads_first else (3, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), *self.shape).unbind(self.shape.index(3) + 1)
        x = self.o((q * k * v).flatten(1))
        gate, value = self.up(x).chunk(2, -1)
        return self.down(gate * value)


def test_parts_of_a_fused_matrix_follow_from_the_next_one() -> None:
    def attempts(model: nn.Module, plan: dict[str, str]) -> list[dict[str, str]]:
        return _list_style_attempts(
            model, plan, 2, ModuleComparison(model, ModuleCall((torch.randn(2, 8),), {}), None), ""
        )

    plan = {"qkv": "colwise", "o": "rowwise", "up": "colwise", "down": "rowwise"}
    fused = plan | {"qkv": "colwise-3", "up": "colwise-2"}
    assert attempts(Fused(heads_first=False), plan) == [fused, plan]
    assert attempts(Fused(heads_first=True), plan) == [plan, fused]
    model = nn.ModuleDict({"qkv": nn.Linear(8, 12), "o": nn.Linear(8, 8)})
    model.forward = lambda x: model.o(model.qkv(x)[:, :8])  # type: ignore[method-assign, operator]
    assert attempts(model, {"qkv": "colwise", "o": "rowwise"})[0]["qkv"] == "colwise-8:2:2"
    assert parse_fused_proportions("colwise-8:2:2") == [8, 2, 2]
    assert parse_fused_proportions("colwise-3") == [1, 1, 1]
    assert not any(map(parse_fused_proportions, ("colwise", "colwise-gather", "colwise-0", "rowwise-2", "colwise-2:")))
    assert list_split_modules(TensorParallelPlan({"a.b": "colwise"})) == ["", "a", "a.b"]


def test_parts_that_cannot_be_divided_are_refused() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(8, 12)})
    require_divisible_modules(model, {"qkv": "colwise-8:2:2"}, 2)
    with raises(PlanError, "qkv 12 8:2:2 4"):
        require_divisible_modules(model, {"qkv": "colwise-8:2:2"}, 4)
    with raises(PlanError, "qkv 12 5"):
        require_divisible_modules(model, {"qkv": "colwise-5"}, 2)


def test_a_tied_parameter_is_split_in_one_way() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["table"].weight
    require_divisible_modules(model, {"table": "embedding", "head": "colwise-gather"}, 2)
    for plan in ({"table": "embedding"}, {"head": "rowwise", "table": "embedding"}):
        with raises(PlanError, "table.weight head.weight"):
            require_divisible_modules(model, plan, 2)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_block_that_is_given_another_stream_is_noticed(swapped: bool) -> None:
    """Blocks that begin as the identity, and an output layer that begins at zero, compute the same in any order."""

    class Identity(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.order = nn.ModuleList(Identity() for _ in range(3)), [0, 1, 2]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in self.order:
                x = self.blocks[index](x)
            return x * 0

    model, inputs = Model(), torch.ones(2, 4)
    with BlockInputRecorder(RepeatedBlocks(name="blocks", container=model.blocks)) as stream:
        whole = measure_loss(lambda module: module(inputs).sum(), model)
        stream.start_comparison()
        model.order = [0, 2, 1] if swapped else model.order
        assert measure_loss(lambda module: module(inputs).sum(), model) == whole
    assert (stream.max_relative_difference > 1e-2) is swapped
    assert not model.blocks[0]._forward_hooks


def test_modules_of_one_kind_differ_in_their_numbers_alone() -> None:
    one, other = Branch(), Branch()
    assert describe_module_kind(one) == describe_module_kind(other)
    other.norm.running_mean += 1  # type: ignore[operator]
    assert describe_module_kind(one) != describe_module_kind(other)
    own = {"_layer": 3}, {"settings": {"layer": 3}}, {"settings": object()}
    for change in ({"layer": 3}, {"activation": torch.sigmoid}, {"scales": [1, 2.5]}, *own):
        other = Branch()
        vars(other.up).update(change)
        assert describe_module_kind(one) != describe_module_kind(other), change
    one, other = Branch(), Branch()
    one.shared = other.shared = object()  # type: ignore[assignment]
    assert describe_module_kind(one) == describe_module_kind(other)
    assert describe_module_kind(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) != describe_module_kind(
        nn.Sequential(nn.Linear(2, 2), nn.GELU())
    )


@pytest.mark.parametrize(
    ("widths", "named"),
    [((8, 8, 8, 1), ""), ((8, 15, 16, 1), "block 3 15 2 8"), ((8, 8, 4, 1), "block 4 3 8")],
)
def test_blocks_of_other_widths_are_refused_in_a_pipeline(widths: tuple[int, ...], named: str) -> None:
    """What the last block returns stays on its stage. Stages that waited for another length ended in gloo's abort."""
    sizes = (8, *widths)
    model = nn.Sequential(*(nn.Linear(size, after) for size, after in pairwise(sizes)))
    with BlockInputRecorder(RepeatedBlocks(name="", container=model)) as stream:
        model(torch.ones(4, 8))
        with raises(PlanError, named) if named else nullcontext():
            stream.require_one_shape()
