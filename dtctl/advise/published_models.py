"""Shape of a model with a known number of parameters: that of the published model nearest in size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from dtctl.advise.shape import TransformerShape, build_model_profile
from dtctl.estimate.model import ModelProfile

NEAR: Final = 1.3
"""Largest ratio of a number of parameters to that of the published model whose shape is used."""


def _build_gpt_shape(name: str, layers: int, hidden: int, heads: int) -> TransformerShape:
    return TransformerShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, vocab=50257, seq=2048,
        head_dim=hidden / heads, ffn=4 * hidden, tied=True,
    )  # fmt: skip


def _build_llama_shape(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, tied: bool = False
) -> TransformerShape:
    return TransformerShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab, seq=2048,
        head_dim=hidden / heads, ffn=ffn, gated=True, tied=tied,
    )  # fmt: skip


# These values are from the config.json file that is published with each model.
FAMILIES: Final = (
    _build_gpt_shape("GPT-2 small", 12, 768, 12),
    _build_gpt_shape("GPT-2 medium", 24, 1024, 16),
    _build_llama_shape("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936, tied=True),
    _build_gpt_shape("GPT-2 large", 36, 1280, 20),
    _build_llama_shape("TinyLlama", 22, 2048, 32, 4, 5632, 32000),
    _build_llama_shape("Llama 3.2 1B", 16, 2048, 32, 8, 8192, 128256, tied=True),
    _build_llama_shape("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936, tied=True),
    _build_gpt_shape("GPT-3 2.7B", 32, 2560, 32),
    _build_llama_shape("Llama 3.2 3B", 28, 3072, 24, 8, 8192, 128256, tied=True),
    _build_llama_shape("Llama 2 7B", 32, 4096, 32, 32, 11008, 32000),
    _build_llama_shape("Llama 3.1 8B", 32, 4096, 32, 8, 14336, 128256),
    _build_llama_shape("Llama 2 13B", 40, 5120, 40, 40, 13824, 32000),
    _build_llama_shape("Qwen2.5-14B", 48, 5120, 40, 8, 13824, 152064),
    _build_gpt_shape("GPT-NeoX-20B", 44, 6144, 64),
    _build_llama_shape("Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064),
    _build_llama_shape("Yi-34B", 60, 7168, 56, 8, 20480, 64000),
    _build_llama_shape("LLaMA 65B", 80, 8192, 64, 64, 22016, 32000),
    _build_llama_shape("Llama 3.1 70B", 80, 8192, 64, 8, 28672, 128256),
    _build_llama_shape("Qwen2.5-72B", 80, 8192, 64, 8, 29568, 152064),
    _build_llama_shape("Mistral Large", 88, 12288, 96, 8, 28672, 32768),
    _build_gpt_shape("GPT-3", 96, 12288, 96),
    _build_llama_shape("Llama 3.1 405B", 126, 16384, 128, 8, 53248, 128256),
    _build_gpt_shape("MT-NLG", 105, 20480, 128),
    _build_gpt_shape("GPT 1T", 128, 25600, 160),
)


def build_usual_model(params: float, *, seq: int, name: str, **numbers: int | None) -> ModelProfile:
    """Return a model with so many parameters.

    Args:
        params: all of them.
        seq: tokens of a sample.
        name: name of the model in tables.
        numbers: fields of `TransformerShape` that are known: layers, hidden, heads, kv_heads, ffn, vocab.

    Raises:
        UsageError: the numbers do not fit together.
    """
    numbers_given: dict[str, Any] = {key: value for key, value in numbers.items() if value is not None}
    nearest = min(FAMILIES, key=lambda shape: abs(math.log(build_model_profile(shape).params / params)))
    fits = max(params / build_model_profile(nearest).params, build_model_profile(nearest).params / params) <= NEAR
    shape = (
        nearest
        if fits and not numbers_given.keys() & {"layers", "hidden"}
        else _build_proportioned_shape(params, numbers_given)
    )
    if numbers_given:
        shape = replace(shape, **numbers_given)
        if "heads" in numbers_given or "hidden" in numbers_given:
            shape = replace(shape, head_dim=shape.hidden / shape.heads)
        if "heads" in numbers_given and "kv_heads" not in numbers_given:
            shape = replace(shape, kv_heads=shape.heads)
    model = build_model_profile(replace(shape, seq=seq, name=name), params=params)
    return replace(model, assumed=f"the shape of {nearest.name}: {model.assumed}") if shape is nearest else model


def _build_proportioned_shape(params: float, known: dict[str, Any]) -> TransformerShape:
    """A GPT in the usual proportions: width 128 times the number of blocks, and heads that a node's GPUs can divide."""
    layers = known.get("layers") or max(1, round((params / (12 * 128**2)) ** (1 / 3)))
    width = (params / (12 * layers)) ** 0.5
    step = 128
    if width >= 4096:
        step = 1024
    elif width >= 1024:
        step = 512
    hidden = known.get("hidden") or max(128, round(width / step) * step)
    vocab = min(50257, max(256, int(params / 4 / hidden)))
    return replace(_build_gpt_shape("", layers, hidden, max(1, hidden // 128)), vocab=vocab)
