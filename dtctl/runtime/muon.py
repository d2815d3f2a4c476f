"""`train.optimizer: muon`: Muon for matrices (Jordan et al. 2024), and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dtctl.train.config import TrainConfig


class Muon(torch.optim.Optimizer):
    """Two of torch's optimizers with common groups and state.

    Updates of matrices are scaled to about the size of AdamW's updates, so that one learning rate suits both (Liu et
    al. 2025, arXiv 2502.16982).
    """

    def __init__(self, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], config: TrainConfig) -> None:
        """Store the parameters; tables of embeddings count as parameters for AdamW.

        Args:
            matrices: parameters of two dimensions.
            others: all other parameters.
            config: settings of the run.
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
        # The attributes of the two optimizers without groups and state. If the optimizers were kept whole, snapshots
        # would contain their groups and states twice.
        self._own = {"muon": _without_parameters(muon), "adamw": _without_parameters(adamw)}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step with both optimizers."""
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


def build_muon_optimizer(config: TrainConfig, model: nn.Module) -> Muon:
    """Return the optimizer over all trained parameters of a model."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in wanted if parameter.dim() == 2 and id(parameter) not in tables]
    chosen = set(map(id, matrices))
    return Muon(matrices, [parameter for parameter in wanted if id(parameter) not in chosen], config)
