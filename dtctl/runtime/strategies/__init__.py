"""How a model is spread over the workers: one file a strategy, and the choice among them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final, Protocol

from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.config import TrainConfig
from dtctl.runtime.strategies.ddp import Ddp
from dtctl.runtime.strategies.single import Single
from dtctl.runtime.worker import Worker

AVAILABLE: Final = ("auto", "single", "ddp")


class Strategy(Protocol):
    """What the loop needs to know of a strategy."""

    name: str
    module: nn.Module
    """What the loss function is called with; the user's model, perhaps wrapped."""
    has_warm_up: bool
    """Whether the first backward pass differs from all later ones, so that resuming exactly needs one to throw away."""

    def accumulating(self) -> AbstractContextManager[None]:
        """The context of a pass whose gradients are not the last of their step: they stay local."""


def choose(config: TrainConfig, worker: Worker, model: nn.Module) -> Strategy:
    """Spread `model`, which is already on the worker's device.

    Raises:
        PlanError: the strategy is not available, or makes no sense with this number of workers.
    """
    wanted = config.strategy
    if not isinstance(wanted, str) or wanted not in AVAILABLE:
        named = wanted if isinstance(wanted, str) else "mesh " + ", ".join(f"{axis}={n}" for axis, n in wanted.items())
        raise PlanError(
            f"strategy {named} is not available in this version",
            where="train.strategy",
            hint=f"available are {', '.join(AVAILABLE)}",
        )
    if wanted == "single" and worker.world_size > 1:
        raise PlanError(
            f"strategy single with {worker.world_size} workers would train {worker.world_size} models apart",
            where="train.strategy",
            hint="use `ddp`, or one worker",
        )
    if worker.world_size == 1:
        return Single(model)
    return Ddp(model, worker)
