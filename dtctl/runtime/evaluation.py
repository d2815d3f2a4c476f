"""Evaluation whose result does not depend on the number of workers: sums and a count are added up, then divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.data_loading import datasets
from dtctl.runtime.distributed.worker import Worker
from dtctl.train.mesh import Coordinate

Score = Callable[[nn.Module, Any], Mapping[str, torch.Tensor]]
"""Scores of one batch: name -> one value per sample, shape [B]."""


def evaluate(
    model: nn.Module,
    samples: datasets.Samples | datasets.Batches,
    score: Score,
    worker: Worker,
    *,
    batch: int,
    autocast: AbstractContextManager[Any] | None = None,
    place: Coordinate | None = None,
    lockstep: bool = False,
) -> dict[str, float]:
    """Return the mean of each score over all samples, each taken exactly once whatever the number of workers.

    Args:
        model: not wrapped: workers may have different numbers of batches, and a wrapper may exchange data in each.
        samples: the validation set.
        score: values per sample.
        worker: this worker; it takes samples rank, rank + workers, ...
        place: of this worker in a mesh, where several may share samples. None: every worker has its own.
        lockstep: whether the model exchanges data in each pass, so that all workers must make as many.
        batch: samples per forward pass.
        autocast: context of the forward pass.

    Returns:
        Means, the same on all workers.

    Raises:
        PlanError: there are no samples.
    """
    if len(samples) == 0:
        raise PlanError("the validation set has no samples")
    read = datasets.reader(samples)
    rank, workers, counts = (
        (worker.rank, worker.world_size, True) if place is None else (place.data, place.degrees.data, place.counts)
    )
    mine = np.arange(rank, len(samples), workers, dtype=np.int64)
    passes = len(range(0, -(-len(samples) // workers) if lockstep else len(mine), batch))
    sums: dict[str, torch.Tensor] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for index in range(max(1, passes)):
                indices = mine[index * batch : (index + 1) * batch]
                # A worker without a share scores one sample and counts none of it: for the names, or for its peers.
                idle = len(indices) == 0
                if idle:
                    indices = np.zeros(1, dtype=np.int64)
                with autocast or nullcontext():
                    scores = score(model, datasets.to_device(read(indices), worker.device))
                for name, values in scores.items():
                    total = values.double().sum()
                    if idle or not counts:
                        total = torch.zeros_like(total)
                    sums[name] = sums[name] + total if name in sums else total
    finally:
        model.train(was_training)  # also where the worker continues after the loss of a peer
    names = sorted(sums)
    totals = worker.sum(torch.stack([sums[name].cpu() for name in names]))
    return {name: float(value) / len(samples) for name, value in zip(names, totals, strict=True)}
