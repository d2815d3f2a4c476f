"""A transformer in the numbers that its parameters and its memory follow from. Pure.

Kept for the backward pass, in elements of the width h and the inner width f: input and output of the norms, q, k, v,
the output of attention twice, and 2 f or, with a gate, 4 f. With f = 4 h that is the 34 h bytes of Korthikanti et al.
(https://arxiv.org/abs/2205.05198), with attention that keeps no square of the sequence. Biases and the norms' weights
are too few to count.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtctl.advise.sizes import short_count
from dtctl.errors import UsageError
from dtctl.estimate.model import Model

UPCAST = 13.0
"""Bytes for each unit of width: fitted to what eager blocks are published to need more than compiled ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention over compressed keys and values (MLA of DeepSeek, https://arxiv.org/abs/2405.04434)."""

    query_rank: int
    """0: queries are not compressed."""
    rank: int
    rope: int
    """Width of a head's part that has a position."""
    nope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer as its config describes it."""

    name: str
    layers: int
    """All blocks: of an encoder and of a decoder together."""
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    head_dim: float
    ffn: int
    """Inner width of a block without experts."""
    gated: bool = False
    tied: bool = False
    experts: int = 1
    """Experts of a block that has some, without those that every token uses."""
    experts_used: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Inner width of the experts that every token uses, together."""
    dense: int = 0
    """Blocks without experts, of a model that has some."""
    cross: int = 0
    """Blocks that attend to an encoder's output, too."""
    latent: Latent | None = None
    norms: int = 2
    """Norms of a block."""
    positions: int = 0
    """Learned embeddings of positions."""
    embed: int = 0
    """Width of the embeddings where it is not `hidden`."""

    @property
    def plain(self) -> bool:
        """Return whether a plain GPT has these numbers: nothing but attention of full width and two matrices."""
        wide = self.head_dim * self.heads == self.hidden and self.kv_heads == self.heads
        return wide and self.experts == 1 and not (self.gated or self.cross or self.latent or self.embed)


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a block: parameters, and elements kept for each token, including the results of products."""

    params: float
    saved: float
    products: float


def check(shape: Shape) -> None:
    """Refuse impossible numbers.

    Raises:
        UsageError: a number is not above 0, or they do not fit together.
    """
    for key in ("layers", "hidden", "heads", "kv_heads", "vocab", "seq", "head_dim", "ffn", "experts", "experts_used"):
        value = getattr(shape, key)
        if value < 1:
            raise UsageError(f"{key} must be at least 1, and is {value:g}")
    if shape.head_dim != int(shape.head_dim):
        raise UsageError(f"hidden {shape.hidden} cannot be divided by {shape.heads} heads")
    if shape.heads % shape.kv_heads:
        raise UsageError(f"{shape.heads} heads cannot be divided by {shape.kv_heads} kv_heads")
    if shape.experts_used > shape.experts:
        raise UsageError(f"{shape.experts_used} experts of {shape.experts} cannot be used")


def model_of(shape: Shape, *, params: float | None = None, doubts: tuple[str, ...] = ()) -> Model:
    """Return the model of a shape; of `params`, counted elsewhere, blocks get what embeddings leave.

    Raises:
        UsageError: as `check`, or `params` are fewer than the embeddings.
    """
    check(shape)
    attention, dense, sparse = _attention(shape), _mlp(shape, shape.ffn), _experts(shape)
    many = shape.layers - shape.dense if shape.experts > 1 else 0
    few = shape.layers - many
    width = shape.embed or shape.hidden
    routed = _mlp(shape, float((shape.expert_ffn or shape.ffn) * shape.experts_used))
    looked_up = float(shape.vocab * width)
    root = looked_up * (1 if shape.tied else 2) + shape.positions * shape.hidden
    root += 2.0 * shape.embed * shape.hidden
    crossed = shape.cross / shape.layers
    # Blocks that differ are counted by their mean.
    block = attention.params * (1 + crossed) + (few * dense.params + many * sparse.params) / shape.layers
    total = root + shape.layers * block
    if params is not None:
        if params <= 0:
            raise UsageError(f"params must be above 0, and is {params:g}")
        if params < root:
            raise UsageError(f"{params:g} parameters are fewer than the {root:g} of the embeddings alone")
        block, total = (params - root) / shape.layers, params
    expert = _mlp(shape, shape.expert_ffn or shape.ffn).params
    idle = expert * (shape.experts - shape.experts_used) * many
    activations = (2 * shape.norms) * shape.hidden + attention.saved + crossed * (attention.saved + 2 * shape.hidden)
    products = attention.products * (1 + crossed)
    active = max(total - (0 if shape.tied else looked_up) - idle, 1.0)
    return Model(
        name=shape.name,
        params=total,
        active_params=active,
        layers=shape.layers,
        block_params=block,
        seq=shape.seq,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        vocab=shape.vocab,
        block_input=2.0 * shape.hidden,
        block_kept=2.0 * (activations + (few * dense.saved + many * sparse.saved) / shape.layers),
        block_products=2.0 * (products + (few * dense.products + many * sparse.products) / shape.layers),
        block_upcast=_upcast(shape),
        expert_params=expert * shape.experts * many,
        table_params=looked_up + shape.positions * shape.hidden,
        stacked_params=expert * shape.experts * many,
        experts=shape.experts if many else 0,
        experts_used=shape.experts_used if many else 0,
        expert_width=(shape.expert_ffn or shape.ffn) if many else 0,
        expert_kept=2.0 * many * routed.saved / shape.layers,
        expert_products=2.0 * many * (routed.products - shape.hidden) / shape.layers,
        ffn=shape.ffn if shape.plain and params is None else 0,
        assumed=_description(shape, total, active),
        doubts=doubts,
    )


def _upcast(shape: Shape) -> float:
    """Bytes of a token that RMSNorms and rotary embeddings keep beyond what a LayerNorm does, in steps of their own.

    The norm's input and quotient are in fp32, and so are queries and keys. Models with a gate have both.
    """
    if not shape.gated:
        return 0.0
    return UPCAST * shape.hidden


def _attention(shape: Shape) -> _Part:
    hidden, heads, latent = shape.hidden, shape.heads, shape.latent
    if latent is None:
        width = shape.head_dim * heads
        share = shape.kv_heads / heads
        created = width * (1 + 2 * share)
        return _Part(hidden * width * (2 + 2 * share), created + 2 * width, created + width + hidden)
    query, value = heads * (latent.nope + latent.rope), heads * latent.value
    query_params = hidden * latent.query_rank + latent.query_rank * query if latent.query_rank else hidden * query
    latent_params = hidden * (latent.rank + latent.rope) + latent.rank * heads * (latent.nope + latent.value)
    created = 2 * query + value + latent.query_rank + latent.rank
    return _Part(query_params + latent_params + value * hidden, created + 2 * value, created + value + hidden)


def _mlp(shape: Shape, inner: float) -> _Part:
    return _Part(
        (3 if shape.gated else 2) * shape.hidden * inner,
        (4 if shape.gated else 2) * inner,
        (2 if shape.gated else 1) * inner + shape.hidden,
    )


def _experts(shape: Shape) -> _Part:
    """Return all experts of a block: parameters of all, work of those that a token uses, and the router."""
    expert_width = shape.expert_ffn or shape.ffn
    work = _mlp(shape, expert_width * shape.experts_used + shape.shared_ffn)
    params = _mlp(shape, float(expert_width * shape.experts + shape.shared_ffn)).params + shape.hidden * shape.experts
    return _Part(params, work.saved, work.products)


def _description(shape: Shape, params: float, active_params: float) -> str:
    """Return the line that says what was computed with."""
    blocks = f"{shape.layers} blocks"
    if shape.cross:
        blocks += f" ({shape.layers - shape.cross} of the encoder, {shape.cross} of the decoder)"
    heads = f"{shape.heads} heads of {shape.head_dim:g}"
    if shape.latent:
        heads = f"{shape.heads} heads over compressed keys and values of {shape.latent.rank}"
    elif shape.kv_heads != shape.heads:
        heads += f" ({shape.kv_heads} of keys and values)"
    inner = f"inner width {shape.ffn}" + (" with a gate" if shape.gated else "")
    if shape.experts > 1:
        inner = f"{shape.experts} experts of {shape.expert_ffn or shape.ffn} ({shape.experts_used} used)"
        inner += f" and {shape.shared_ffn} that all use" if shape.shared_ffn else ""
        inner += f" in {shape.layers - shape.dense} blocks" if shape.dense else ""
    ties = "output tied to the embedding" if shape.tied else "untied output"
    active = f", {short_count(active_params)} of them at work for a token" if shape.experts > 1 else ""
    return (
        f"{blocks} of width {shape.hidden}, {heads}, {inner}, vocabulary {shape.vocab}, {ties}: "
        f"{short_count(params)} parameters{active}"
    )
