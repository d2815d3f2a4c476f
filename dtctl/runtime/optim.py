"""The optimizer of the spec, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from dtctl.train.config import TrainConfig


def optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the configuration asks for, over all parameters that want a gradient.

    The default betas are those of most language models since Brown et al. 2020, appendix B. Matrices decay, vectors
    do not: decay on biases and norms costs accuracy (He et al. 2019, section 3.1).
    """
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
    fused, foreach = config.kernel == "fused", config.kernel == "foreach"
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused, foreach=foreach)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused, foreach=foreach)


def schedule(config: TrainConfig, steps: int) -> Callable[[int], float]:
    """The learning rate of each step, from 0 to `steps` - 1.

    It rises linearly over `warmup_steps`, the last of which has `lr`, and then falls to `min_lr` at the last step;
    under wsd by the root of the steps done, which Haegele et al. 2024 (arXiv 2405.18392) found better than a line.
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
