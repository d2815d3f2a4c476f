"""State that attributes do not show: in C, in TorchScript, behind names and weak references, outside of the program."""

from __future__ import annotations

import ctypes
import os
import queue
import random
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, PrivateAttr
from torch import nn

from dtctl.runtime.exactness import run_conditions
from tests.unit.runtime.conftest import Make, squared
from tests.unit.runtime.test_exactness import halves


class Calling(nn.Module):
    """For TorchScript: a number and a list as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls, self.seen = nn.Linear(8, 1), 0, torch.jit.Attribute([0.0], list[float])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.seen.append(float(self.calls))
        return self.line(inputs) * (1.0 + 0.01 * self.seen[-1] * self.seen[-2])


class Level(BaseModel):
    """A private attribute lies in a slot whose name is Python's kind of name."""

    _level: float = PrivateAttr(default=1.0)

    def rise(self) -> float:
        self._level *= 1.1
        return self._level


class Drawing(random.Random):
    """Counts beside what C keeps."""

    draws = 0

    def draw(self) -> float:
        self.draws += 1
        return self.random() * self.draws


class Forgetful:
    """Its state_dict has one of two numbers."""

    def __init__(self) -> None:
        self.told, self.untold = 1.0, 0

    def state_dict(self) -> dict[str, float]:
        return {"told": self.told}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.told = state["told"]

    def move(self) -> float:
        self.untold += 1
        self.told *= 0.9
        return self.told + 0.1 * self.untold


def scripted() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return {"model": torch.jit.script(Calling())}


def weighted(weight: Callable[[], float]) -> dict[str, Any]:
    """A training whose loss is multiplied by what is kept somewhere."""
    return {"loss": lambda model, batch: squared(model, batch) * weight()}


def declared() -> dict[str, Any]:
    held = Forgetful()
    return {**weighted(held.move), "extra_state": {"held": held}}


def long_list() -> dict[str, Any]:
    held = [float(number % 5) for number in range(2000)]

    def weight() -> float:
        held.append(held[-1] + 0.1)
        held[1500] += 0.2
        return 1 + held[-1] + held[1500]

    return weighted(weight)


def fast_weights() -> dict[str, Any]:
    held: dict[str, torch.Tensor] = {}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        weight = held.get("weight")
        if weight is None:
            weight = torch.ones(1, requires_grad=True)
        (grad,) = torch.autograd.grad((weight * batch[1].mean()).square().sum(), weight)
        held["weight"] = (weight - 0.1 * grad).detach().requires_grad_()
        return squared(model, batch) * held["weight"].item()

    return {"loss": loss}


def variable() -> dict[str, Any]:
    os.environ["TOY_CALLS"] = "0"

    def weight() -> float:
        os.environ["TOY_CALLS"] = str(int(os.environ["TOY_CALLS"]) + 1)
        return 1 + 0.1 * int(os.environ["TOY_CALLS"])

    return weighted(weight)


class Ticks:
    """A class that is never made an object of."""

    @staticmethod
    def more(kept: dict[str, int] = {"count": 0}) -> float:  # noqa: B006 - as people do it
        kept["count"] += 1
        return 1 + 0.1 * kept["count"]


def class_by_itself() -> dict[str, Any]:
    Ticks.more.__defaults__[0]["count"] = 0  # type: ignore[index]
    return {"loss": lambda model, batch: squared(model, batch) * Ticks.more()}


class Whole(int):
    """A number with an attribute."""


def numbers_with_attributes() -> dict[str, Any]:
    held = Whole(3)
    held.more = 0.0  # type: ignore[attr-defined]

    def weight() -> float:
        held.more += 0.1  # type: ignore[attr-defined]
        return 1 + held.more  # type: ignore[attr-defined]

    return weighted(weight)


def made_module() -> dict[str, Any]:
    made = types.ModuleType("toy_made")
    made.values = {"count": 0}  # type: ignore[attr-defined]
    sys.modules["toy_made"] = made

    def weight() -> float:
        made.values["count"] += 1
        return 1 + 0.1 * made.values["count"]

    return weighted(weight)


def view_of_the_weights() -> dict[str, Any]:
    torch.manual_seed(2)
    model = nn.Linear(8, 1)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    model.weight.data, model.bias.data = flat[:8].view(1, 8), flat[8:]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        flat.mul_(0.9)
        return squared(model, batch)

    return {"model": model, "loss": loss}


def transposed() -> dict[str, Any]:
    source = torch.Generator().manual_seed(1)
    held = {"matrix": torch.randn(8, 64, generator=source).t()}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        held["matrix"] = held["matrix"] * 1.01
        return squared(model, (batch[0] @ held["matrix"].t() @ held["matrix"] / 64, batch[1]))

    return {"loss": loss}


class Counting(torch.optim.SGD):
    """Counts on its class."""

    done = 0

    def step(self, closure: Any = None) -> Any:
        Counting.done += 1
        for group in self.param_groups:
            group["momentum"] = 1 - 1 / (1 + Counting.done)
        return super().step(closure)


def counting_class() -> dict[str, Any]:
    Counting.done = 0
    return {"optimizer": lambda model: Counting(model.parameters(), lr=0.05, momentum=0.5)}


def on_an_installed_module() -> dict[str, Any]:
    torch.toy_calls = 0  # type: ignore[attr-defined]

    def weight() -> float:
        torch.toy_calls += 1  # type: ignore[attr-defined]
        return 1 + 0.1 * torch.toy_calls  # type: ignore[attr-defined]

    return weighted(weight)


class Slower:
    """A rate that remembers, in a group of an optimizer."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 0.1 / self.calls


class Called(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "rate": Slower()})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["rate"]()
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=rate)


class Pair(ctypes.Structure):
    _fields_ = [("level", ctypes.c_double)]

    def rise(self) -> float:
        self.level += 0.1
        return 1 + self.level


class Stored:
    """A descriptor that has the values of all objects, by their addresses."""

    def __init__(self) -> None:
        self.store: dict[int, float] = {}

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else self.store.get(id(owner), 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.store[id(owner)] = value


def described() -> dict[str, Any]:
    class Rising:
        level = Stored()

        def rise(self) -> float:
            self.level = self.level * 1.1
            return self.level

    return weighted(Rising().rise)


def weak() -> dict[str, Any]:
    held: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        held[model] = held.get(model, 1.0) * 1.1
        return squared(model, batch) * held[model]

    return {"loss": loss}


def by_the_clock() -> dict[str, Any]:
    def weight() -> float:
        now = time.time()
        return 1 + now % 2

    return weighted(weight)


def by_chance() -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        source = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        return squared(model, batch) * torch.rand((), generator=source)

    return {"loss": loss}


def long_list_of_objects() -> dict[str, Any]:
    held = [Forgetful() for _ in range(1500)]

    def weight() -> float:
        held[-1] = Forgetful()
        held.append(Forgetful())
        return float(len(held) - 1499)

    return weighted(weight)


def from_a_file() -> dict[str, Any]:
    path = Path("gain.txt")  # each test has a folder of its own
    path.write_text("1.5")

    def weight() -> float:
        with path.open() as file:
            return float(file.read())

    return weighted(weight)


def other_precision() -> dict[str, Any]:
    calls = 0

    def weight() -> float:
        nonlocal calls
        calls += 1
        torch.set_float32_matmul_precision("high" if calls > 1 else "highest")
        return 1.0

    return weighted(weight)


def filled_by_a_thread() -> dict[str, Any]:
    ahead: queue.Queue[float] = queue.Queue(maxsize=2)

    def fill() -> None:
        for number in range(1000):
            ahead.put(1 + 0.01 * number)

    threading.Thread(target=fill, daemon=True).start()
    return weighted(ahead.get)


class Unseen:
    """An object that no question is answered of."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyError(name)


def unseen() -> dict[str, Any]:
    held = Unseen()
    return {"loss": lambda model, batch: squared(model, batch) * (2.0 if held is None else 1.0)}


@pytest.fixture(autouse=True)
def usual_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


PROGRAMS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "objects in groups of an optimizer": (lambda: {"optimizer": lambda model: Called(model.parameters())}, "update"),
    "a class by itself": (class_by_itself, "loss"),
    "attributes of numbers": (numbers_with_attributes, "loss"),
    "a module that the program makes": (made_module, "loss"),
    "a view of all weights": (view_of_the_weights, "exact"),
    "a transposed tensor": (transposed, "loss"),
    "the class of an optimizer": (counting_class, "update"),
    "attributes of installed modules": (on_an_installed_module, "loss"),
    "attributes of TorchScript": (scripted, "loss"),
    "private attributes of pydantic": (lambda: weighted(Level().rise), "loss"),
    "a generator of a class of one's own": (lambda: weighted(Drawing(1).draw), "loss"),
    "what a declared state_dict leaves out": (declared, "loss"),
    "what a state_dict leaves out": (lambda: weighted(Forgetful().move), "loss"),
    "a list too long to be likely": (long_list, "loss"),
    "tensors that want gradients": (fast_weights, "loss"),
    "environment variables that training sets": (variable, "loss"),
    "files that a loss reads": (from_a_file, "exact"),
    "a queue that a thread fills": (filled_by_a_thread, "loss"),
    "an object that cannot be asked": (unseen, "exact"),
    "a structure of C": (lambda: weighted(Pair().rise), "loss"),
    "values by the addresses of their owners": (described, "loss"),
    "weak dictionaries": (weak, "loss"),
    "the clock": (by_the_clock, "loss"),
    "chance of the system": (by_chance, "loss"),
    "a long list of objects": (long_list_of_objects, "loss"),
}
"""What is said of each: that it is exact, or what differs first. What has no `state_dict` does not come along."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_said_of_a_resume_is_true(
    program: str, make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_CALLS", "0")
    parts, said = PROGRAMS[program]
    equal, text = halves(make, capsys, parts)
    assert (equal, text.split(" of step")[0]) == (
        said == "exact",
        said if said == "exact" else f"not exact: the {said}",
    )


def test_a_switch_that_training_sets_is_named(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = halves(make, capsys, other_precision)
    assert text.startswith("not confirmed: steps 7 to 8 repeated bit for bit, and yet the float32 matmul precision")


def test_a_time_that_is_only_written_down_leaves_a_resume_exact(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    def timed() -> dict[str, Any]:
        seconds: list[float] = []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            began = time.perf_counter()
            found = squared(model, batch)
            seconds.append(time.perf_counter() - began)
            if seconds[-1] > 60:
                print("slow")
            return found

        return {"loss": loss}

    assert halves(make, capsys, timed) == (True, "exact")


def test_looking_at_the_data_leaves_no_trace_in_it(make: Make) -> None:
    class Counted:
        def __init__(self) -> None:
            self.reads, self.read_when_trained = 0, list[int]()

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return torch.ones(8), torch.ones(1)

    data = Counted()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        data.read_when_trained.append(data.reads)
        return squared(model, batch)

    make({"steps": 2, "global_batch": 4}, loss=loss, samples=data).run()
    assert data.read_when_trained == [4, 8]


def test_samples_that_there_was_no_time_for_are_no_difference() -> None:
    whole = run_conditions.compute_facts_checksum({"model (class)": "Net", "data[0]": "a", "data[7]": "b"})
    assert run_conditions.is_alike(
        whole, run_conditions.compute_facts_checksum({"model (class)": "Net", "data[0]": "a"})
    )
    assert not run_conditions.is_alike(
        whole, run_conditions.compute_facts_checksum({"model (class)": "Net", "data[0]": "c"})
    )
    assert not run_conditions.is_alike(
        whole, run_conditions.compute_facts_checksum({"model (class)": "Other", "data[0]": "a"})
    )
