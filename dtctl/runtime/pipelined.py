"""The passes of a step where the strategy orders them in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtctl.runtime import data, micro
from dtctl.runtime.order import Indices

if TYPE_CHECKING:
    from dtctl.runtime.loop import Trainer
    from dtctl.runtime.strategies.pipeline import Pipeline


def passes(trainer: Trainer, pipeline: Pipeline, batches: Sequence[Indices], count: int) -> torch.Tensor:
    """As `passes.run`.

    Args:
        trainer: whose step it is.
        pipeline: its strategy.
        batches: the indices of this worker's micro batches.
        count: samples of the step over all workers.
    """
    scale = 1.0 if trainer.loss_scale is None else trainer.loss_scale.scale
    made = []
    for index, indices in enumerate(batches):
        batch = data.to_device(micro.read(trainer, indices, index), trainer.worker.device)
        made.append(((batch, len(indices)), scale * len(indices) * trainer.place.degrees.data / count))

    def loss(model: nn.Module, part: tuple[Any, int]) -> torch.Tensor:
        batch, samples = part
        with trainer.autocast:
            found = trainer.loss(model, batch)
        if not isinstance(found, tuple):
            return found
        total, tokens = found
        weight = torch.as_tensor(tokens if samples else 0.0, dtype=torch.float32, device=total.device)
        trainer.weights.append(weight)
        return total / max(1, samples)

    result = pipeline.run(made, loss, trainer.batch.micro) / scale
    # Only workers with the last stage have seen whether losses have weights; all take part in adding them up.
    if float(trainer.worker.sum(torch.tensor(float(len(trainer.weights))))) and not trainer.weights:
        trainer.weights.append(torch.zeros((), device=result.device))
    return result
