"""Evaluation whose result does not depend on the number of workers: sums and counts are added up, then divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from dtctl.errors import PlanError
from dtctl.runtime.data_loading import datasets
from dtctl.runtime.data_loading.loaders import adapt_validation_data
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.guards.oom import require_enough_memory
from dtctl.runtime.randomness import preserve_rng_states
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Coordinate

if TYPE_CHECKING:
    from dtctl.runtime.training import Training

Score = Callable[[nn.Module, Any], Mapping[str, torch.Tensor]]
"""Function that returns the scores of one batch: name -> one value per sample, shape [B]."""


def evaluate(
    model: nn.Module,
    samples: datasets.MapDataset | datasets.BatchDataset,
    score: Score,
    worker: Worker,
    *,
    batch: int,
    autocast: AbstractContextManager[Any] | None = None,
    place: Coordinate | None = None,
    lockstep: bool = False,
) -> dict[str, float]:
    """Return the mean of each score over all samples, each of which counts once with any number of workers.

    Args:
        model: unwrapped model, since workers may have different numbers of batches, and a wrapper may exchange data in
            each.
        samples: the validation set.
        score: returns values per sample.
        worker: this worker; it takes samples rank, rank + workers, ...
        place: position of this worker in a mesh, where several may share samples. None: every worker has its own.
        lockstep: True if the model exchanges data in each pass, so that all workers must make the same number of
            passes.
        batch: number of samples in a forward pass.
        autocast: context that sets the number format of the forward pass.

    Returns:
        Means, the same on all workers.

    Raises:
        PlanError: there are no samples.
    """
    if len(samples) == 0:
        raise PlanError("the validation set has no samples")
    read = datasets.make_batch_reader(samples)
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
                # A worker without samples scores one and does not count it, for the names of the scores, or for its
                # peers.
                idle = len(indices) == 0
                if idle:
                    indices = np.zeros(1, dtype=np.int64)
                with autocast or nullcontext():
                    scores = score(model, datasets.move_to_device(read(indices), worker.device))
                for name, values in scores.items():
                    total = values.double().sum()
                    if idle or not counts:
                        total = torch.zeros_like(total)
                    sums[name] = sums[name] + total if name in sums else total
    finally:
        model.train(was_training)  # runs also if the worker continues after the loss of a peer
    names = sorted(sums)
    totals = worker.sum(torch.stack([sums[name].cpu() for name in names]))
    return {name: float(value) / len(samples) for name, value in zip(names, totals, strict=True)}


class Evaluation:
    """The evaluations of one run."""

    def __init__(
        self,
        config: TrainConfig,
        validation: datasets.MapDataset | datasets.BatchDataset | DataLoader[Any] | None,
        score: Score | None,
    ) -> None:
        """Store the parts of an evaluation.

        Args:
            config: settings of the run.
            validation: the validation set, or a DataLoader of it; None if there are no evaluations.
            score: returns values per sample.
        """
        self._every, self._ema = config.eval_every, config.ema
        self._validation, self._score = adapt_validation_data(validation), score

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether an evaluation is due after this step of a run of `steps` steps."""
        if self._validation is None:
            return False
        return step == steps or (self._every is not None and step % self._every == 0)

    def run(self, training: Training) -> dict[str, float]:
        """Return the means of the scores as `val_NAME`; collective over all workers.

        Raises:
            PlanError: there is no validation set, or no score.
            WorkerFailed: memory has run out.
        """
        if self._validation is None or self._score is None:
            raise PlanError("an evaluation needs both `validation` and `score`", where="Trainer")
        settings, engine, ema = training.settings, training.engine, training.trained.ema
        averaged = ema is not None and self._ema is not None and self._ema.evaluate
        hint = "an evaluation takes `micro_batch` samples at a time: lower it, or keep fewer tensors in `score`"
        with (
            require_enough_memory(f"the evaluation after step {training.position.step}", hint, settings.worker),
            # Random numbers that a score draws are the same each time.
            preserve_rng_states(settings.worker.device, settings.config.seed),
            training.report.evaluating(),
            ema.using_averages() if ema and averaged else nullcontext(),
        ):
            evaluated = evaluate(
                engine.strategy.inference,
                self._validation,
                self._score,
                settings.worker,
                batch=training.position.batch.micro,
                autocast=engine.autocast,
                place=settings.place,
                lockstep=engine.strategy.lockstep,
            )
        return {f"val_{name}": value for name, value in evaluated.items()}
