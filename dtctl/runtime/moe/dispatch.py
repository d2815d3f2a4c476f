"""Tokens to their experts and back.

Each choice of a token is a row; rows are sorted by expert, sent to the worker that has it, sorted by expert there
again, computed, and go the same way back. Numbers of rows differ from worker to worker and from pass to pass, nothing
is padded, and a worker without any takes part with none: in the backward pass too, since the others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows sorted by expert, [rows, width], and how many each expert has, [experts] -> the experts' outputs, in order."""


def by_expert(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    compute: Compute,
) -> torch.Tensor:
    """Return the weighted sum of the experts' outputs for each token.

    Args:
        tokens: [tokens, width].
        chosen: number of the expert of each choice, [tokens, choices]; a choice that was dropped has `experts`.
        weights: of the choices, [tokens, choices].
        experts: their number.
        compute: what experts make of rows.

    Returns:
        [tokens, width]; zeros for a token if all its choices were dropped.
    """
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    order = flat.argsort(stable=True)[: int(counts.sum())]  # those that were dropped come last
    source = order // chosen.shape[1]
    rows = compute(tokens.index_select(0, source), counts)
    weighted = rows * weights.reshape(-1).index_select(0, order)[:, None]
    return tokens.new_zeros(tokens.shape).index_add(0, source, weighted.to(tokens.dtype))


def exchanged(rows: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup, compute: Compute) -> torch.Tensor:
    """Compute as `compute` does, by workers of a group that each have an equal part of the experts; collective over it.

    Args:
        rows: sorted by expert, [rows, width].
        counts: rows of each expert of all workers, [experts].
        group: the workers, in the order of their experts.
        compute: of this worker's experts.
    """
    workers = group.size()
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts.contiguous(), group=group)
    received = theirs.view(workers, -1)  # [worker, own expert]
    sizes = torch.stack([counts.view(workers, -1).sum(1), received.sum(1)]).tolist()  # a GPU is waited for once
    arrived = send_rows(rows, sizes[1], sizes[0], group)
    own = torch.arange(received.shape[1], device=counts.device).repeat(workers)
    order = own.repeat_interleave(theirs, output_size=sum(sizes[1])).argsort(stable=True)
    computed = compute(arrived.index_select(0, order), received.sum(0))
    back = computed.index_select(0, order.argsort())
    return send_rows(back, sizes[0], sizes[1], group)


def shared_out(rows: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup, compute: Compute) -> torch.Tensor:
    """Compute as `compute` does, by workers with the same rows that each compute a part of them; collective over them.

    Args:
        rows: sorted by expert, [rows, width]; the same on all workers.
        counts: rows of each expert, [experts].
        group: the workers.
        compute: of a part of the rows.
    """
    share = -(-len(rows) // group.size())
    begin = min(len(rows), share * group.rank())
    end = min(len(rows), begin + share)
    ends = counts.cumsum(0)
    own = ends.clamp(begin, end) - (ends - counts).clamp(begin, end)
    part = _Part.apply(rows, begin, end, group)  # type: ignore[no-untyped-call]
    whole: torch.Tensor = _Whole.apply(compute(part, own), begin, len(rows), group)  # type: ignore[no-untyped-call]
    return whole


def send_rows(
    rows: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send rows to the workers of a group, and their gradients back; collective over it.

    Args:
        rows: sorted by the worker that they go to, [rows, ...].
        arriving: rows from each worker.
        leaving: rows to each worker.
        group: the workers.
    """
    return _AllToAll.apply(rows, arriving, leaving, group)  # type: ignore[no-any-return, no-untyped-call]


class _Part(torch.autograd.Function):
    """Some rows of those that all workers have; the gradient is that of all of them."""

    @staticmethod
    def forward(node: Any, rows: torch.Tensor, begin: int, end: int, group: dist.ProcessGroup) -> torch.Tensor:
        node.rows, node.group = len(rows), group
        return rows[begin:end].clone()

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gathered(gradient, node.rows, node.group), None, None, None


class _Whole(torch.autograd.Function):
    """The rows of all workers; each has the same gradient of them, and takes its own part."""

    @staticmethod
    def forward(node: Any, part: torch.Tensor, begin: int, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
        node.begin, node.end = begin, begin + len(part)
        return _gathered(part, rows, group)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient[node.begin : node.end], None, None, None


def _gathered(part: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all workers one after the other, [rows, width]; all are as long as the first, but the last ones."""
    share = -(-rows // group.size())
    padded = part.new_zeros((share, *part.shape[1:]))
    padded[: len(part)] = part
    whole = part.new_empty((share * group.size(), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[:rows]


class _AllToAll(torch.autograd.Function):
    """Rows to other workers; the gradient comes the same way back."""

    @staticmethod
    def forward(
        node: Any, rows: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        node.arriving, node.leaving, node.group = arriving, leaving, group
        return _sent(rows, arriving, leaving, group)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _sent(gradient, node.leaving, node.arriving, node.group), None, None, None


def _sent(
    rows: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    arrived = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(arriving), list(leaving), group=group)
    return arrived


def scaled(parameter: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the parameter as it is; its gradient is multiplied by a factor."""
    return _Scaled.apply(parameter, factor)  # type: ignore[no-any-return, no-untyped-call]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, parameter: torch.Tensor, factor: float) -> torch.Tensor:
        node.factor = factor
        return parameter.view_as(parameter)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * node.factor, None
