"""`train.optimizer: muon`: Muon for matrices (Jordan et al. 2024), and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dtctl.train.config import TrainConfig


class Muon(torch.optim.Optimizer):
    """Two of torch's optimizers with common groups and state.

    Updates of matrices are scaled such that they are about as large as AdamW's, so that one learning rate does for both
    (Liu et al. 2025, arXiv 2502.16982).
    """

    def __init__(self, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], config: TrainConfig) -> None:
        """Take the parameters; tables of embeddings are among the others.

        Args:
            matrices: of two dimensions.
            others: all the rest.
            config: of the training.
        """
        fused, foreach = config.kernel == "fused", config.kernel == "foreach"
        placeholder = [nn.Parameter(torch.zeros(1, 1))]
        muon = torch.optim.Muon(
            placeholder, config.lr, config.weight_decay, config.momentum, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(
            placeholder, config.lr, (config.beta1, config.beta2), config.eps, 0.0, fused=fused, foreach=foreach
        )
        groups: list[dict[str, Any]] = [
            {**muon.defaults, "params": list(matrices), "algorithm": "muon"},
            {**adamw.defaults, "params": list(others), "algorithm": "adamw"},
        ]
        super().__init__([group for group in groups if group["params"]], {})
        # What the two have beside groups and state. As optimizers of their own they would be kept in snapshots, too.
        self._own = {"muon": _without_parameters(muon), "adamw": _without_parameters(adamw)}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with each of the two."""
        loss = closure() if closure is not None else None
        for algorithm, kind in (("muon", torch.optim.Muon), ("adamw", torch.optim.AdamW)):
            groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            if any(group["params"] for group in groups):
                part = object.__new__(kind)
                part.__dict__.update(self._own[algorithm], param_groups=groups, state=self.state)
                part.step()
        return loss


def _without_parameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}


def muon(config: TrainConfig, model: nn.Module) -> Muon:
    """Return the optimizer over all parameters of a model that are trained."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in wanted if parameter.dim() == 2 and id(parameter) not in tables]
    chosen = set(map(id, matrices))
    return Muon(matrices, [parameter for parameter in wanted if id(parameter) not in chosen], config)
