"""Number format of the forward pass, and loss scaling for fp16; parameters, gradients and optimizer stay in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

TYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Same values as torch.amp.GradScaler: https://pytorch.org/docs/stable/amp.html#torch.amp.GradScaler
FIRST_SCALE: Final = 65536.0
GROWTH_INTERVAL: Final = 2000
LEAST_SCALE: Final = 1.0
"""Smallest scale; if a gradient is not finite at this scale, the scale is not the reason."""


def make_autocast(precision: str, device: torch.device) -> AbstractContextManager[Any] | None:
    """Return the context for a forward pass, which can be entered repeatedly; None for fp32."""
    if precision == "fp32":
        return None
    return torch.autocast(device.type, dtype=TYPES[precision])


class LossScale:
    """Dynamic loss scaling, without which small gradients in fp16 would be 0.

    The rule and its constants are those of `torch.amp.GradScaler`: skip a step whose gradient is not finite, halve the
    scale after it, and double the scale after 2000 good steps. The difference is that one number decides about a step:
    the norm of the whole gradient. The scale is the same on all workers with every strategy, so it needs no
    communication.

    Attributes:
        scale: factor of the loss; a power of two, so that scaling causes no rounding.
        good_steps: number of good steps since the scale last changed.
    """

    def __init__(self, scale: float = FIRST_SCALE, *, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.scale = scale
        self.good_steps = 0
        self._growth_interval = growth_interval

    def update(self, *, finite: bool) -> bool:
        """Update the scale after a step; return whether the scale explains that a step was not finite."""
        if finite:
            self.good_steps += 1
            if self.good_steps == self._growth_interval:
                self.scale, self.good_steps = self.scale * 2, 0
            return True
        explained = self.scale > LEAST_SCALE
        self.scale, self.good_steps = max(LEAST_SCALE, self.scale / 2), 0
        return explained

    def state(self) -> dict[str, float]:
        """Return the state for a snapshot; JSON."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def multiply_tensors(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all tensors by one number, in place; of sharded ones this worker's part."""
    # A DTensor is recognized by its method, since the import of its class takes half a second.
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in local:  # shards may be in the host's memory (`fsdp.cpu_offload`) and the factor on the GPU
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, some in by_device.items():
        torch._foreach_mul_(some, factor.to(device) if isinstance(factor, torch.Tensor) else factor)
