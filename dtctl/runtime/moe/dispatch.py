"""Transfer of tokens to their experts and back.

Each expert that a token chooses gives a row. Rows are sorted by expert, sent to the worker that has the expert, sorted
by expert
there, computed, and sent back in the same way. The numbers of rows vary by worker and pass, and nothing is padded. A
worker without rows takes part with none, in the backward pass too, since the other workers wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that returns the experts' outputs in order, given rows sorted by expert, [rows, width], and the number of
rows of each expert, [experts]."""


def dispatch_to_experts(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    compute: Compute,
) -> torch.Tensor:
    """Return the weighted sum of the experts' outputs for each token.

    Args:
        tokens: [tokens, width].
        chosen: number of the expert for each choice, [tokens, choices]; it is `experts` for a dropped choice.
        weights: weights of the choices, [tokens, choices].
        experts: number of experts.
        compute: computes the experts' outputs for rows.

    Returns:
        [tokens, width]; zeros for a token if all its choices were dropped.
    """
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    order = flat.argsort(stable=True)[: int(counts.sum())]  # dropped choices come last
    source = order // chosen.shape[1]
    rows = compute(tokens.index_select(0, source), counts)
    weighted = rows * weights.reshape(-1).index_select(0, order)[:, None]
    return tokens.new_zeros(tokens.shape).index_add(0, source, weighted.to(tokens.dtype))


def dispatch_rows_to_experts(
    rows: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup, compute: Compute
) -> torch.Tensor:
    """Compute as `compute` does, on a group of workers with an equal part of the experts each; collective over it.

    Args:
        rows: rows sorted by expert, [rows, width].
        counts: number of rows of each expert of all workers, [experts].
        group: group of the workers, in the order of their experts.
        compute: computes the outputs of this worker's experts.
    """
    workers = group.size()
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts.contiguous(), group=group)
    received = theirs.view(workers, -1)  # [worker, own expert]
    # one transfer, so that the CPU waits for the GPU only once
    sizes = torch.stack([counts.view(workers, -1).sum(1), received.sum(1)]).tolist()
    arrived = send_rows(rows, sizes[1], sizes[0], group)
    own = torch.arange(received.shape[1], device=counts.device).repeat(workers)
    order = own.repeat_interleave(theirs, output_size=sum(sizes[1])).argsort(stable=True)
    computed = compute(arrived.index_select(0, order), received.sum(0))
    back = computed.index_select(0, order.argsort())
    return send_rows(back, sizes[0], sizes[1], group)


def share_out_rows(
    rows: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup, compute: Compute
) -> torch.Tensor:
    """Compute as `compute` does, on workers with the same rows: each worker computes a part of them; collective.

    Args:
        rows: rows sorted by expert, [rows, width], the same on all workers.
        counts: number of rows of each expert, [experts].
        group: group of the workers.
        compute: computes the outputs for a part of the rows.
    """
    share = -(-len(rows) // group.size())
    begin = min(len(rows), share * group.rank())
    end = min(len(rows), begin + share)
    ends = counts.cumsum(0)
    own = ends.clamp(begin, end) - (ends - counts).clamp(begin, end)
    part = _ScatterRows.apply(rows, begin, end, group)  # type: ignore[no-untyped-call]
    whole: torch.Tensor = _GatherRows.apply(compute(part, own), begin, len(rows), group)  # type: ignore[no-untyped-call]
    return whole


def send_rows(
    rows: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send rows to the workers of a group, and their gradients back; collective over the group.

    Args:
        rows: rows sorted by their destination, [rows, ...].
        arriving: number of rows from each worker.
        leaving: number of rows to each worker.
        group: group of the workers.
    """
    return _AllToAll.apply(rows, arriving, leaving, group)  # type: ignore[no-any-return, no-untyped-call]


class _ScatterRows(torch.autograd.Function):
    """Operation that selects some of the rows that all workers have; its gradient is that of all rows."""

    @staticmethod
    def forward(node: Any, rows: torch.Tensor, begin: int, end: int, group: dist.ProcessGroup) -> torch.Tensor:
        node.rows, node.group = len(rows), group
        return rows[begin:end].clone()

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gather_row_parts(gradient, node.rows, node.group), None, None, None


class _GatherRows(torch.autograd.Function):
    """Operation that gathers the rows of all workers; each has the same gradient, and takes its own part of it."""

    @staticmethod
    def forward(node: Any, part: torch.Tensor, begin: int, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
        node.begin, node.end = begin, begin + len(part)
        return _gather_row_parts(part, rows, group)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient[node.begin : node.end], None, None, None


def _gather_row_parts(part: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all workers in order, [rows, width]; all are as long as the first, except the last ones."""
    share = -(-rows // group.size())
    padded = part.new_zeros((share, *part.shape[1:]))
    padded[: len(part)] = part
    whole = part.new_empty((share * group.size(), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[:rows]


class _AllToAll(torch.autograd.Function):
    """Operation that sends rows to other workers; the gradients are sent back in the same way."""

    @staticmethod
    def forward(
        node: Any, rows: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        node.arriving, node.leaving, node.group = arriving, leaving, group
        return _exchange_expert_rows(rows, arriving, leaving, group)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange_expert_rows(gradient, node.leaving, node.arriving, node.group), None, None, None


def _exchange_expert_rows(
    rows: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    arrived = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(arriving), list(leaving), group=group)
    return arrived


def scale_parameter_gradient(parameter: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the parameter unchanged; its gradient is multiplied by a factor."""
    return _ScaleGradient.apply(parameter, factor)  # type: ignore[no-any-return, no-untyped-call]


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, parameter: torch.Tensor, factor: float) -> torch.Tensor:
        node.factor = factor
        return parameter.view_as(parameter)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * node.factor, None
