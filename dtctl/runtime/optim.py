"""The optimizer of the spec, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from dtctl.errors import WorkerFailed
from dtctl.train.config import TrainConfig


def optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the configured optimizer, over all parameters that require a gradient.

    The default betas are those of most language models since Brown et al. 2020, appendix B. Matrices decay, vectors
    do not: decay on biases and norms costs accuracy (He et al. 2019, section 3.1).
    """
    if config.optimizer == "muon":
        from dtctl.runtime.muon import muon  # no other optimizer needs it

        return muon(config, model)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.weight_decay:
        groups = [
            {"params": [p for p in wanted if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in wanted if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
    else:
        groups = [{"params": wanted, "weight_decay": 0.0}]  # a group costs some 30 us a step
    # One kernel for all parameters by default, on the CPU too, where torch's own default is a loop over parameters.
    # Fused ones take no complex numbers.
    real = all(parameter.is_floating_point() for parameter in wanted)
    fused = config.kernel == "fused" and real
    foreach = config.kernel == "foreach" or (config.kernel == "fused" and not real)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused, foreach=foreach)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused, foreach=foreach)


def schedule(config: TrainConfig, steps: int) -> Callable[[int], float]:
    """Return the learning rate of each step, from 0 to `steps` - 1.

    It rises linearly over `warmup_steps` to `lr` in the last of them, and then falls to `min_lr` at the last step.
    Under wsd it falls by the root of the steps done, which Haegele et al. 2024 (arXiv 2405.18392) found better than a
    line.
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


def exchange(
    optimizer: torch.optim.Optimizer, before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]
) -> None:
    """Give an optimizer that has taken no step the parameters that have come into the places of its own, by name."""
    new = {parameter: now[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]


class LearningRate:
    """The learning rates of an optimizer's groups, set before each step.

    Attributes:
        own: the user's function of the step; None: the schedule that the configuration names.
        factor: factor of all rates, since a run that continues with another number of workers may scale them.
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
        self._schedule = schedule(config, steps)

    def stretch(self, steps: int) -> None:
        """Set the length of the training to `steps`."""
        self._schedule = schedule(self._config, steps)

    def __call__(self, step: int) -> float:
        """Return the rate of a step, from 0, that a group with `lr` has."""
        return (self.own or self._schedule)(step) * self.factor

    def set(self, step: int) -> float:
        """Set the rate of a step in all groups, which keep their ratio to `lr`; returns what `lr` became.

        Raises:
            WorkerFailed: the optimizer has other groups than when training began.
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
        for group, scale in zip(groups, self._scales, strict=True):
            group["lr"] = rate * scale
        return rate
