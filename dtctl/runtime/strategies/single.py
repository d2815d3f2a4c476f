"""One worker: nothing is spread, nothing is exchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from dtctl.runtime.step import Step
from dtctl.runtime.strategies import gradients
from dtctl.runtime.strategies.accumulation import accumulate


class Single:
    """The model as it is."""

    name = "single"
    has_warm_up = False
    lockstep = False
    absent_keys: Collection[str] = ()
    sharded_state = False
    present = None

    def __init__(self, model: nn.Module) -> None:
        self.module = self.inference = model
        self._wanted = gradients.wanted(model)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to prepare."""

    def state(self) -> Mapping[str, Any]:
        """Nothing of its own."""
        return {}

    def release(self) -> None:
        """Nothing was put on."""

    def discard(self) -> None:
        """Nothing is carried over."""

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Nothing of its own."""

    def gradients(self, step: Step) -> torch.Tensor:
        """Micro batch by micro batch."""
        return accumulate(step, self.module)

    def finish(self) -> None:
        """Nothing is left to be done."""

    def norm(self) -> torch.Tensor:
        """Return the length of the gradient."""
        return gradients.norm(self._wanted)

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient down if it is too long."""
        gradients.clip(self._wanted, max_norm, norm)
