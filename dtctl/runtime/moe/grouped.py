"""Gated feed-forward networks of many experts over rows that are sorted by expert, forward and backward.

For a loop over experts, autograd makes a tensor for each expert and copies it into a common one, for results and for
gradients of weights. This implementation writes every product directly to its final place. A step keeps two tensors of
the inner width for
the backward pass, where autograd keeps four. The products are the same as autograd's, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu


def compute_feed_forward(
    rows: torch.Tensor, counts: Sequence[int], gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return SwiGLU of each expert for its rows; under autocast in its number format, like `nn.Linear`.

    Args:
        rows: rows sorted by expert, [rows, width].
        counts: number of rows of each expert.
        gate: weights, [experts, hidden, width].
        up: weights, [experts, hidden, width].
        down: weights, [experts, width, hidden].

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
        # One expert at a time, so that intermediate results are still in the processor's cache.
        for expert, own in _list_expert_slices(counts):
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
        # In the format of the rows, so that the gradients from both matrices are not rounded before they are added.
        of_rows = torch.empty_like(rows, dtype=node.dtype) if node.needs_input_grad[0] else None
        of_weights = [
            _empty_for(weight, node.counts) if wanted else None
            for weight, wanted in zip(weights, node.needs_input_grad[1:4], strict=True)
        ]
        for expert, own in _list_expert_slices(node.counts):
            inputs, outputs = rows[own], upstream[own]
            opened = silu(gated[own])  # recomputed instead of kept
            of_inner = torch.mm(outputs, down[expert])
            _write_weight_gradient(outputs, opened * risen[own], of_weights[2], expert)
            of_risen = opened.mul_(of_inner)
            of_gated = torch.ops.aten.silu_backward(of_inner.mul_(risen[own]), gated[own])
            _write_weight_gradient(of_gated, inputs, of_weights[0], expert)
            _write_weight_gradient(of_risen, inputs, of_weights[1], expert)
            if of_rows is not None:
                of_rows[own] = torch.mm(of_gated, gate[expert])
                of_rows[own].add_(torch.mm(of_risen, up[expert]))
        return of_rows, *of_weights, None, None


def _empty_for(weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return memory for the gradient of all experts' weights, which is zero for experts without rows."""
    gradient = torch.empty_like(weights, memory_format=torch.contiguous_format)
    for expert, count in enumerate(counts):
        if not count:
            gradient[expert].zero_()
    return gradient


def _write_weight_gradient(
    outputs: torch.Tensor, inputs: torch.Tensor, gradient: torch.Tensor | None, expert: int
) -> None:
    """Write an expert's part of the gradient of weights in its place, if it is needed."""
    if gradient is not None:
        torch.mm(outputs.t(), inputs, out=gradient[expert])


def _list_expert_slices(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Return the experts that have rows, each with its rows."""
    ends = pairwise(accumulate(counts, initial=0))
    return [(expert, slice(begin, end)) for expert, (begin, end) in enumerate(ends) if end > begin]
