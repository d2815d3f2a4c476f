"""Before training: does the divided model compute what the whole one does?

How a model may be cut depends on its code, which no plan can see. A cut that does not fit often runs without an error
and learns something else, so the loss of one batch is compared: in fp32, where little is rounded, or in the number
format of the training, if the model's kernels take no other (those of flash-attn).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker

Probe = Callable[[nn.Module], torch.Tensor]
"""The loss of one batch, the same batch on all workers, with a model that is called as the user's is."""
ROUNDING: Final = 1e-3
ROUNDING_OF_HALVES: Final = 2e-2
"""Shares of the loss by which sums in another order may change it, in fp32 and in bf16 or fp16."""


def whole(probe: Probe, model: nn.Module, autocast: AbstractContextManager[Any] | None) -> tuple[float, Probe, float]:
    """The loss of the model in one piece, how to measure that of its parts, and by which share they may differ.

    Args:
        probe: computes the loss.
        model: in one piece.
        autocast: the number format of the training; None if that is fp32.
    """
    try:
        return measure(probe, model), probe, ROUNDING
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if autocast is None:
            raise

    def as_trained(model: nn.Module) -> torch.Tensor:
        with autocast:
            return probe(model)

    return measure(as_trained, model), as_trained, ROUNDING_OF_HALVES


def measure(probe: Probe, model: nn.Module) -> float:
    """The loss without dropout; the model's mode is as before afterwards."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        value = float(probe(model))
    model.train(was_training)
    return value


def require_agreement(whole: float, divided: float, worker: Worker, *, how: str, rounding: float = ROUNDING) -> None:
    """Compare the losses of the model before and after it was divided.

    Args:
        whole: of the model in one piece.
        divided: after.
        worker: this worker.
        how: what was done to it, for the message.
        rounding: by which share they may differ.

    Raises:
        PlanError: they differ by more than rounding, on any worker; on every worker.
    """
    near = abs(whole - divided) <= rounding * max(1.0, abs(whole))  # false for NaN
    bad = float(worker.sum(torch.tensor(0.0 if near else 1.0)))
    if bad:
        raise PlanError(
            f"{how}, the model has the loss {divided:.6g} on the first samples, and {whole:.6g} in one piece",
            where="train.strategy",
            hint="its code does not allow this; see the top of dtctl/runtime/strategies/tensor.py and pipeline.py for "
            "what it must be like",
        )
