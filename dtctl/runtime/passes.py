"""The forward and backward passes of one step, over this worker's part of the global batch."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from dtctl.runtime import elastic, micro, pipelined

if TYPE_CHECKING:
    from dtctl.runtime.loop import Trainer


def run(trainer: Trainer) -> torch.Tensor:
    """Gradients of one global batch, and this worker's share of its mean loss, not yet added up over workers.

    The strategy has still to finish them.
    """
    for parameter in trainer.parameters:  # as `zero_grad` does it, which spends 15 us on being profiled
        parameter.grad = None
    trainer.weights.clear()
    began_s = time.perf_counter()
    batches = trainer.schedule(trainer.position)
    count = trainer.schedule.samples(trainer.position)
    if trainer.shards is not None:
        return elastic.passes(trainer, trainer.shards, batches, count)
    if trainer.strategy.pipeline is not None:  # which orders the passes of a step in its own way
        return pipelined.passes(trainer, trainer.strategy.pipeline, batches, count)
    parts = []
    del batches[-(-count // (trainer.batch.micro * trainer.batch.world_size)) :]  # empty on all workers, at the end
    for index, indices in enumerate(batches):
        # Every sample weighs the same, in a short last batch too; gradients are averaged over the workers.
        weight = len(indices) * trainer.place.degrees.data / count
        samples = micro.read(trainer, indices, index)
        with nullcontext() if index + 1 == len(batches) else trainer.strategy.accumulating():
            parts.append(micro.backward(trainer, samples, weight, len(indices)))
    trainer.report.times.own(trainer.forward_s - began_s)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
