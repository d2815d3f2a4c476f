"""Who builds a model where, and what a part of it becomes on arrival; for several workers see tests/integration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.strategies import deferred_init
from dtctl.train.mesh import Degrees
from tests.facts import raises


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3), persistent=False)


@pytest.fixture
def second(worker: Worker) -> Worker:
    return dataclasses.replace(worker, rank=1, world_size=2, backend="gloo")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one worker, in which nothing changes on the way."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_function_makes_it_on_rank_0_and_without_memory_elsewhere(worker: Worker, second: Worker) -> None:
    assert {p.device.type for p in deferred_init.build(Model, worker, Degrees(fsdp=2)).parameters()} == {"cpu"}
    assert {p.device.type for p in deferred_init.build(Model, second, Degrees(fsdp=2)).parameters()} == {"meta"}
    for degrees in (Degrees(dp=2), Degrees(fsdp=2, tp=2), Degrees(fsdp=2, cp=2), Degrees(fsdp=2, pp=2)):
        assert {p.device.type for p in deferred_init.build(Model, second, degrees).parameters()} == {"cpu"}
    whole = Model()
    assert deferred_init.build(whole, second, Degrees(fsdp=2)) is whole


def test_code_that_needs_values_is_refused(second: Worker) -> None:
    def looking() -> nn.Module:
        torch.ones(2).sum().item()
        return Model()

    with raises(PlanError, "meta device"):
        deferred_init.build(looking, second, Degrees(fsdp=2))


def test_what_arrives_keeps_ties_and_what_is_frozen(second: Worker, alone: None) -> None:
    model = deferred_init.build(Model, second, Degrees(fsdp=2))
    deferred_init.broadcast_module_tensors(model.get_submodule("first"), model, second)
    assert model.get_parameter("last.bias").is_meta
    deferred_init.broadcast_module_tensors(model, model, second)
    assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])
    assert model.get_parameter("first.weight") is model.get_parameter("last.weight")
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["first.bias"]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_values_that_are_there_stay(worker: Worker, alone: None) -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    deferred_init.broadcast_module_tensors(model, model, worker)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Full(nn.Module):
    """Runs out of memory on its way to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 18))

    def to(self, *_: object, **__: object) -> Full:  # type: ignore[override]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")


@pytest.mark.parametrize(("degrees", "divided"), [(Degrees(tp=2), True), (Degrees(pp=2), True), (Degrees(dp=2), False)])
def test_a_whole_model_that_does_not_fit_is_told_with_its_size_and_what_never_has_it_whole(
    second: Worker, degrees: Degrees, divided: bool
) -> None:
    for model in (Full(), Full):
        with pytest.raises(PlanError, match=r"the whole model, .* does not fit") as caught:
            deferred_init.build(model, second, degrees)
        assert ("before it is divided" in str(caught.value)) == divided
        assert "fsdp" in str(caught.value.hint)
