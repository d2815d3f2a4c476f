"""The model of a run with its optimizer, and the objects that change together with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import optim
from dtctl.runtime.ema import Ema
from dtctl.runtime.precision import LossScale
from dtctl.runtime.snapshot.state import read_optimizer_settings
from dtctl.runtime.strategies import Strategy
from dtctl.train.config import TrainConfig


class TrainedModel:
    """Model and optimizer of one worker.

    Attributes:
        model: the user's model, or this worker's part of it, on the worker's device and not wrapped.
        optimizer: optimizer of the model's parameters.
        parameters: trained parameters, as this worker has them.
        rate: learning rate of each step.
        configured: settings that the optimizer was made with.
        ema: moving average of the parameters; None if there is none.
        loss_scale: factor of the loss with fp16; None otherwise.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        strategy: Strategy,
        *,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
        rate: Callable[[int], float] | None,
        steps: int,
    ) -> None:
        """Make the optimizer; collective.

        Args:
            config: settings of the run.
            model: the model as the strategy has divided it.
            strategy: the strategy that has divided the model.
            optimizer: makes the optimizer. None: the one that the configuration names.
            rate: returns the learning rate of a step, counted from 0. None: the schedule that the configuration names.
            steps: number of steps of the run.

        Raises:
            PlanError: `optimizer` has returned something else than an optimizer, or one that needs a closure.
        """
        self.model = model
        self.optimizer = optimizer(model) if optimizer else optim.build_optimizer(config, model)
        if not hasattr(self.optimizer, "param_groups"):
            raise PlanError(
                f"`optimizer` has returned a {type(self.optimizer).__qualname__}, and the Trainer takes one optimizer",
                where="optimizer= of the Trainer",
                hint="give groups of parameters to one optimizer (`train.optimizer: muon` has AdamW for vectors), or "
                "write the loop in a session (dtctl.runtime.session), which takes several optimizers by name",
            )
        if optim.needs_step_arguments(self.optimizer):
            raise PlanError(
                f"{type(self.optimizer).__qualname__}.step needs a closure, and the Trainer calls it without one",
                where="optimizer= of the Trainer",
                hint="write the loop in a session (dtctl.runtime.session): call `optimizer.step(closure)` there, and "
                "then `s.end_step(loss)`",
            )
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self._config = config
        self.take_parameters(strategy, rate, steps)

    def take_parameters(self, strategy: Strategy, rate: Callable[[int], float] | None, steps: int) -> None:
        """Store the parameters that the optimizer has now, before its first step; collective."""
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        strategy.prepare(self.optimizer)
        self.rate = optim.LearningRateScheduler(self._config, self.optimizer, steps, own=rate)
        self.configured = read_optimizer_settings(self.optimizer)
        self.ema = Ema(self.model, self._config.ema) if self._config.ema else None

    def list_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the parameters that have one."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def drop_gradients(self) -> None:
        """Remove all gradients."""
        for parameter in self.parameters:  # as `zero_grad` does, but without the 15 us of its profiling hook
            parameter.grad = None
