"""Micro batch by micro batch: the passes of a step of all strategies that do not order them in their own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from dtctl.runtime.step import Step


def accumulate(
    step: Step,
    model: nn.Module,
    *,
    local: Callable[[], AbstractContextManager[None]] = nullcontext,
    beside: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> torch.Tensor:
    """Add up the gradients of a step's micro batches.

    Args:
        step: the step.
        model: what the loss function is called with.
        local: the context of every pass but the last of a step: its gradients are not exchanged yet.
        beside: called after each forward pass; returns scalars that its backward pass starts from next to the loss.

    Returns:
        This worker's share of the mean loss of the global batch, not yet added up over workers.
    """
    losses = []
    # At the end of a training, those that are empty on all workers are left out.
    count = -(-step.samples // step.schedule.samples_per_pass)
    micro_batches = step.micro_batches[:count]
    for index, indices in enumerate(micro_batches):
        # Every sample weighs the same, in a short last batch too; gradients are averaged over the workers.
        weight = len(indices) * step.replicas / step.samples
        batch = step.read(index)
        if index + 1 == len(micro_batches):
            losses.append(step.backward(model, batch, weight, len(indices), beside=beside))
        else:
            with local():
                losses.append(step.backward(model, batch, weight, len(indices), beside=beside))
    step.own = (step.began, step.forwarded)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
