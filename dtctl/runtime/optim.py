"""Optimizer of the spec, and the learning rate as a pure function of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from dtctl.errors import PlanError, WorkerFailed
from dtctl.train.config import TrainConfig


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the configured optimizer, over all parameters that require a gradient.

    The default betas are those of most language models since Brown et al. 2020, appendix B. Only matrices have weight
    decay, since decay of biases and norms costs accuracy (He et al. 2019, section 3.1).
    """
    if config.optimizer == "muon":
        from dtctl.runtime.muon import build_muon_optimizer  # imported here, since no other optimizer needs it

        return build_muon_optimizer(config, model)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.weight_decay:
        groups = [
            {"params": [p for p in wanted if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in wanted if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
    else:
        # A group costs about 30 us per step.
        groups = [{"params": wanted, "weight_decay": 0.0}]
    # The default is the fused form: one kernel for all parameters, on the CPU too, where torch would loop over them.
    # Fused kernels do not support complex numbers.
    real = all(parameter.is_floating_point() for parameter in wanted)
    fused = config.kernel == "fused" and real
    foreach = config.kernel == "foreach" or (config.kernel == "fused" and not real)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused, foreach=foreach)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused, foreach=foreach)


def build_rate_schedule(config: TrainConfig, steps: int) -> Callable[[int], float]:
    """Return the learning rate of each step, as a function of steps from 0 to `steps` - 1.

    It rises linearly to `lr` over `warmup_steps`, and then falls to `min_lr` at the last step. With wsd it falls by the
    root of the steps done, which Haegele et al. 2024 (arXiv 2405.18392) found to be better than a linear decrease.
    """
    warmup, peak, floor = config.warmup_steps, config.lr, config.min_lr
    span = max(1, steps - 1 - warmup)
    fall = min(steps, config.decay_steps or -(-steps // 10))

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        if config.schedule == "constant":
            return peak
        if config.schedule == "wsd":
            return floor + (peak - floor) * (1.0 - math.sqrt(max(0, step - (steps - 1 - fall)) / fall))
        done = min(1.0, (step - warmup) / span)
        left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return floor + (peak - floor) * left

    return rate


def needs_step_arguments(owner: object) -> bool:
    """Return True if `step` of an object needs arguments, like that of LBFGS or ReduceLROnPlateau.

    The method of its class is examined, since schedulers replace that of an optimizer by a function with `self`.
    """
    try:
        signature = inspect.signature(type(owner).step)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):  # compiled code may have no signature
        return False
    try:
        signature.bind(owner)
    except TypeError:
        return True
    return False


def replace_optimizer_parameters(
    optimizer: torch.optim.Optimizer, before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]
) -> None:
    """Replace the parameters of an optimizer that has made no step by others, found by name."""
    new = {parameter: now[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]


class LearningRateScheduler:
    """Learning rates of an optimizer's groups, set before each step.

    Attributes:
        own: the user's function of the step. None: the schedule that the configuration names.
        factor: factor of all rates, since a run that resumes with another number of workers may scale them.
    """

    def __init__(
        self,
        config: TrainConfig,
        optimizer: torch.optim.Optimizer,
        steps: int,
        own: Callable[[int], float] | None,
    ) -> None:
        self.own, self.factor = own, 1.0
        self._config, self._optimizer = config, optimizer
        self._scales = [group["lr"] / config.lr for group in optimizer.param_groups]
        self._newest: list[float] | None = None
        """Rates of the groups as they were set last; None if others were loaded since."""
        self._schedule = build_rate_schedule(config, steps)

    def set_total_steps(self, steps: int) -> None:
        """Set the number of steps of the run to `steps`."""
        self._schedule = build_rate_schedule(self._config, steps)

    def __call__(self, step: int) -> float:
        """Return the rate of a step, counted from 0, for a group whose rate is `lr`."""
        return (self.own or self._schedule)(step) * self.factor

    def set(self, step: int) -> float:
        """Set the rate of a step in all groups, which keep their ratio to `lr`; return the new value of `lr`.

        Raises:
            WorkerFailed: the optimizer has other groups than when training began.
            PlanError: the program has set the rate of a group since the step before.
        """
        rate = (self.own or self._schedule)(step) * self.factor
        groups = self._optimizer.param_groups
        if len(groups) != len(self._scales):
            raise WorkerFailed(
                f"the optimizer had {len(self._scales)} parameter groups when training began, and has "
                f"{len(groups)} before step {step + 1}",
                where="optimizer.add_param_group",
                hint="clipping, other workers and snapshots know the groups of the beginning: make all of them there",
            )
        expected = self._newest
        rates = [rate * scale for scale in self._scales]
        for number, group in enumerate(groups):
            if expected is not None and group["lr"] != expected[number]:
                raise PlanError(
                    f"the learning rate of the optimizer was changed from {expected[number]:.3g} to {group['lr']:.3g} "
                    f"after step {step}, and the Trainer sets it before each step",
                    where=f"optimizer.param_groups[{number}]",
                    hint="call `training.scale_rate(factor)` in `after_evaluation` of a hook, or give the Trainer "
                    "`rate=`; schedulers of torch work in a session (dtctl.runtime.session)",
                )
            group["lr"] = rates[number]
        self._newest = rates
        return rate

    def accept_loaded_rates(self) -> None:
        """Let the optimizer have other rates than those that were set, since its state was loaded."""
        self._newest = None
