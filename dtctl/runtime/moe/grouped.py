"""Gated feed-forward networks of many experts over rows that are sorted by expert, forward and backward.

Autograd makes of a loop over experts a tensor for each, and copies them into those of all: results, and gradients of
weights. Here every product is written where it belongs. What a step keeps for the backward pass are two tensors of the
inner width, where autograd keeps four. The products are those that autograd makes, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu


def feed_forward(
    rows: torch.Tensor, counts: Sequence[int], gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """SwiGLU of each expert for its rows; under autocast in its number format, as `nn.Linear` is.

    Args:
        rows: sorted by expert, [rows, width].
        counts: how many each expert has.
        gate: [experts, hidden, width].
        up: [experts, hidden, width].
        down: [experts, width, hidden].

    Returns:
        [rows, width], in the order of the rows.
    """
    kind, dtype = rows.device.type, rows.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        gate, up, down = gate.to(dtype), up.to(dtype), down.to(dtype)
    with torch.autocast(kind, enabled=False):
        return _FeedForward.apply(rows, gate, up, down, tuple(counts), dtype)  # type: ignore[no-any-return, no-untyped-call]


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        node: Any,
        rows: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        counts: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        node.dtype, rows = rows.dtype, rows.to(dtype)
        gated, risen = inner = rows.new_empty(2, len(rows), gate.shape[1])
        result = torch.empty_like(rows)
        # Expert by expert, so that what is between products is still in the processor's cache.
        for expert, own in _places(counts):
            torch.mm(rows[own], gate[expert].t(), out=gated[own])
            torch.mm(rows[own], up[expert].t(), out=risen[own])
            torch.mm(silu(gated[own]).mul_(risen[own]), down[expert].t(), out=result[own])
        node.save_for_backward(rows, gate, up, down, inner)
        node.counts = counts
        return result

    @staticmethod
    @once_differentiable
    def backward(node: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, gate, up, down, (gated, risen) = node.saved_tensors
        weights = (gate, up, down)
        # In the format that rows came in, so that what comes back from both matrices is not rounded before it is added.
        of_rows = torch.empty_like(rows, dtype=node.dtype) if node.needs_input_grad[0] else None
        of_weights = [
            _empty_for(weight, node.counts) if wanted else None
            for weight, wanted in zip(weights, node.needs_input_grad[1:4], strict=True)
        ]
        for expert, own in _places(node.counts):
            inputs, outputs = rows[own], upstream[own]
            opened = silu(gated[own])  # made again, rather than kept
            of_inner = torch.mm(outputs, down[expert])
            _product(outputs, opened * risen[own], of_weights[2], expert)
            of_risen = opened.mul_(of_inner)
            of_gated = torch.ops.aten.silu_backward(of_inner.mul_(risen[own]), gated[own])
            _product(of_gated, inputs, of_weights[0], expert)
            _product(of_risen, inputs, of_weights[1], expert)
            if of_rows is not None:
                of_rows[own] = torch.mm(of_gated, gate[expert])
                of_rows[own].add_(torch.mm(of_risen, up[expert]))
        return of_rows, *of_weights, None, None


def _empty_for(weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Room for the gradient of all experts' weights, which is zero for those without rows."""
    gradient = torch.empty_like(weights, memory_format=torch.contiguous_format)
    for expert, count in enumerate(counts):
        if not count:
            gradient[expert].zero_()
    return gradient


def _product(outputs: torch.Tensor, inputs: torch.Tensor, gradient: torch.Tensor | None, expert: int) -> None:
    """Put an expert's part of the gradient of weights where it belongs, if it is wanted."""
    if gradient is not None:
        torch.mm(outputs.t(), inputs, out=gradient[expert])


def _places(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Experts that have rows, and which."""
    ends = pairwise(accumulate(counts, initial=0))
    return [(expert, slice(begin, end)) for expert, (begin, end) in enumerate(ends) if end > begin]
