"""The figures of a model from given numbers."""

from __future__ import annotations

from dtctl.advise.shape import TransformerShape, build_model_profile
from dtctl.estimate.model import ModelProfile


def build_decoder_model(
    *,
    layers: int,
    hidden: int,
    vocab: int,
    seq: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn: int | None = None,
    gated: bool = False,
    tied: bool = False,
    experts: int = 1,
    experts_used: int = 1,
    params: float | None = None,
    name: str = "model",
) -> ModelProfile:
    """Return a decoder (GPT, Llama) from its numbers; `dtctl.advise.shape` describes what is counted.

    Raises:
        UsageError: a number is not above 0, or they do not fit together.
    """
    heads = heads or max(1, hidden // 128)
    shape = TransformerShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads or heads, vocab=vocab, seq=seq,
        head_dim=head_dim or hidden / heads, ffn=ffn or 4 * hidden, gated=gated, tied=tied, experts=experts,
        experts_used=experts_used,
    )  # fmt: skip
    return build_model_profile(shape, params=params)
