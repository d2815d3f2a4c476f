"""Transformer in the numbers that determine its parameters and its memory. Pure.

Kept for the backward pass, in elements of the width h and the inner width f: input and output of the norms, q, k, v,
the output of attention twice, and 2 f or, with a gate, 4 f. With f = 4 h that is the 34 h bytes of Korthikanti et al.
(https://arxiv.org/abs/2205.05198), with attention that keeps no square of the sequence. Biases and the norms' weights
are too few to count.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtctl.advise.sizes import format_short_count
from dtctl.errors import UsageError
from dtctl.estimate.model import ModelProfile

UPCAST = 13.0
"""Bytes for each unit of width, fitted to published differences between eager and compiled blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention over compressed keys and values (MLA of DeepSeek, https://arxiv.org/abs/2405.04434)."""

    query_rank: int
    """0: queries are not compressed."""
    rank: int
    rope: int
    """Width of the part of a head with rotary positions."""
    nope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A transformer as its config describes it."""

    name: str
    layers: int
    """Number of all blocks, of an encoder and of a decoder together."""
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
    """Number of experts in a block with experts, without shared experts."""
    experts_used: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Inner width of the experts that every token uses, together."""
    dense: int = 0
    """Number of blocks without experts in a model with experts."""
    cross: int = 0
    """Blocks that attend to an encoder's output, too."""
    latent: LatentAttention | None = None
    norms: int = 2
    """Number of norms of a block."""
    positions: int = 0
    """Number of learned embeddings of positions."""
    embed: int = 0
    """Width of the embeddings where it is not `hidden`."""

    @property
    def is_plain_gpt(self) -> bool:
        """Return whether these are the numbers of a plain GPT: only attention of full width and two matrices."""
        wide = self.head_dim * self.heads == self.hidden and self.kv_heads == self.heads
        return wide and self.experts == 1 and not (self.gated or self.cross or self.latent or self.embed)


@dataclass(frozen=True, slots=True)
class _BlockPart:
    """Part of a block: parameters, and elements kept for each token, including the results of products."""

    params: float
    saved: float
    products: float


def require_valid_shape(shape: TransformerShape) -> None:
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


def build_model_profile(
    shape: TransformerShape, *, params: float | None = None, doubts: tuple[str, ...] = ()
) -> ModelProfile:
    """Return the model of a shape; with `params` given, blocks get the parameters that are not in embeddings.

    Raises:
        UsageError: as `require_valid_shape`, or `params` are fewer than the embeddings.
    """
    require_valid_shape(shape)
    attention, dense, sparse = (
        _compute_attention_part(shape),
        _compute_mlp_part(shape, shape.ffn),
        _compute_experts_part(shape),
    )
    many = shape.layers - shape.dense if shape.experts > 1 else 0
    few = shape.layers - many
    width = shape.embed or shape.hidden
    routed = _compute_mlp_part(shape, float((shape.expert_ffn or shape.ffn) * shape.experts_used))
    looked_up = float(shape.vocab * width)
    root = looked_up * (1 if shape.tied else 2) + shape.positions * shape.hidden
    root += 2.0 * shape.embed * shape.hidden
    crossed = shape.cross / shape.layers
    # Blocks of different sizes are counted with their mean.
    block = attention.params * (1 + crossed) + (few * dense.params + many * sparse.params) / shape.layers
    total = root + shape.layers * block
    if params is not None:
        if params <= 0:
            raise UsageError(f"params must be above 0, and is {params:g}")
        if params < root:
            raise UsageError(f"{params:g} parameters are fewer than the {root:g} of the embeddings alone")
        block, total = (params - root) / shape.layers, params
    expert = _compute_mlp_part(shape, shape.expert_ffn or shape.ffn).params
    idle = expert * (shape.experts - shape.experts_used) * many
    activations = (2 * shape.norms) * shape.hidden + attention.saved + crossed * (attention.saved + 2 * shape.hidden)
    products = attention.products * (1 + crossed)
    active = max(total - (0 if shape.tied else looked_up) - idle, 1.0)
    return ModelProfile(
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
        block_upcast=_compute_upcast_bytes(shape),
        expert_params=expert * shape.experts * many,
        table_params=looked_up + shape.positions * shape.hidden,
        stacked_params=expert * shape.experts * many,
        experts=shape.experts if many else 0,
        experts_used=shape.experts_used if many else 0,
        expert_width=(shape.expert_ffn or shape.ffn) if many else 0,
        expert_kept=2.0 * many * routed.saved / shape.layers,
        expert_products=2.0 * many * (routed.products - shape.hidden) / shape.layers,
        ffn=shape.ffn if shape.is_plain_gpt and params is None else 0,
        assumed=_describe_model_shape(shape, total, active),
        doubts=doubts,
    )


def _compute_upcast_bytes(shape: TransformerShape) -> float:
    """Return the bytes per token that RMSNorms and rotary embeddings keep in addition to those of a LayerNorm.

    The norm's input and quotient are in fp32, and so are queries and keys. Models with a gate have both.
    """
    if not shape.gated:
        return 0.0
    return UPCAST * shape.hidden


def _compute_attention_part(shape: TransformerShape) -> _BlockPart:
    hidden, heads, latent = shape.hidden, shape.heads, shape.latent
    if latent is None:
        width = shape.head_dim * heads
        share = shape.kv_heads / heads
        created = width * (1 + 2 * share)
        return _BlockPart(hidden * width * (2 + 2 * share), created + 2 * width, created + width + hidden)
    query, value = heads * (latent.nope + latent.rope), heads * latent.value
    query_params = hidden * latent.query_rank + latent.query_rank * query if latent.query_rank else hidden * query
    latent_params = hidden * (latent.rank + latent.rope) + latent.rank * heads * (latent.nope + latent.value)
    created = 2 * query + value + latent.query_rank + latent.rank
    return _BlockPart(query_params + latent_params + value * hidden, created + 2 * value, created + value + hidden)


def _compute_mlp_part(shape: TransformerShape, inner: float) -> _BlockPart:
    return _BlockPart(
        (3 if shape.gated else 2) * shape.hidden * inner,
        (4 if shape.gated else 2) * inner,
        (2 if shape.gated else 1) * inner + shape.hidden,
    )


def _compute_experts_part(shape: TransformerShape) -> _BlockPart:
    """Return the experts of a block: parameters of all, computation of those that a token uses, and the router."""
    expert_width = shape.expert_ffn or shape.ffn
    work = _compute_mlp_part(shape, expert_width * shape.experts_used + shape.shared_ffn)
    params = (
        _compute_mlp_part(shape, float(expert_width * shape.experts + shape.shared_ffn)).params
        + shape.hidden * shape.experts
    )
    return _BlockPart(params, work.saved, work.products)


def _describe_model_shape(shape: TransformerShape, params: float, active_params: float) -> str:
    """Return a line with the figures that were computed with."""
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
    active = f", {format_short_count(active_params)} of them at work for a token" if shape.experts > 1 else ""
    return (
        f"{blocks} of width {shape.hidden}, {heads}, {inner}, vocabulary {shape.vocab}, {ties}: "
        f"{format_short_count(params)} parameters{active}"
    )
