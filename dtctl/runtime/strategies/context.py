"""Context parallel: the tokens of a long sequence are divided over workers that have the same samples.

Between the model's first block and its last, each worker has a part of the tokens, and with it that part of all
activations. Attention gathers the keys and values of all tokens on every worker (as for Llama 3, arXiv 2407.21783,
section 3.3.2) and computes the rows of the worker's own queries. A worker has two pieces of the sequence, the r-th from
the front and the r-th from the back, so that causal attention takes the same time on all workers (arXiv 2311.09431).

Embeddings, positions and the loss function, which are outside of the blocks, process whole sequences on every worker. A
block must take the stream, [samples, tokens, width], as its first argument and return it, and mix tokens in
`torch.nn.functional.scaled_dot_product_attention` only. Other arguments of a block are cut to the worker's tokens if
they have one dim of the sequence's length; a mask, which has two, is not.

torch's own context_parallel (2.13) supports the attention kernels of GPUs only, and needs a list of all buffers.

Gradients that enter the blocks in the backward pass are multiplied by the number of workers. The later average over
workers then adds up the gradients that each has computed from its tokens, and leaves unchanged those that all have
computed equally.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dtctl.errors import PlanError
from dtctl.runtime.strategies.blocks import RepeatedBlocks
from dtctl.runtime.strategies.comparison import RecordedCalls, describe_module_kind

ATTENTION: Final = nn.functional.scaled_dot_product_attention


class ContextParallel:
    """The part of a sequence that this worker has."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.workers = group, group.rank(), group.size()
        self.inside = False
        """True while a forward pass is between the first and the last block."""
        self.whole = 0
        """Number of tokens in the sequence that is being computed."""
        self._orders: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def piece(self) -> int:
        """Return the number of tokens in each of this worker's two pieces."""
        return self.whole // (2 * self.workers)

    def get_own_positions(self, device: torch.device) -> torch.Tensor:
        """Return the positions of this worker's tokens, [tokens / workers]."""
        return self._build_token_order(device)[0][self.rank]

    def get_inverse_order(self, device: torch.device) -> torch.Tensor:
        """Return the index of each token of the sequence in the concatenated parts of the workers, [tokens]."""
        return self._build_token_order(device)[1]

    def _build_token_order(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        key = (self.whole, device)
        if key not in self._orders:
            pieces = torch.arange(self.whole, device=device).view(2 * self.workers, self.piece)
            parts = torch.stack([pieces[: self.workers], pieces[self.workers :].flip(0)], dim=1).flatten(1)
            self._orders[key] = (parts, parts.flatten().argsort())
        return self._orders[key]

    def shard_first_inputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cut the stream before the first block to this worker's tokens."""
        stream = args[0]
        if stream.dim() < 3:
            raise PlanError(
                f"the first block is given a tensor of {stream.dim()} dims, and cp divides [samples, tokens, width]",
                where="train.strategy.cp",
                hint="use fsdp for models without sequences",
            )
        self.whole, self.inside = stream.shape[1], True
        if self.whole % (2 * self.workers):
            raise PlanError(
                f"a sequence of {self.whole} tokens cannot be divided into {2 * self.workers} pieces, two for each of "
                f"{self.workers} workers",
                where="train.strategy.cp",
                hint=f"use sequences of a multiple of {2 * self.workers} tokens",
            )
        return (stream.index_select(1, self.get_own_positions(stream.device)), *args[1:]), kwargs

    def shard_block_inputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cut the other inputs of every block to this worker's tokens."""
        return (args[0], *map(self._select_own_tokens, args[1:])), {
            name: self._select_own_tokens(value) for name, value in kwargs.items()
        }

    def gather_last_output(self, _: nn.Module, __: Any, stream: torch.Tensor) -> torch.Tensor:
        """Gather all tokens after the last block."""
        self.inside = False
        return _GatherSequence.apply(stream, self)  # type: ignore[no-any-return, no-untyped-call]

    def _select_own_tokens(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dims = [dim for dim, size in enumerate(value.shape) if size == self.whole]
        if len(dims) > 1 and value.dim() > 2 and value.shape[-2] != self.whole:
            dims = [1]  # there are as many samples as tokens, so the sizes do not distinguish the dims
        return value.index_select(dims[0], self.get_own_positions(value.device)) if len(dims) == 1 else value

    def gather_sequence(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all workers along a dim, in the order of the sequence."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.workers)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim).index_select(dim, self.get_inverse_order(part.device))

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Compute torch's scaled_dot_product_attention of this worker's queries over the keys and values of all tokens.

        Shapes:
            query, key, value: [..., heads, tokens / workers, width]; the result as the query.
        """
        key, value = (_GatherKeyValues.apply(one, self) for one in (key, value))  # type: ignore[no-untyped-call]
        if not is_causal:
            return ATTENTION(query, key, value, self._select_mask_rows(attn_mask), dropout_p, **options)
        results = []
        for index, rows in enumerate(torch.split(query, self.piece, dim=-2)):
            begin = self.piece * (self.rank if index == 0 else 2 * self.workers - 1 - self.rank)
            end = begin + self.piece
            results.append(lower_right(rows, key[..., :end, :], value[..., :end, :], dropout_p, **options))
        return torch.cat(results, dim=-2)

    def _select_mask_rows(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is None or (mask.shape[-2] == 1 and mask.shape[-1] == self.whole):
            return mask
        if mask.shape[-2:] != (self.whole, self.whole):
            raise PlanError(
                f"an attention mask of {mask.shape[-2]} x {mask.shape[-1]} does not fit {self.whole} tokens",
                where="train.strategy.cp",
                hint="build masks before the blocks, for whole sequences, or use is_causal",
            )
        return mask.index_select(-2, self.get_own_positions(mask.device))


class _GatherSequence(torch.autograd.Function):
    """Operation that joins the parts of the stream; every worker continues with the whole stream."""

    @staticmethod
    def forward(node: Any, part: torch.Tensor, context: ContextParallel) -> torch.Tensor:
        node.context, node.whole = context, context.whole
        return context.gather_sequence(part, 1)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context: ContextParallel = node.context
        context.whole = node.whole
        return gradient.index_select(1, context.get_own_positions(gradient.device)) * context.workers, None


class _GatherKeyValues(torch.autograd.Function):
    """Operation that gathers the keys or values of all tokens.

    Its backward pass adds up the gradients that all workers have for a worker's part.
    """

    @staticmethod
    def forward(node: Any, part: torch.Tensor, context: ContextParallel) -> torch.Tensor:
        node.context, node.whole = context, context.whole
        return context.gather_sequence(part, part.dim() - 2)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context: ContextParallel = node.context
        context.whole = node.whole
        parts = [
            gradient.index_select(-2, tokens).contiguous()
            for tokens in context._build_token_order(gradient.device)[0].unbind()
        ]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=context.group)
        return own, None


_current: list[ContextParallel] = []
"""Context that attention uses; a process trains one model at a time, so the newest is used."""


def _dispatch_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    if _current:
        context = _current[-1]
        # Recomputed blocks are computed in the backward pass, which contains no other attention.
        if context.inside or torch._C._current_graph_task_id() != -1:
            return context.attention(*args, **kwargs)
    return ATTENTION(*args, **kwargs)


def lower_right(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, **options: Any
) -> torch.Tensor:
    """Compute causal attention whose queries are the last tokens of the keys and values.

    On GPUs it takes no mask: one of 128k tokens needs gigabytes per layer, and flash attention accepts none.
    """
    rows, end = query.shape[-2], key.shape[-2]
    if query.device.type == "cpu":
        seen = torch.ones(rows, end, dtype=torch.bool, device=query.device).tril(end - rows)
        return ATTENTION(query, key, value, seen, dropout_p, **options)
    return _compute_unmasked_attention(query, key, value, dropout_p, **options)


def _compute_unmasked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, **options: Any
) -> torch.Tensor:
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if options.pop("enable_gqa", False):  # the memory-efficient kernel does not support it
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    bias = CausalBias(CausalVariant.LOWER_RIGHT, query.shape[-2], key.shape[-2])
    held = list(_current)
    _current.clear()  # it calls torch.nn.functional's attention, which must be torch's own during that call
    try:
        output: torch.Tensor = CausalBias._dispatch(query, key, value, bias, dropout_p, **options)
    finally:
        _current[:] = held
    return output


def restore_torch_attention() -> None:
    """Restore torch's own attention, before another model is trained."""
    _current.clear()
    nn.functional.scaled_dot_product_attention = ATTENTION


def require_equal_blocks(found: RepeatedBlocks | None, group: dist.ProcessGroup, seen: RecordedCalls) -> None:
    """Compare each block over a part of the tokens with the same block over all tokens; collective over the group.

    Args:
        found: blocks of the model.
        group: workers with the same samples.
        seen: calls of the blocks.

    Raises:
        PlanError: a block computes a different result, or was not called.
    """
    done: set[object] = set()
    for name, block in zip(found.names, found.modules, strict=True) if found is not None else ():
        if name not in seen.calls:
            raise PlanError(
                f"block {name} was not used in the first forward pass, so nothing shows that its tokens can be divided",
                where="train.strategy.cp",
                hint="call all blocks in each pass, or name others with `train.blocks`",
            )
        kind = describe_module_kind(block)
        if kind in done:
            continue
        done.add(kind)
        try:
            difference = seen.compare(name, block).compute_difference(
                lambda twin: divide_block_tokens(RepeatedBlocks(name="", container=nn.ModuleList([twin])), group),
                group,
                averaged=True,
            )
        finally:
            restore_torch_attention()
        if not difference.is_rounding or difference.added_up:
            raise PlanError(
                f"block {name} has other results if its tokens are divided over {group.size()} workers: "
                f"{difference.describe()}",
                where="train.strategy.cp",
                hint="a block must mix tokens in torch.nn.functional.scaled_dot_product_attention only, and look at no "
                "position by itself",
            )


def divide_block_tokens(found: RepeatedBlocks | None, group: dist.ProcessGroup) -> ContextParallel:
    """Divide the tokens inside of a model's blocks over a group.

    Args:
        found: blocks of the model.
        group: workers with the same samples.

    Returns:
        This worker's part of the sequence.

    Raises:
        PlanError: the model has no blocks, or they mix tokens by other means than attention.
    """
    if found is None:
        raise PlanError("cp needs a model with a list of blocks", where="train.blocks", hint="name the list")
    if any(isinstance(part, _BatchNorm) for block in found.modules for part in block.modules()):
        raise PlanError(
            "the blocks have BatchNorm, whose means would cover only the tokens of one worker",
            where="train.strategy.cp",
            hint="use LayerNorm or RMSNorm",
        )
    context = ContextParallel(group)
    for block in found.modules:
        block.register_forward_pre_hook(context.shard_block_inputs, with_kwargs=True)
    found.modules[0].register_forward_pre_hook(context.shard_first_inputs, with_kwargs=True, prepend=True)
    found.modules[-1].register_forward_hook(context.gather_last_output)
    _current[:] = [context]
    nn.functional.scaled_dot_product_attention = _dispatch_attention
    return context
