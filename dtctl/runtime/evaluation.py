"""Evaluation whose result does not depend on the number of workers: sums and a count are added up, then divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import data
from dtctl.runtime.worker import Worker

Score = Callable[[nn.Module, Any], Mapping[str, torch.Tensor]]
"""Scores of one batch: name -> one value per sample, shape [B]."""


def evaluate(
    model: nn.Module,
    samples: data.Samples | data.Batches,
    score: Score,
    worker: Worker,
    *,
    batch: int,
    autocast: AbstractContextManager[Any] | None = None,
) -> dict[str, float]:
    """The mean of each score over all samples, each taken exactly once whatever the number of workers.

    Args:
        model: not wrapped: workers may have different numbers of batches, and a wrapper may exchange data in each.
        samples: the validation set.
        score: values per sample.
        worker: this worker; it takes samples rank, rank + workers, ...
        batch: samples per forward pass.
        autocast: context of the forward pass.

    Returns:
        Means, the same on all workers.

    Raises:
        PlanError: there are no samples.
    """
    if len(samples) == 0:
        raise PlanError("the validation set has no samples")
    read = data.reader(samples)
    mine = np.arange(worker.rank, len(samples), worker.world_size, dtype=np.int64)
    sums: dict[str, torch.Tensor] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for start in range(0, max(1, len(mine)), batch):
            # A worker without a share scores one sample and counts none of it, only to learn the names.
            indices = mine[start : start + batch] if len(mine) else np.zeros(1, dtype=np.int64)
            with autocast or nullcontext():
                scores = score(model, data.to_device(read(indices), worker.device))
            for name, values in scores.items():
                total = values.double().sum() if len(mine) else torch.zeros((), dtype=torch.float64)
                sums[name] = sums[name] + total if name in sums else total
    model.train(was_training)
    names = sorted(sums)
    totals = worker.sum(torch.stack([sums[name].cpu() for name in names]))
    return {name: float(value) / len(samples) for name, value in zip(names, totals, strict=True)}
