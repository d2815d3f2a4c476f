"""Strategy for a single worker: no state is divided, no gradient is exchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from dtctl.runtime.step import Step
from dtctl.runtime.strategies import gradients
from dtctl.runtime.strategies.accumulation import accumulate_gradients


class StatelessStrategy:
    """Base of strategies that carry no state from one step to the next."""

    def state(self) -> Mapping[str, Any]:
        """Return nothing, as there is no state."""
        return {}

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Do nothing, since there is no state to restore."""

    def discard(self) -> None:
        """Do nothing: no gradient is carried over to the next step."""


class Single(StatelessStrategy):
    """Strategy that leaves the model as it is."""

    name = "single"
    has_warm_up = False
    lockstep = False
    absent_keys: Collection[str] = ()
    sharded_state = False
    present = None

    def __init__(self, model: nn.Module) -> None:
        self.module = self.inference = model
        self._wanted = gradients.list_trained_parameters(model)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: a single worker needs no preparation."""

    def release(self) -> None:
        """Do nothing: the model was not wrapped."""

    def gradients(self, step: Step) -> torch.Tensor:
        """Run one micro batch after another."""
        return accumulate_gradients(step, self.module)

    def finish(self) -> None:
        """Do nothing: gradients are complete when their passes have ended."""

    def norm(self) -> torch.Tensor:
        """Return the norm of the gradient."""
        return gradients.compute_gradient_norm(self._wanted)

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient down if its norm exceeds the limit."""
        gradients.clip_gradients(self._wanted, max_norm, norm)
