"""The number format of the forward pass; parameters, gradients and optimizer state stay fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dtctl.errors import PlanError


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context for a forward pass; it may be entered again and again.

    Raises:
        PlanError: the precision is not available.
    """
    if precision == "fp32":
        return nullcontext()
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    raise PlanError(
        f"precision {precision} is not available in this version: fp32 and bf16 are",
        where="train.precision",
        hint="bf16 needs no loss scaling, and every GPU since 2020 has it",
    )
