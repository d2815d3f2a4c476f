"""The figures of a model from a config.json in the style of Hugging Face, or from `train.model` of a spec.

Names and defaults are those of the configuration classes of transformers 4.51
(https://github.com/huggingface/transformers/tree/v4.51.0/src/transformers/models).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtctl import folders
from dtctl.advise.shape import LatentAttention, TransformerShape, build_model_profile
from dtctl.errors import UsageError
from dtctl.estimate.model import ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamilyDefaults:
    """Defaults of a `model_type` for keys that its config.json leaves out."""

    gated: bool = False
    """True if the feed-forward network has a gate."""
    tied: bool = False
    """True if the output shares its weight with the embedding, where the config has no key for that."""
    wide: bool = False
    """True if the inner width is 4 times the width, where the config has no key for it."""
    kv_heads: int = 0
    """0: the number of heads."""
    heads: int = 0
    head_dim: int = 0
    """0: the width divided by heads."""
    vocab: int = 0
    norms: int = 2
    positions: int = 0
    """Number of tables of learned positions."""
    pair: bool = False
    """True if the model has an encoder and a decoder."""


_GATED = ModelFamilyDefaults(gated=True)
_GPT = ModelFamilyDefaults(tied=True, wide=True, positions=1, vocab=50257)
_BERT = ModelFamilyDefaults(tied=True, positions=1)
_GEMMA = ModelFamilyDefaults(gated=True, tied=True, head_dim=256, vocab=256000)
_GEMMA3 = ModelFamilyDefaults(gated=True, tied=True, heads=8, kv_heads=4, head_dim=256, vocab=262208, norms=4)

FAMILIES: Mapping[str, ModelFamilyDefaults] = {
    "llama": _GATED,
    "mistral": ModelFamilyDefaults(gated=True, kv_heads=8),
    "mixtral": ModelFamilyDefaults(gated=True, kv_heads=8),
    "qwen2": _GATED,
    "qwen2_moe": _GATED,
    "qwen3": ModelFamilyDefaults(gated=True, head_dim=128),
    "qwen3_moe": _GATED,
    "gemma": _GEMMA,
    "gemma2": ModelFamilyDefaults(gated=True, tied=True, heads=8, kv_heads=4, head_dim=256, vocab=256000, norms=4),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi": ModelFamilyDefaults(),
    "phi3": _GATED,
    "deepseek_v2": _GATED,
    "deepseek_v3": _GATED,
    "olmo": _GATED,
    "olmo2": _GATED,
    "gpt2": _GPT,
    "gpt_neo": _GPT,
    "gptj": ModelFamilyDefaults(wide=True),
    "gpt_neox": ModelFamilyDefaults(),
    "falcon": ModelFamilyDefaults(wide=True),  # published files of this model have a separate output layer
    "opt": ModelFamilyDefaults(tied=True, positions=1),
    "bloom": ModelFamilyDefaults(tied=True, wide=True),
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": _BERT,
    "t5": ModelFamilyDefaults(tied=True, pair=True, head_dim=64),
    "mt5": ModelFamilyDefaults(gated=True, pair=True, head_dim=64),
    "bart": ModelFamilyDefaults(tied=True, pair=True, positions=2),
    "mbart": ModelFamilyDefaults(tied=True, pair=True, positions=2),
}

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers", "encoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden", "embed", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "heads", "encoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn", "hidden_dim", "encoder_ffn_dim",
            "ffn_hidden_size"),
    "vocab": ("vocab_size", "vocab"),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "context", "seq"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "experts"),
    "experts_used": ("num_experts_per_tok", "experts_per_token", "top_k"),
    "expert_ffn": ("moe_intermediate_size",),
    "decoder": ("decoder_layers", "num_decoder_layers"),
}  # fmt: skip
_NEEDED = ("layers", "hidden")
MOST_BLOCKS = 100_000
MAX_BYTES = 16 << 20
"""Most bytes of a config.json."""
LONGEST = 8192
"""Tokens of a sample, if a config has only the maximum of the model."""


def read_config(path: Path, *, seq: int | None) -> ModelProfile:
    """Return the model of a config.json.

    Raises:
        UsageError: the file cannot be read, lacks necessary keys, or is of a model that the formulas do not know.
    """
    try:
        data = json.loads(folders.read_regular(str(path), MAX_BYTES).decode("utf-8-sig"))
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{path} is not JSON: {exc}", hint="give a config.json in Hugging Face's format") from exc
    if not isinstance(data, dict):
        raise UsageError(f"{path} does not hold a JSON object", hint="give a config.json in Hugging Face's format")
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    return parse_model_config(data, source=str(path), seq=seq, name=name or path.stem)


def parse_model_config(data: Mapping[str, Any], *, source: str, seq: int | None, name: str = "") -> ModelProfile:
    """Return the model that a config describes. A config without a `model_type` counts as a GPT.

    Raises:
        UsageError: a necessary key is missing or is not a number, or there are no formulas for such a model.
    """
    outer, inner = data, data.get("text_config")
    data = inner if isinstance(inner, Mapping) else outer
    kind = str(data.get("model_type") or outer.get("model_type") or "")
    family = _find_model_family(kind, data, source)
    is_template = not kind and data.get("embed") is not None and data.get("hidden") is not None
    values = _read_values(data, source, is_template=is_template)
    uncounted = [part for part in ("vision_config", "audio_config") if outer.get(part)]
    doubts = [f"{part}: only the text part is counted" for part in uncounted]
    doubts += _fill_missing_values(values, family, family_known=bool(kind))
    decoder = 0
    if family.pair:
        doubts.append("a model with encoder and decoder: both are assumed to get the same number of tokens")
        decoder = values.get("decoder", values["layers"])
    tied = outer.get("tie_word_embeddings", data.get("tie_word_embeddings"))
    shape = TransformerShape(
        name=name or kind or source,
        layers=values["layers"] + decoder,
        hidden=values["hidden"],
        heads=values["heads"],
        kv_heads=_kv_heads(data, values, family, kind),
        vocab=values["vocab"],
        seq=seq or min(values.get("seq", 2048), LONGEST),
        head_dim=values.get("head_dim") or values["hidden"] / max(1, values["heads"]),
        ffn=values["ffn"],
        gated=family.gated or is_template or str(data.get("feed_forward_proj", "")).startswith("gated"),
        tied=family.tied if tied is None else bool(tied),
        cross=decoder,
        latent=_read_latent_attention(data, source),
        norms=family.norms,
        positions=family.positions * values.get("seq", 0),
        embed=_read_embedding_width(data, values, source),
    )
    return build_model_profile(_with_experts(shape, data, values, source), doubts=tuple(doubts))


def _read_values(data: Mapping[str, Any], source: str, *, is_template: bool) -> dict[str, int]:
    """Return the numbers that a config has, by the keys of `_KEYS`.

    Args:
        data: the config.
        source: name of the config, for errors.
        is_template: True for `dtctl init --template moe`, whose `hidden` is the inner width of dtctl.runtime.MoE.
    """
    values: dict[str, int] = {}
    for key, names in _KEYS.items():
        value = _read_first_integer(data, names, source)
        if value is not None:
            values[key] = value
    if is_template:
        values["ffn"] = values["hidden"]
        values["hidden"] = _read_first_integer(data, ("embed",), source) or 0
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} cannot be found", where=source,
            hint="the usual names are " + ", ".join(_KEYS[missing[0]]),
        )  # fmt: skip
    return values


def _find_model_family(kind: str, data: Mapping[str, Any], source: str) -> ModelFamilyDefaults:
    if not kind:
        gated = "silu" in str(data.get("hidden_act", ""))
        return ModelFamilyDefaults(gated=gated, tied=not gated, wide=True, vocab=50257)
    if kind not in FAMILIES:
        raise UsageError(
            f"the formulas do not cover the model_type {kind}", where=source,
            hint="--model module:factory builds and measures any model; --params, --layers, --hidden and --vocab take "
            f"numbers; known are {', '.join(FAMILIES)}",
        )  # fmt: skip
    return FAMILIES[kind]


def _read_first_integer(data: Mapping[str, Any], names: tuple[str, ...], source: str) -> int | None:
    """Return the first of the names that has a value: a whole number."""
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{name} is not a whole number: {value!r}", where=source)
        if not abs(value) < 2**53:
            raise UsageError(f"{name} is not a valid size of a model: {value}", where=source)
        return value
    return None


def _fill_missing_values(values: dict[str, int], family: ModelFamilyDefaults, *, family_known: bool) -> list[str]:
    """Fill in the keys that the config lacks; return a note for each guess that the family's defaults do not cover."""
    defaults = (
        ("heads", family.heads or max(1, values["hidden"] // 128), bool(family.heads)),
        ("ffn", 4 * values["hidden"], family.wide),
        ("vocab", family.vocab or 50257, bool(family.vocab)),
    )
    notes = []
    for key, default, is_of_family in defaults:
        if key in values:
            continue
        values[key] = default
        if not (is_of_family and family_known):
            notes.append(f"{_KEYS[key][0]} is missing: assumed to be {default}")
    if family.head_dim:
        values.setdefault("head_dim", family.head_dim)
    return notes


def _kv_heads(data: Mapping[str, Any], values: Mapping[str, int], family: ModelFamilyDefaults, kind: str) -> int:
    if kind == "falcon":  # only the new architecture uses num_kv_heads
        if data.get("new_decoder_architecture"):
            return int(data.get("num_kv_heads") or values["heads"])
        return 1 if data.get("multi_query", True) else values["heads"]
    if values.get("kv_heads"):
        return values["kv_heads"]
    if 0 < family.kv_heads <= values["heads"]:
        return family.kv_heads
    return values["heads"]


def _read_latent_attention(data: Mapping[str, Any], source: str) -> LatentAttention | None:
    rank = _read_first_integer(data, ("kv_lora_rank",), source)
    if not rank:
        return None
    value = _read_first_integer(data, ("v_head_dim",), source) or 128
    return LatentAttention(
        query_rank=_read_first_integer(data, ("q_lora_rank",), source) or 0,
        rank=rank,
        rope=_read_first_integer(data, ("qk_rope_head_dim",), source) or 64,
        nope=_read_first_integer(data, ("qk_nope_head_dim",), source) or value,
        value=value,
    )


def _read_embedding_width(data: Mapping[str, Any], values: Mapping[str, int], source: str) -> int:
    """Width of the embeddings where it is not the model's (OPT 350M)."""
    width = _read_first_integer(data, ("word_embed_proj_dim",), source) or values["hidden"]
    return 0 if width == values["hidden"] else width


def _with_experts(
    shape: TransformerShape, data: Mapping[str, Any], values: Mapping[str, int], source: str
) -> TransformerShape:
    """Return the shape with its experts, and with the number of blocks that have none."""
    experts = values.get("experts", 1)
    if experts <= 1:
        return shape
    inner = values.get("expert_ffn") or shape.ffn
    shared = _read_first_integer(data, ("shared_expert_intermediate_size",), source)
    first = _read_first_integer(data, ("first_k_dense_replace",), source) or 0
    interval = _read_first_integer(data, ("moe_layer_freq",), source) or 1
    step = _read_first_integer(data, ("decoder_sparse_step",), source) or 1
    listed = data.get("mlp_only_layers")
    without = {number for number in listed if isinstance(number, int)} if isinstance(listed, list) else set()
    dense = 0
    for number in range(min(shape.layers, MOST_BLOCKS)):
        has_experts = number >= first and number % interval == 0 and (number + 1) % step == 0
        if number in without or not has_experts:
            dense += 1
    return replace(
        shape,
        experts=experts,
        experts_used=values.get("experts_used", min(2, experts)),
        expert_ffn=inner,
        shared_ffn=shared or (_read_first_integer(data, ("n_shared_experts",), source) or 0) * inner,
        dense=dense,
    )
