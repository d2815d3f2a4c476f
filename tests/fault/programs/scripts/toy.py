"""What the programs of this folder have in common: some points, a small network, and the digest of what they end with."""

import hashlib
import json
import math
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from dtctl.runtime import Outcome, TensorData, Trainer, run

__all__ = [
    "F",
    "TensorData",
    "Trainer",
    "data",
    "finish",
    "fit",
    "math",
    "mlp",
    "mse",
    "nn",
    "np",
    "once",
    "os",
    "points",
]
__all__ += ["random", "start", "toy_state", "torch"]

SETTINGS = {
    "steps": 10, "micro_batch": 4, "lr": 0.02, "log_every": 100, "seed": 3, "timeout_s": 20,
    "snapshot": {"every_steps": 2, "keep": 3, "dir": "snapshots"},
}  # fmt: skip
toy_state = {"count": 0}


def points(count=64):
    """Inputs of six numbers and a target of one."""
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(7))
    return inputs, torch.sin(inputs[:, :1] * inputs[:, 1:2]) + 0.3 * inputs[:, 2:3]


def once(path, write):
    """Have a file written by whichever worker comes first; it appears whole."""
    if not Path(path).exists():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        part = Path(f"{path}.{os.getpid()}")
        with part.open("wb") as file:
            write(file)
        part.replace(path)


def data():
    return TensorData(*points())


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def mse(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def fit(loss=mse, model=mlp, samples=data, settings=None, **more):
    """Train from top-level definitions, as scripts do that have no function of their own for it."""

    def train(config, worker):
        torch.manual_seed(0)
        return finish(Trainer(config, worker, model(), loss, samples(), **more))

    start(train, **(settings or {}))


def start(train, **settings):
    raise SystemExit(run(train, defaults={**SETTINGS, **settings}))


def finish(trainer):
    """Run to the end; leave a digest of all parameters, buffers and of the loss over all points."""
    outcome = trainer.run()
    if outcome is Outcome.FINISHED:
        found = hashlib.sha256()
        for name, value in [*trainer.model.named_parameters(), *trainer.model.named_buffers()]:
            value = value.to_local() if hasattr(value, "to_local") else value
            value = value.detach().cpu().contiguous()
            value = value.dequantize() if value.is_quantized else value
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        Path(f"final.{trainer.training.settings.worker.rank}.json").write_text(json.dumps(found.hexdigest()))
    return outcome
