"""Context parallel: the tokens of a long sequence spread over workers that have the same samples.

Between the model's first block and its last, each worker has a part of the tokens, and with it that part of all
activations. Attention brings the keys and values of all tokens to every worker (as Llama 3 was trained, arXiv
2407.21783, section 3.3.2) and computes the rows of its own ones. A worker has two pieces of the sequence, the r-th from
the front and the r-th from the back, so that causal attention is the same work for all (arXiv 2311.09431).

What comes before the blocks and after them sees whole sequences, on every worker: embeddings, positions and the loss
function are left as they are. A block must take the stream, [samples, tokens, width], as its first argument and return
it, and mix tokens in `torch.nn.functional.scaled_dot_product_attention` only. Further tensors that are handed to a
block lose the tokens of other workers, if they have one dim of the sequence's length; a mask, which has two, does not.

torch's own context_parallel (2.13) supports the attention kernels of GPUs only, and needs a list of all buffers.

Gradients: the way back into the blocks is widened by the number of workers, so that averaging over them, as is done
with replicas, adds up what each has computed for its tokens, and leaves alone what all have computed alike.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dtctl.errors import PlanError
from dtctl.runtime.strategies.blocks import Blocks
from dtctl.runtime.strategies.comparison import Seen, kind_of

ATTENTION: Final = nn.functional.scaled_dot_product_attention


class Context:
    """The part of the sequence that this worker has."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.workers = group, group.rank(), group.size()
        self.inside = False
        """True if a forward pass is between the first and the last block."""
        self.whole = 0
        """Tokens of the sequence that is being computed."""
        self._orders: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def piece(self) -> int:
        """Tokens of one of this worker's two pieces."""
        return self.whole // (2 * self.workers)

    def own(self, device: torch.device) -> torch.Tensor:
        """Return which tokens this worker has, [tokens / workers]."""
        return self._order(device)[0][self.rank]

    def natural(self, device: torch.device) -> torch.Tensor:
        """Return where in the workers' parts, one after the other, each token of the sequence is, [tokens]."""
        return self._order(device)[1]

    def _order(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        key = (self.whole, device)
        if key not in self._orders:
            pieces = torch.arange(self.whole, device=device).view(2 * self.workers, self.piece)
            parts = torch.stack([pieces[: self.workers], pieces[self.workers :].flip(0)], dim=1).flatten(1)
            self._orders[key] = (parts, parts.flatten().argsort())
        return self._orders[key]

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Keep the own tokens alone, before the first block."""
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
        return (stream.index_select(1, self.own(stream.device)), *args[1:]), kwargs

    def beside(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Add the further inputs of every block, before it."""
        return (args[0], *map(self._part, args[1:])), {name: self._part(value) for name, value in kwargs.items()}

    def leave(self, _: nn.Module, __: Any, stream: torch.Tensor) -> torch.Tensor:
        """Bring all tokens together, after the last block."""
        self.inside = False
        return _Join.apply(stream, self)  # type: ignore[no-any-return, no-untyped-call]

    def _part(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dims = [dim for dim, size in enumerate(value.shape) if size == self.whole]
        if len(dims) > 1 and value.dim() > 2 and value.shape[-2] != self.whole:
            dims = [1]  # as many samples as tokens
        return value.index_select(dims[0], self.own(value.device)) if len(dims) == 1 else value

    def together(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all workers along a dim, in the order of the sequence."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.workers)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim).index_select(dim, self.natural(part.device))

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
        """Compute torch's scaled_dot_product_attention of own queries over the keys and values of all tokens.

        Shapes:
            query, key, value: [..., heads, tokens / workers, width]; the result as the query.
        """
        key, value = (_Gather.apply(one, self) for one in (key, value))  # type: ignore[no-untyped-call]
        if not is_causal:
            return ATTENTION(query, key, value, self._rows(attn_mask), dropout_p, **options)
        results = []
        for index, rows in enumerate(torch.split(query, self.piece, dim=-2)):
            begin = self.piece * (self.rank if index == 0 else 2 * self.workers - 1 - self.rank)
            end = begin + self.piece
            results.append(lower_right(rows, key[..., :end, :], value[..., :end, :], dropout_p, **options))
        return torch.cat(results, dim=-2)

    def _rows(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is None or (mask.shape[-2] == 1 and mask.shape[-1] == self.whole):
            return mask
        if mask.shape[-2:] != (self.whole, self.whole):
            raise PlanError(
                f"an attention mask of {mask.shape[-2]} x {mask.shape[-1]} does not fit {self.whole} tokens",
                where="train.strategy.cp",
                hint="build masks before the blocks, for whole sequences, or use is_causal",
            )
        return mask.index_select(-2, self.own(mask.device))


class _Join(torch.autograd.Function):
    """Operation that joins the parts of the stream. Every worker continues with all of it, in the same way."""

    @staticmethod
    def forward(node: Any, part: torch.Tensor, context: Context) -> torch.Tensor:
        node.context, node.whole = context, context.whole
        return context.together(part, 1)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context: Context = node.context
        context.whole = node.whole
        return gradient.index_select(1, context.own(gradient.device)) * context.workers, None


class _Gather(torch.autograd.Function):
    """Keys or values of the own tokens to those of all; back, what all workers found out about the own ones."""

    @staticmethod
    def forward(node: Any, part: torch.Tensor, context: Context) -> torch.Tensor:
        node.context, node.whole = context, context.whole
        return context.together(part, part.dim() - 2)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context: Context = node.context
        context.whole = node.whole
        parts = [
            gradient.index_select(-2, tokens).contiguous() for tokens in context._order(gradient.device)[0].unbind()
        ]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=context.group)
        return own, None


_current: list[Context] = []
"""Context that attention uses; a process trains one model at a time, and the newest counts."""


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    if _current:
        context = _current[-1]
        # Blocks that are computed again are so in the backward pass, which computes nothing else with attention.
        if context.inside or torch._C._current_graph_task_id() != -1:
            return context.attention(*args, **kwargs)
    return ATTENTION(*args, **kwargs)


def lower_right(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, **options: Any
) -> torch.Tensor:
    """Compute causal attention, where the queries are the last of the tokens of keys and values.

    On GPUs it takes no mask: one of 128k tokens needs gigabytes per layer, and flash attention accepts none.
    """
    rows, end = query.shape[-2], key.shape[-2]
    if query.device.type == "cpu":
        seen = torch.ones(rows, end, dtype=torch.bool, device=query.device).tril(end - rows)
        return ATTENTION(query, key, value, seen, dropout_p, **options)
    return _unmasked(query, key, value, dropout_p, **options)


def _unmasked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, **options: Any
) -> torch.Tensor:
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if options.pop("enable_gqa", False):  # which the memory-efficient kernel does not support
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    bias = CausalBias(CausalVariant.LOWER_RIGHT, query.shape[-2], key.shape[-2])
    held = list(_current)
    _current.clear()  # it calls torch.nn.functional's attention again, which must be torch's own then
    try:
        output: torch.Tensor = CausalBias._dispatch(query, key, value, bias, dropout_p, **options)
    finally:
        _current[:] = held
    return output


def forget() -> None:
    """Let attention be torch's own again: another model is to be trained."""
    _current.clear()
    nn.functional.scaled_dot_product_attention = ATTENTION


def require_equal(found: Blocks | None, group: dist.ProcessGroup, seen: Seen) -> None:
    """Compare each block over a part of the tokens with the same over all; collective over the group.

    Args:
        found: the model's blocks.
        group: workers with the same samples.
        seen: calls of the blocks.

    Raises:
        PlanError: a block computes something else, or was not called.
    """
    done: set[object] = set()
    for name, block in zip(found.names, found.modules, strict=True) if found is not None else ():
        if name not in seen.calls:
            raise PlanError(
                f"block {name} was not used in the first forward pass, so nothing shows that its tokens can be divided",
                where="train.strategy.cp",
                hint="call all blocks in each pass, or name others with `train.blocks`",
            )
        kind = kind_of(block)
        if kind in done:
            continue
        done.add(kind)
        try:
            difference = seen.compare(name, block).difference(
                lambda twin: divide(Blocks(name="", container=nn.ModuleList([twin])), group),
                group,
                averaged=True,
            )
        finally:
            forget()
        if not difference.is_rounding or difference.added_up:
            raise PlanError(
                f"block {name} computes something else if its tokens are divided over {group.size()} workers: "
                f"{difference.describe()}",
                where="train.strategy.cp",
                hint="a block must mix tokens in torch.nn.functional.scaled_dot_product_attention only, and look at no "
                "position by itself",
            )


def divide(found: Blocks | None, group: dist.ProcessGroup) -> Context:
    """Spread the tokens inside of a model's blocks over a group.

    Args:
        found: the model's blocks.
        group: workers with the same samples.

    Returns:
        How they are spread.

    Raises:
        PlanError: the model has no blocks, or they mix tokens otherwise.
    """
    if found is None:
        raise PlanError("cp needs a model with a list of blocks", where="train.blocks", hint="name the list")
    if any(isinstance(part, _BatchNorm) for block in found.modules for part in block.modules()):
        raise PlanError(
            "the blocks have BatchNorm, whose means would be of each worker's tokens alone",
            where="train.strategy.cp",
            hint="use LayerNorm or RMSNorm",
        )
    context = Context(group)
    for block in found.modules:
        block.register_forward_pre_hook(context.beside, with_kwargs=True)
    found.modules[0].register_forward_pre_hook(context.enter, with_kwargs=True, prepend=True)
    found.modules[-1].register_forward_hook(context.leave)
    _current[:] = [context]
    nn.functional.scaled_dot_product_attention = _attention
    return context
