"""Weight of the current forward pass, for layers deep in a model that have no other access to it.

A step weighs its micro batches and scales losses for fp16; micro batches that are stand-ins have weight 0. The loss
function applies this to its result. A loss that a layer adds to the gradient (a balance loss) needs the same treatment,
and so do numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class Load:
    """Tokens that the experts of some layers got from this worker, in the passes of a step."""

    layers: set[nn.Module]
    """Layers that are counted."""
    chosen: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    """Layer -> how many of its tokens' choices fell on each expert, [experts]."""
    dropped: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    """Layer -> how many of them found their expert full; a scalar."""

    def add(self, layer: nn.Module, chosen: torch.Tensor, dropped: torch.Tensor) -> None:
        """Count a pass."""
        if layer in self.layers:
            self.chosen[layer] = self.chosen[layer] + chosen if layer in self.chosen else chosen
            self.dropped[layer] = self.dropped[layer] + dropped if layer in self.dropped else dropped

    def clear(self) -> None:
        """Begin another step."""
        self.chosen.clear()
        self.dropped.clear()


@dataclass(slots=True)
class Pass:
    """A forward pass; the context in which it is under way."""

    weight: float = 1.0
    """Factor of the mean loss of its samples before the backward pass."""
    samples: int | None = None
    """Number of samples that count, the first ones; None: all."""
    load: Load | None = None

    def of_samples(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the factors of losses of single samples, [samples], that go backward next to the loss function's."""
        count = len(losses) if self.samples is None else self.samples
        weights = torch.zeros_like(losses, requires_grad=False)
        weights[:count] = self.weight / max(1, count)
        return weights

    # Every step enters one: a generator as context would cost twice as much.
    def __enter__(self) -> None:
        """Begin the pass."""
        _current.append(self)

    def __exit__(self, *_: object) -> None:
        """End it."""
        _current.pop()


_current = [Pass()]


def current() -> Pass:
    """Return the pass under way; outside of the runtime's loop one that counts fully."""
    return _current[-1]


def is_first_time() -> bool:
    """Return whether a pass is one that trains, and not made again in a backward pass (recomputation)."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def add_loss(stream: torch.Tensor, losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the stream as it is; its backward pass also goes back from losses, each times its weight."""
    return _WithLoss.apply(stream, losses, weights)  # type: ignore[no-any-return, no-untyped-call]


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, stream: torch.Tensor, _: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # As an attribute: tensors saved for the backward pass would be those of a repeated pass (checkpointing), which
        # does not have its weight.
        node.weights = weights
        return stream.view_as(stream)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, node.weights, None
