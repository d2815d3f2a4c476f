"""Balance of the experts in each step, over all workers, for metrics and for balancing by a bias.

Each worker counts the choices of its own tokens; a layer's numbers of the step are their sum. Balancing by a bias needs
them in every step, metrics in those that are logged.
"""

from __future__ import annotations

import torch
from torch import nn

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.moe import recognize
from dtctl.runtime.moe.accounting import Load
from dtctl.runtime.moe.layer import MoE
from dtctl.train.mesh import Coordinate

Counts = list[tuple[torch.Tensor, torch.Tensor]]
"""Number of tokens that chose each expert of each layer, and number of dropped choices."""


class Balance:
    """Use of the experts of a model whose layers may be on several workers."""

    def __init__(self, layers: list[tuple[str, int]], model: nn.Module, worker: Worker, place: Coordinate) -> None:
        """Begin to count.

        Args:
            layers: name and number of experts of each that is counted, by `counted`, of the whole model.
            model: as this worker has it.
            worker: this worker.
            place: of this worker in the mesh.
        """
        self._sizes = layers
        here = dict(model.named_modules())
        self._own = [here.get(name) for name, _ in layers]
        self._worker = worker
        # Workers that split matrices have the same tokens; those that divide sequences have others.
        self._counts = place.tp == 0
        self._every_step = any(_has_bias(layer) for layer in self._own)
        if worker.backend is not None:
            self._every_step = bool(worker.sum(torch.tensor(float(self._every_step))))
        self.load = Load({layer for layer in self._own if layer is not None})

    def counts(self, *, taken: bool, logged: bool) -> Counts:
        """Return what the tokens of a step have chosen on all workers; collective.

        Args:
            taken: whether the optimizer makes its step.
            logged: whether metrics are wanted.

        Returns:
            Counts of each layer; empty if they are not needed.
        """
        if not (logged or (taken and self._every_step)):
            self.load.clear()
            return []
        rows = [self._row(layer, size) for layer, (_, size) in zip(self._own, self._sizes, strict=True)]
        together = self._worker.sum(torch.cat(rows))
        self.load.clear()
        sizes = [size + 1 for _, size in self._sizes]
        return [(row[:-1], row[-1]) for row in torch.split_with_sizes(together, sizes)]

    def move(self, counts: Counts) -> None:
        """Move the biases by what `counts` has returned; with the optimizer's step, and local as that is."""
        for layer, (chosen, _) in zip(self._own, counts, strict=False):  # empty if they are not needed
            if isinstance(layer, MoE) and layer.bias is not None:
                step = layer.bias_rate * (chosen.mean() - chosen).sign()
                layer.bias.add_(step.to(layer.bias.device, layer.bias.dtype))

    def _row(self, layer: nn.Module | None, size: int) -> torch.Tensor:
        """Choices of each expert, and how many were dropped; [size + 1] on the CPU."""
        if layer is None or layer not in self.load.chosen or not self._counts:
            return torch.zeros(size + 1, dtype=torch.float64)
        return torch.cat([self.load.chosen[layer], self.load.dropped[layer].reshape(1)]).double().cpu()


def use(counts: Counts) -> dict[str, float]:
    """Return how evenly experts were used; empty if no layer counts it.

    Returns:
        `expert_load`: the largest share of a layer's choices that one of its experts got, in multiples of the mean;
        `expert_tokens` and `expert_tokens_max`: how many tokens chose an expert, the mean of all and the busiest;
        `experts_idle`: the share of all experts that got none; `tokens_dropped`: the share of choices that were
        dropped.
    """
    told = [(chosen, dropped) for chosen, dropped in counts if chosen.any()]
    if not told:
        return {}
    experts = torch.cat([chosen for chosen, _ in told])
    return {
        "expert_load": round(max(float(chosen.max() / chosen.mean()) for chosen, _ in told), 4),
        "expert_tokens": round(float(experts.mean()), 2),
        "expert_tokens_max": float(experts.max()),
        "experts_idle": round(float((experts == 0).double().mean()), 4),
        "tokens_dropped": round(sum(float(dropped) for _, dropped in told) / float(experts.sum()), 4),
    }


def _has_bias(layer: nn.Module | None) -> bool:
    return isinstance(layer, MoE) and layer.bias is not None


def counted(model: nn.Module) -> list[tuple[str, int]]:
    """Return names and numbers of experts of the layers of a whole model that count the tokens of their experts.

    Layers of other libraries count them where they are divided.
    """
    layers = {name: part for name, part in model.named_modules() if isinstance(part, MoE)}
    own = {layer.experts for layer in layers.values()}
    found = layers | {name: part for name, part in recognize.find(model).items() if part not in own}
    return [(name, int(part.num_experts)) for name, part in found.items()]  # type: ignore[arg-type]
