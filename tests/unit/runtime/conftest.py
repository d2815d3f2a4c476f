"""A worker without peers, and a training of it that takes milliseconds."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtctl import names
from dtctl.runtime import TensorData, TrainConfig, Trainer, Worker, load
from dtctl.runtime.randomness import seed_all

Make = Callable[..., Trainer]


@pytest.fixture
def worker() -> Worker:
    return Worker(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, device=torch.device("cpu"), backend=None
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))


def points(count: int = 50) -> TensorData:
    source = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 8, generator=source)
    return TensorData(inputs, inputs.sum(1, keepdim=True))


def squared(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


@pytest.fixture
def make(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a Trainer in a folder of its own; arguments are settings of the configuration, or parts of the Trainer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(names.METRICS, str(tmp_path / "metrics.jsonl"))
    monkeypatch.delenv(names.SNAPSHOT_DIR, raising=False)

    def made(settings: dict[str, Any] | None = None, **parts: Any) -> Trainer:
        config: TrainConfig = load(
            {"micro_batch": 4, "steps": 12, "log_every": 3, **(settings or {})}, argv=[], environ={}
        )
        seed_all(config.seed)
        parts = {"model": network(), "loss": squared, "samples": points(), **parts}
        model, loss, samples = parts.pop("model"), parts.pop("loss"), parts.pop("samples")
        return Trainer(config, worker, model, loss, samples, **parts)

    return made


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A training that was stopped by a signal hears no second one; the tests' own process is to hear it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
