"""Train a classifier of handwritten digits. Runs as `python train.py`, under torchrun, and with `dtctl launch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from dtctl.runtime import Outcome, TensorData, TrainConfig, Trainer, Worker, build, run

# What holds unless dtctl.yaml or the command line (--train.lr=1e-3) says otherwise.
DEFAULTS: dict[str, Any] = {
    "global_batch": 48,
    "epochs": 10,
    "lr": 3e-3,
    "warmup_steps": 20,
    "weight_decay": 0.05,
    "log_every": 20,
    "eval_every": 100,
    "snapshot": {"every_steps": 100},
}

Batch = tuple[torch.Tensor, torch.Tensor]  # images [B, 1, 8, 8] from 0 to 1, labels [B]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of the model; `train.model` in the spec."""

    channels: int = 16
    dropout: float = 0.2


def network(shape: Shape) -> nn.Module:
    """Two convolutions and a linear layer: images [B, 1, 8, 8] to logits [B, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, shape.channels, 3, padding=1),
        nn.BatchNorm2d(shape.channels),
        nn.ReLU(),
        nn.Conv2d(shape.channels, 2 * shape.channels, 3, padding=1, stride=2),
        nn.BatchNorm2d(2 * shape.channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(shape.dropout),
        nn.Linear(2 * shape.channels * 4 * 4, 10),
    )


def digits() -> tuple[TensorData, TensorData]:
    """Training and validation images; every fifth one is for validation."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorData(images[~held_out], labels[~held_out]), TensorData(images[held_out], labels[held_out])


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def score(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Per image: its cross entropy, and whether it was recognized. The Trainer averages over all workers' images."""
    images, labels = batch
    logits = model(images)
    return {
        "loss": nn.functional.cross_entropy(logits, labels, reduction="none"),
        "accuracy": logits.argmax(1) == labels,
    }


def train(config: TrainConfig, worker: Worker) -> Outcome:
    """What each worker does."""
    model = network(build(Shape, config.model, at="train.model", where="the spec or the command line"))
    training, validation = digits()
    return Trainer(config, worker, model, loss, training, validation=validation, score=score).run()


if __name__ == "__main__":
    raise SystemExit(run(train, defaults=DEFAULTS))
