"""What the host waits for in a step on a GPU, counted on tensors that stand in for a GPU's (see stand_in.py)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu_checks import exchange
from benchmarks.gpu_checks.ground import Ground, group_of_one, model_of, train
from benchmarks.gpu_checks.stand_in import DEVICE, stand_in, steps_of
from benchmarks.gpu_loops import loss
from dtctl.runtime import Trainer, Worker
from dtctl.runtime.data_loading import feed

pytestmark = pytest.mark.torch
MAKE: dict[str, Any] = {"single": None, "ddp": exchange.ddp, "fsdp": exchange.fsdp, "hsdp": exchange.hsdp}


def counted(
    folder: Path,
    worker: Worker,
    strategy: str,
    settings: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[nn.Module, Any], Any] = loss,
) -> Mapping[str, int]:
    """Waits of 4 steps without a line of metrics, after the first."""
    on = Ground(torch.device("cpu"), folder)
    joined: Any = contextlib.nullcontext(worker) if strategy == "single" else group_of_one(on)
    with joined as member:
        there = dataclasses.replace(member, device=DEVICE)
        model = model_of(on.size())
        with stand_in(model) as waits:

            def run(after: Callable[[int], None]) -> None:
                def hear(trainer: Trainer) -> None:
                    step = trainer.training.report.step
                    trainer.training.report.step = lambda number: (step(number), after(number))  # type: ignore[assignment]

                asked = {"steps": 20, "log_every": 10, "clip_norm": 1.0, **(settings or {})}
                train(on, there, "run", asked, model=lambda: model, loss=loss, make=MAKE[strategy], before=hear)

            return steps_of(run, waits, first=1, last=5)


@pytest.mark.parametrize("strategy", MAKE)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_waits_for_nothing(tmp_path: Path, worker: Worker, strategy: str, accumulate: int) -> None:
    assert counted(tmp_path, worker, strategy, {"accumulate": accumulate}) == {}


def test_a_loss_over_tokens_waits_for_nothing(tmp_path: Path, worker: Worker) -> None:
    def weighed(model: nn.Module, batch: Any) -> Any:
        value = loss(model, batch)
        return value * 7, 7

    assert counted(tmp_path, worker, "ddp", loss=weighed) == {}


@pytest.mark.parametrize(
    ("look", "what"),
    [
        (lambda value: value.item(), "item"),
        (lambda value: value.tolist(), "tolist"),
        (lambda value: value.cpu(), "cpu"),
        (lambda value: float(value.detach()), "__float__"),
        (lambda value: bool(value > 0), "__bool__"),
        (lambda value: value.view(1).nonzero(), "nonzero"),
    ],
)
def test_every_look_is_counted(tmp_path: Path, worker: Worker, look: Callable[[Any], object], what: str) -> None:
    def curious(model: nn.Module, batch: Any) -> Any:
        value = loss(model, batch)
        look(value)
        return value

    found = counted(tmp_path, worker, "single", loss=curious)
    assert {name.partition(" at ")[0]: count for name, count in found.items()} == {what: 4}


def test_copies_from_memory_that_is_not_locked_are_counted(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "pin_batch_tensors", lambda batch: batch)
    found = counted(tmp_path, worker, "single")
    assert found == {"pageable copy by to at dtctl.runtime.data_loading.datasets.<lambda>": 8}


def test_numbers_that_are_copied_are_counted(tmp_path: Path, worker: Worker) -> None:
    def scaled(model: nn.Module, batch: Any) -> Any:
        return loss(model, batch) * torch.tensor(2.0, device=DEVICE)

    assert sum(counted(tmp_path, worker, "single", loss=scaled).values()) == 4


def test_a_policy_that_must_look_does(tmp_path: Path, worker: Worker) -> None:
    assert counted(tmp_path, worker, "single", {"on_nan": "skip"}) == {
        "__float__ at dtctl.runtime.guards.nonfinite.decide_step_action": 4
    }
