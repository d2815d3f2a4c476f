"""What hooks carry from step to step, and what becomes of it after a gradient that is not finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.strategies.ddp import Ddp
from dtctl.train.config import DdpConfig
from tests.unit.runtime.conftest import Make, squared


@pytest.fixture
def alone(tmp_path: Path, worker: Worker) -> Iterator[Worker]:
    """A worker in a group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dataclasses.replace(worker, backend="gloo")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("discards", [True, False])
def test_powersgd_recovers_from_one_gradient_that_is_not_finite(alone: Worker, discards: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1))
    strategy = Ddp(model, DdpConfig(comm_hook="powersgd"), alone)
    finite = []
    for step in range(8):
        model.zero_grad()
        loss = strategy.module(torch.ones(4, 32)).square().mean() * (math.nan if step == 4 else 1.0)
        loss.backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
        if discards and not finite[-1]:
            strategy.discard()
    after = [discards] * 3
    assert finite == [True] * 4 + [False] + after, "the remainders keep it for ever, unless they are forgotten"


def test_a_step_that_is_not_taken_is_told_to_the_strategy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return squared(model, batch) * (math.nan if calls == 3 else 1.0)

    trainer = make({"on_nan": "skip", "steps": 5}, loss=loss)
    told: list[int] = []
    monkeypatch.setattr(trainer.training.engine.strategy, "discard", lambda: told.append(trainer.step + 1))
    trainer.run()
    assert told == [3]
