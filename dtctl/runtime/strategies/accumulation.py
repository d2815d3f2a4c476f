"""Passes of a step one micro batch after another, for all strategies without an order of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from dtctl.runtime.step import Step


def accumulate_gradients(
    step: Step,
    model: nn.Module,
    *,
    local: Callable[[], AbstractContextManager[None]] = nullcontext,
    beside: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> torch.Tensor:
    """Add up the gradients of a step's micro batches, and return the loss.

    Args:
        step: the step.
        model: the module that the loss function is called with.
        local: returns the context of every pass but the last, in which gradients are not exchanged.
        beside: called after each forward pass; returns scalars that the backward pass starts from in addition to the
            loss.

    Returns:
        This worker's share of the mean loss of the global batch, not yet added up over workers.
    """
    losses = []
    # Micro batches that are empty on all workers, at the end of a run, are skipped.
    count = -(-step.samples // step.schedule.samples_per_pass)
    micro_batches = step.micro_batches[:count]
    for index, indices in enumerate(micro_batches):
        # Every sample has the same weight, in a short last batch too; gradients are averaged over the workers.
        weight = len(indices) * step.replicas / step.samples
        batch = step.read(index)
        if index + 1 == len(micro_batches):
            losses.append(step.backward(model, batch, weight, len(indices), beside=beside))
        else:
            with local():
                losses.append(step.backward(model, batch, weight, len(indices), beside=beside))
    step.own = (step.began, step.forwarded)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
