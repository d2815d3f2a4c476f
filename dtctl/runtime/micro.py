"""One micro batch: how it is read, and its forward and backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtctl.runtime import data
from dtctl.runtime.explain import explained
from dtctl.runtime.order import Indices

if TYPE_CHECKING:
    from dtctl.runtime.loop import Trainer


def read(trainer: Trainer, indices: Indices, index: int) -> Any:
    """The micro batch of that number in this step, on the CPU."""
    if len(indices):
        return trainer.feed.batch(indices, trainer.schedule, trainer.position, index)
    return trainer.feed.single(trainer.schedule.stand_in)  # the peers expect this worker's part of the exchange


def backward(trainer: Trainer, samples: Any, weight: float, count: int) -> torch.Tensor:
    """Add the gradients of a micro batch to those that are there.

    Args:
        trainer: whose step it is.
        samples: the micro batch, on the CPU.
        weight: of its mean loss; NaN spoils the gradients of all workers.
        count: of samples that count in it; 0 for one that is there for the exchange only.

    Returns:
        The loss times its weight, detached; a scalar.

    Raises:
        PlanError: torch cannot do it the way that a key of the configuration asks for.
    """
    try:
        return _backward(trainer, samples, weight, count)
    except (AssertionError, RuntimeError, ValueError) as exc:
        known = explained(exc)
        if known is None:
            raise
        raise known from exc


def _backward(trainer: Trainer, samples: Any, weight: float, count: int) -> torch.Tensor:
    batch = data.to_device(samples, trainer.worker.device)
    trainer.report.progress.forward()
    with trainer.autocast:
        loss = trainer.loss(trainer.strategy.module, batch)
    if isinstance(loss, tuple):
        loss, tokens = loss
        trainer.weights.append(torch.as_tensor(tokens if count else 0.0, dtype=torch.float32, device=loss.device))
        weight /= max(1, count)
    if weight != weight:
        loss = trainer.memory.poison(loss)
    elif weight != 1.0:
        loss = loss * weight
    trainer.forward_s = trainer.report.progress.backward()
    scaled = loss if trainer.loss_scale is None else loss.float() * trainer.loss_scale.scale
    torch.autograd.backward([scaled, *trainer.strategy.ends()])
    return loss.detach()
