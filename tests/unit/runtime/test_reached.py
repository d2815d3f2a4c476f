"""State in odd places, each as somebody has tried it to make a resume say what is not so: put back, or named."""

from __future__ import annotations

import argparse
import functools
import types
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.unit.runtime.conftest import Make, points, squared
from tests.unit.runtime.test_exactness import halves


class Pair(NamedTuple):
    mean: float
    count: int


class Holder:
    """Anything that has attributes."""


def namespace() -> dict[str, Any]:
    args, plain, user = argparse.Namespace(weight=1.0), types.SimpleNamespace(count=0), UserDict(total=0.0)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        args.weight *= 0.97
        plain.count += 1
        user["total"] += 0.5
        return squared(model, batch) * (args.weight + plain.count * 0.01 + user["total"] * 0.01)

    return {"loss": loss}


class Sam(torch.optim.Optimizer):
    """An optimizer around another one, with which it shares its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()


def spectral() -> dict[str, Any]:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        first = nn.utils.spectral_norm(nn.Linear(8, 8))
    return {"model": nn.Sequential(first, nn.Tanh(), nn.Linear(8, 1))}


def gradients_that_live_on() -> dict[str, Any]:
    torch.manual_seed(4)
    judge = nn.Linear(1, 1)
    own = torch.optim.SGD(judge.parameters(), lr=0.1)
    calls = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = model(batch[0])
        judge(found.detach()).square().mean().backward()
        if calls % 4 == 0:
            own.step()
            own.zero_grad()
        return squared(model, batch) + judge(found).mean() * 0.1

    return {"loss": loss}


def hooked_optimizer() -> dict[str, Any]:
    seen = [0]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            seen[0] += 1
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad *= 1 + 0.1 * seen[0]

        optimizer.register_step_pre_hook(before)
        return optimizer

    return {"optimizer": make}


def by_weak_reference() -> dict[str, Any]:
    held = Holder()
    held.count = 0
    reference = weakref.ref(held)
    _ALIVE[:] = [held]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        reference().count += 1
        return squared(model, batch) * (1 + 0.1 * reference().count)

    return {"loss": loss}


_ALIVE: list[Any] = []


def attributes_of_functions() -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        loss.calls += 1
        model[0].weight.average = getattr(model[0].weight, "average", 0.0) + 0.5
        return squared(model, batch) * (1 + 0.01 * loss.calls + 0.01 * model[0].weight.average)

    loss.calls = 0
    return {"loss": loss}


def data_that_the_loss_changes() -> dict[str, Any]:
    class Hard:
        def __init__(self) -> None:
            self.data, self.level, self.hard = points(), 0.0, set[int]()

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            inputs, targets = (tensor[index] for tensor in self.data.tensors)
            return inputs * (1 + self.level) + (index in self.hard), targets, index

    data = Hard()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        data.level += 0.01
        data.hard.add(int(batch[2][0]))
        return squared(model, batch[:2])

    return {"loss": loss, "samples": data}


def late_buffer() -> dict[str, Any]:
    class Late(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", torch.zeros(8))
            self.mean.mul_(0.9).add_(inputs.detach().mean(0))
            return super().forward(inputs - 0.1 * self.mean)

    return {"model": Late(8, 1)}


def expanded() -> dict[str, Any]:
    class Wide(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 1)
            self.scale = torch.ones(1).expand(8)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.scale = (self.scale[:1] * 1.01).expand(8)
            return super().forward(inputs * self.scale)

    return {"model": Wide()}


def swapped() -> dict[str, Any]:
    class Swapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.act, self.calls = nn.Linear(8, 1), nn.ReLU(), 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                self.act = nn.GELU()
            return self.act(self.line(inputs))

    return {"model": Swapping()}


def two_names() -> dict[str, Any]:
    shared = Holder()
    shared.one = {"count": torch.zeros(())}
    shared.other = None

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        shared.other = shared.other or [shared.one, Holder()]
        shared.one["count"] += 1
        return squared(model, batch) * (1 + shared.other[0]["count"])

    return {"loss": loss}


def made_late() -> dict[str, Any]:
    held = Holder()
    held.optimizer = None
    weight = torch.ones(1, requires_grad=True)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        held.optimizer = held.optimizer or torch.optim.Adam([weight], lr=0.1)
        weight.grad = torch.ones(1)
        held.optimizer.step()
        return squared(model, batch) * weight.detach().sum()

    return {"loss": loss}


def by_address() -> dict[str, Any]:
    held: dict[int, float] = {}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        key = id(model[0].weight)
        held[key] = held.get(key, 0.0) + 1.0
        return squared(model, batch) * held[key]

    return {"loss": loss}


def named_pairs() -> dict[str, Any]:
    held = [Pair(0.0, 0)]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        held[0] = Pair(held[0].mean + 0.1, held[0].count + 1)
        return squared(model, batch) * (1 + held[0].mean)

    return {"loss": loss}


def fractions() -> dict[str, Any]:
    held = Holder()
    held.share = Fraction(1, 2)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        held.share = held.share * Fraction(9, 10)
        return squared(model, batch) * float(held.share)

    return {"loss": loss}


@functools.cache
def drawn(index: int) -> torch.Tensor:
    return torch.randn(())


def cached_noise() -> dict[str, Any]:
    drawn.cache_clear()
    return {"loss": lambda model, batch: squared(model, batch) + model(batch[0]).mean() * drawn(len(batch))}


PROGRAMS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "namespaces": (namespace, "loss"),
    "an optimizer in an optimizer": (lambda: {"optimizer": lambda model: Sam(model.parameters())}, "exact"),
    "spectral norm": (spectral, "exact"),
    "gradients": (gradients_that_live_on, "loss"),
    "hooks of optimizers": (hooked_optimizer, "update"),
    "weak references": (by_weak_reference, "loss"),
    "functions": (attributes_of_functions, "loss"),
    "data": (data_that_the_loss_changes, "loss"),
    "late buffers": (late_buffer, "exact"),
    "expanded": (expanded, "loss"),
    "a module that is replaced": (swapped, "loss"),
    "two names of one thing": (two_names, "loss"),
    "an optimizer that is made late": (made_late, "loss"),
    "addresses as keys": (by_address, "loss"),
    "named tuples": (named_pairs, "loss"),
    "fractions": (fractions, "loss"),
    "what was drawn and cached": (cached_noise, "loss"),
}
"""What is said of each: that it is exact, or what differs first. What has no `state_dict` does not come along."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_said_of_a_resume_is_true(program: str, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    parts, said = PROGRAMS[program]
    equal, text = halves(make, capsys, parts)
    assert (equal, text.split(" of step")[0]) == (
        said == "exact",
        said if said == "exact" else f"not exact: the {said}",
    )
