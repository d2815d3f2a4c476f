"""Blocks of a model: found, checkpointed, compiled; with the numbers and names of the model left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import blocks
from dtctl.train.config import TrainConfig
from tests.facts import raises
from tests.unit.runtime.conftest import Make


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return values + nn.functional.dropout(self.outer(torch.relu(self.inner(values))), 0.2, self.training)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.activations = nn.ModuleList(nn.ReLU() for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = block(values)
        return values


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    inputs = torch.randn(5, 8)
    torch.manual_seed(4)
    model(inputs).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**settings)


def test_members_of_module_lists_are_blocks() -> None:
    assert list(blocks.find_blocks_by_name(Network())) == [f"blocks.{i}" for i in range(4)]


def test_without_lists_repeated_parts_of_a_sequence_are() -> None:
    plain = nn.Sequential(nn.Embedding(3, 8), Block(), nn.ReLU(), Block(), nn.LayerNorm(8))
    assert list(blocks.find_blocks_by_name(plain)) == ["1", "3"]
    assert blocks.find_blocks_by_name(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize(
    ("setting", "calls"),
    [("none", [1, 1, 1, 1]), ("full", [2, 2, 2, 2]), ("selective", [2, 2, 2, 2]), (2, [1, 2, 1, 2]), (3, [1, 1, 2, 1])],
)
def test_checkpointing_computes_twice_and_changes_no_bit(setting: Any, calls: list[int]) -> None:
    plain = Network()
    model = copy.deepcopy(plain)
    names = list(model.state_dict())
    blocks.prepare_blocks(model, config(checkpointing=setting))
    assert list(model.state_dict()) == names
    for one, two in zip(gradients(plain), gradients(model), strict=True):
        assert torch.equal(one, two)
    assert [block.calls for block in model.blocks] == calls
    with torch.no_grad():
        model(torch.zeros(2, 8))
    assert [block.calls for block in model.blocks] == [count + 1 for count in calls]


def test_a_copy_of_a_prepared_model_is_its_own() -> None:
    model = Network()
    blocks.prepare_blocks(model, config(checkpointing="full"))
    copied = copy.deepcopy(model)
    gradients(copied)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(copied.blocks[0], Block)


def kept_bytes(model: nn.Module) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters aside."""
    kept: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(torch.randn(64, 8))
    return sum(kept.values())


def test_checkpointing_keeps_less() -> None:
    plain, full = Network(), Network()
    blocks.prepare_blocks(full, config(checkpointing="full"))
    assert kept_bytes(full) < kept_bytes(plain) / 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")  # torch's tracer runs into warnings of torch itself
def test_compiled_blocks_compute_the_same(backend: Any) -> None:
    plain = Network().eval()
    model = copy.deepcopy(plain)
    names = list(model.state_dict())
    blocks.prepare_blocks(model, config(compile=backend, checkpointing="full"))
    assert list(model.state_dict()) == names
    inputs = torch.randn(3, 8)
    assert torch.allclose(model(inputs), plain(inputs), atol=1e-6)


def test_what_cannot_be_computed_twice_is_refused() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))])
    with raises(PlanError, "block 0 BatchNorm"):
        blocks.prepare_blocks(model, config(checkpointing="full"))
    with raises(PlanError, "repeated blocks"):
        blocks.prepare_blocks(nn.Linear(2, 2), config(compile=True))


def test_a_training_with_and_without_ends_with_the_same_bits(make: Make) -> None:
    ends = []
    for setting in ("none", "full"):
        torch.manual_seed(1)
        trainer = make(
            {"checkpointing": setting, "snapshot": {"dir": setting}}, model=nn.Sequential(Network(), nn.Linear(8, 1))
        )
        trainer.run()
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
