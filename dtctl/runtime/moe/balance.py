"""Balance of the experts in each step over all workers, for metrics and for balancing by a bias.

Each worker counts the choices of its own tokens, and the sum over workers is that of the step. Balancing by a bias
needs the counts in every step, metrics only in logged ones.
"""

from __future__ import annotations

import torch
from torch import nn

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.moe import recognize
from dtctl.runtime.moe.accounting import ExpertLoad
from dtctl.runtime.moe.layer import MoE
from dtctl.train.mesh import Coordinate

Counts = list[tuple[torch.Tensor, torch.Tensor]]
"""For each layer: number of tokens that chose each expert, and number of dropped choices."""


class ExpertBalance:
    """Counts of how the experts of a model are used; its layers may be on several workers."""

    def __init__(self, layers: list[tuple[str, int]], model: nn.Module, worker: Worker, place: Coordinate) -> None:
        """Prepare to count.

        Args:
            layers: name and number of experts of each counted layer of the whole model, from `list_counted_layers`.
            model: the model as this worker has it.
            worker: this worker.
            place: position of this worker in the mesh.
        """
        self._sizes = layers
        here = dict(model.named_modules())
        self._own = [here.get(name) for name, _ in layers]
        self._worker = worker
        # Workers that split matrices have the same tokens; those that divide sequences have different ones.
        self._counts = place.tp == 0
        self._every_step = any(_has_bias(layer) for layer in self._own)
        if worker.backend is not None:
            self._every_step = bool(worker.sum(torch.tensor(float(self._every_step))))
        self.load = ExpertLoad({layer for layer in self._own if layer is not None})

    def counts(self, *, taken: bool, logged: bool) -> Counts:
        """Return the counts of a step over all workers; collective.

        Args:
            taken: True if the optimizer makes its step.
            logged: True if the step has metrics.

        Returns:
            Counts of each layer; empty if they are not needed.
        """
        if not (logged or (taken and self._every_step)):
            self.load.clear()
            return []
        rows = [self._build_layer_counts(layer, size) for layer, (_, size) in zip(self._own, self._sizes, strict=True)]
        together = self._worker.sum(torch.cat(rows))
        self.load.clear()
        sizes = [size + 1 for _, size in self._sizes]
        return [(row[:-1], row[-1]) for row in torch.split_with_sizes(together, sizes)]

    def update_biases(self, counts: Counts) -> None:
        """Change the biases by the result of `counts`, together with the optimizer's step; local."""
        for layer, (chosen, _) in zip(self._own, counts, strict=False):  # `counts` is empty if the biases need none
            if isinstance(layer, MoE) and layer.bias is not None:
                step = layer.bias_rate * (chosen.mean() - chosen).sign()
                layer.bias.add_(step.to(layer.bias.device, layer.bias.dtype))

    def _build_layer_counts(self, layer: nn.Module | None, size: int) -> torch.Tensor:
        """Return the choices of each expert and the number of dropped ones, [size + 1] on the CPU."""
        if layer is None or layer not in self.load.chosen or not self._counts:
            return torch.zeros(size + 1, dtype=torch.float64)
        return torch.cat([self.load.chosen[layer], self.load.dropped[layer].reshape(1)]).double().cpu()


def compute_expert_use(counts: Counts) -> dict[str, float]:
    """Return figures of how evenly experts were used; empty if no layer counts its tokens.

    Returns:
        `expert_load`: largest share of a layer's choices for one expert, as a multiple of the mean; `expert_tokens` and
        `expert_tokens_max`: mean and maximum number of tokens per expert; `experts_idle`: share of experts without any
        token; `tokens_dropped`: share of choices that were dropped.
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


def list_counted_layers(model: nn.Module) -> list[tuple[str, int]]:
    """Return names and numbers of experts of those layers of a whole model that count the tokens of their experts.

    Layers of other libraries count them only if they are divided.
    """
    layers = {name: part for name, part in model.named_modules() if isinstance(part, MoE)}
    own = {layer.experts for layer in layers.values()}
    found = layers | {name: part for name, part in recognize.find_expert_modules(model).items() if part not in own}
    return [(name, int(part.num_experts)) for name, part in found.items()]  # type: ignore[arg-type]
