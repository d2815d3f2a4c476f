"""Weight of the current forward pass, for layers deep in a model that have no other access to it.

A step weights its micro batches and scales losses for fp16; micro batches that are stand-ins have weight 0. The loss
function applies the weight to its result. A loss that a layer adds to the gradient (a balance loss) needs the same
weight, and so do numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class ExpertLoad:
    """Number of this worker's tokens that each expert of some layers got in the passes of a step."""

    layers: set[nn.Module]
    """Layers whose tokens are counted."""
    chosen: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    """Layer -> number of its tokens' choices for each expert, [experts]."""
    dropped: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    """Layer -> number of choices that were dropped since their expert was full; a scalar."""

    def add(self, layer: nn.Module, chosen: torch.Tensor, dropped: torch.Tensor) -> None:
        """Count the tokens of a pass."""
        if layer in self.layers:
            self.chosen[layer] = self.chosen[layer] + chosen if layer in self.chosen else chosen
            self.dropped[layer] = self.dropped[layer] + dropped if layer in self.dropped else dropped

    def clear(self) -> None:
        """Remove all counts before another step."""
        self.chosen.clear()
        self.dropped.clear()


@dataclass(slots=True)
class ForwardPass:
    """A forward pass, as a context that is active during the pass."""

    weight: float = 1.0
    """Factor of the mean loss of its samples before the backward pass."""
    samples: int | None = None
    """Number of samples that count, from the first on. None: all of them."""
    load: ExpertLoad | None = None

    def compute_sample_factors(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the factors for losses of single samples, [samples], that are added to the gradient."""
        count = len(losses) if self.samples is None else self.samples
        weights = torch.zeros_like(losses, requires_grad=False)
        weights[:count] = self.weight / max(1, count)
        return weights

    # Every step enters one, and a generator as a context would take twice as long.
    def __enter__(self) -> None:
        """Make this the current pass."""
        _current.append(self)

    def __exit__(self, *_: object) -> None:
        """Make the previous pass the current one."""
        _current.pop()


_current = [ForwardPass()]


def get_current_pass() -> ForwardPass:
    """Return the current pass; outside of the runtime's loop, one with full weight."""
    return _current[-1]


def is_first_time() -> bool:
    """Return whether a forward pass trains and is not a recomputation in a backward pass."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def add_loss(stream: torch.Tensor, losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the stream unchanged; its backward pass also starts from losses, each multiplied by its weight."""
    return _AddAuxiliaryLoss.apply(stream, losses, weights)  # type: ignore[no-any-return, no-untyped-call]


class _AddAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, stream: torch.Tensor, _: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # Stored as an attribute: tensors saved for the backward pass would come from a recomputation (checkpointing),
        # which does not have the weight.
        node.weights = weights
        return stream.view_as(stream)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, node.weights, None
