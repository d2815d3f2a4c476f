"""Plain mixture of experts: a router, experts that each process some tokens, and experts that all tokens use.

    MoE(width=512, hidden=1024, experts=16, top_k=2, shared=1, bias_rate=1e-3)

Values that depend on several tokens (capacity, balance) are computed within a sample, so that a run is the same for any
division of its batches over workers and passes. Balancing by a bias counts over the whole global batch.

Sources: Shazeer et al. 2017 (top-k), Switch Transformers (capacity, balance loss), ST-MoE (z-loss), DeepSeekMoE and
DeepSeek-V3 (shared experts, balance loss per sequence, bias).
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.moe import accounting
from dtctl.runtime.moe.dispatch import dispatch_to_experts
from dtctl.runtime.moe.grouped import compute_feed_forward


class SequenceSharding(Protocol):
    """Division of the tokens of a sample over workers (mesh axis cp)."""

    group: dist.ProcessGroup
    workers: int

    def gather_sequence(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all workers along a dim, in the order of the sequence."""

    def get_own_positions(self, device: torch.device) -> torch.Tensor:
        """Return the positions of this worker's tokens, [tokens / workers]."""


class Experts(nn.Module):
    """Gated feed-forward networks (SwiGLU), computed one after another.

    The class has the form that `ep` divides: `num_experts`, parameters whose first dim is the expert, and a forward
    pass over rows that are sorted by expert.
    """

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(parameter.shape[2] ** -0.5), parameter.shape[2] ** -0.5)  # same as nn.Linear

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs for rows.

        Args:
            rows: rows sorted by expert, [rows, width].
            counts: number of rows of each expert, [experts].
        """
        return compute_feed_forward(rows, counts.tolist(), self.gate, self.up, self.down)


class SharedExperts(nn.Module):
    """A gated feed-forward network that all tokens use."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the outputs for all tokens, [..., width]."""
        result: torch.Tensor = self.down(nn.functional.silu(self.gate(stream)) * self.up(stream))
        return result


class MoE(nn.Module):
    """Feed-forward network that uses a part of its experts for each token; it replaces that of a block.

    Attributes:
        sequence: division of a sample's tokens over workers; set by the runtime.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        *,
        width: int,
        hidden: int,
        experts: int,
        top_k: int = 2,
        shared: int = 0,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        route_scale: float = 1.0,
        capacity: float | None = None,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        """Make a layer.

        Args:
            width: width of the stream.
            hidden: inner width of each expert.
            experts: number of experts.
            top_k: number of experts that each token uses.
            shared: number of further experts that all tokens use, as one network of that many times `hidden`.
            scores: function from the router's logits to weights.
            normalize: True if the weights of a token's choices are scaled to a sum of 1.
            route_scale: factor of these weights. Use `top_k` if an expert is `1 / top_k` of the dense network that this
                layer replaces: the dense network adds up its parts, while weights with the sum 1 give a mean.
            capacity: largest number of choices of one sample that an expert accepts, as a multiple of an equal share;
                others are dropped, beginning with the last tokens. None: no limit.
            balance_loss: coefficient of a loss that is 1 if the experts are used evenly, and larger otherwise; added to
                the gradient, not to the reported loss.
            z_loss: coefficient of the mean squared logarithm of the sum of the exponentials of the logits.
            bias_rate: amount by which the bias of an expert decreases (or increases) after a step of the runtime's loop
                in which it got more (or less) than the mean of the global batch. The bias changes the choice of
                experts, but no weight.

        Raises:
            PlanError: the layer has fewer experts than choices.
        """
        super().__init__()
        if not 1 <= top_k <= experts:
            raise PlanError(f"{top_k} of {experts} experts cannot be chosen", where="MoE.top_k")
        self.width, self.num_experts, self.top_k = width, experts, top_k
        self.scores, self.normalize, self.route_scale, self.capacity = scores, normalize, route_scale, capacity
        self.balance_loss, self.z_loss, self.bias_rate = balance_loss, z_loss, bias_rate
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)
        self.shared = SharedExperts(width, shared * hidden) if shared else None
        self.register_buffer("bias", torch.zeros(experts) if bias_rate else None)
        self.sequence: SequenceSharding | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream after the experts, in the same shape; residual and norm belong to the block.

        Args:
            stream: hidden states, [samples, tokens, width].
        """
        if stream.dim() != 3:
            raise PlanError(
                f"the stream has {stream.dim()} dims, and a mixture of experts takes [samples, tokens, width]",
                where="MoE",
                hint="give it whole sequences: capacity and balance are counted within a sample",
            )
        logits = self._compute_router_logits(stream)
        probabilities = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        ranked = probabilities if self.bias is None else probabilities.detach() + self.bias
        chosen = ranked.topk(self.top_k, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.route_scale
        kept = chosen if self.capacity is None else self._drop_overflow_choices(chosen)
        if accounting.is_first_time():
            self._count_chosen_experts(chosen, kept)
        if torch.is_grad_enabled() and self.training:
            stream = self._with_losses(stream, logits, probabilities, chosen)
        flat = stream.reshape(-1, self.width)
        mixed = dispatch_to_experts(
            flat, kept.flatten(0, 1), weights.flatten(0, 1).to(flat.dtype), self.num_experts, self.experts
        ).view_as(stream)
        return mixed if self.shared is None else mixed + self.shared(stream)

    def _compute_router_logits(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the logits in fp32 or more, since a rounded logit may choose another expert."""
        wide = torch.promote_types(stream.dtype, torch.float32)
        with torch.autocast(stream.device.type, enabled=False):
            return nn.functional.linear(stream.to(wide), self.router.weight.to(wide))

    def _count_sample_tokens(self, part: torch.Tensor) -> int:
        """Return the number of tokens in a whole sample; `part` is this worker's, [samples, tokens, ...]."""
        return part.shape[1] * (self.sequence.workers if self.sequence is not None else 1)

    def _drop_overflow_choices(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the choices, with `num_experts` in place of those whose expert is already full."""
        assert self.capacity is not None  # noqa: S101  # for the type checker
        limit = math.ceil(self.capacity * self._count_sample_tokens(chosen) * self.top_k / self.num_experts)
        whole = chosen if self.sequence is None else self.sequence.gather_sequence(chosen, 1)
        marks = nn.functional.one_hot(whole.flatten(1), self.num_experts)  # [samples, tokens * top_k, experts]
        place = (marks.cumsum(1) * marks).sum(-1).view_as(whole)  # position in the queue of the expert, from 1
        kept = whole.masked_fill(place > limit, self.num_experts)
        return kept if self.sequence is None else kept.index_select(1, self.sequence.get_own_positions(chosen.device))

    def _count_chosen_experts(self, chosen: torch.Tensor, kept: torch.Tensor) -> None:
        under_way = accounting.get_current_pass()
        if under_way.load is not None and under_way.samples != 0:
            counted, left = chosen[: under_way.samples], kept[: under_way.samples]
            sums = torch.bincount(counted.reshape(-1), minlength=self.num_experts)
            under_way.load.add(self, sums, (left == self.num_experts).sum())

    def _with_losses(
        self, stream: torch.Tensor, logits: torch.Tensor, probabilities: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        if not (self.balance_loss or self.z_loss):
            return stream
        tokens, losses = self._count_sample_tokens(logits), []  # tokens of each sample
        if self.balance_loss:
            shares = probabilities / probabilities.sum(-1, keepdim=True)
            marks = nn.functional.one_hot(chosen, self.num_experts).to(shares.dtype)
            used = marks.sum((1, 2)) / (tokens * self.top_k)  # [samples, experts]
            if self.sequence is not None:
                dist.all_reduce(used, group=self.sequence.group)
            losses.append(self.balance_loss * self.num_experts * (used * shares.sum(1) / tokens).sum(-1))
        if self.z_loss:
            losses.append(self.z_loss * logits.logsumexp(-1).square().sum(1) / tokens)
        total = torch.stack(losses).sum(0)
        # Inside of blocks gradients are multiplied by the number of workers that divide a sequence; see context.py.
        widened = self.sequence.workers if self.sequence is not None else 1
        return accounting.add_loss(stream, total, widened * accounting.get_current_pass().compute_sample_factors(total))
