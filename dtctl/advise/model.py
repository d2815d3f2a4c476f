"""The figures of a model from numbers, or from a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtctl.errors import UsageError
from dtctl.estimate.model import Model


def transformer(
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
) -> Model:
    """A decoder (GPT, Llama) from its numbers; biases and norms are too small to count.

    Kept for the backward pass, in elements of the width h and the inner width f: input and output of both norms, q, k,
    v, the output of attention twice, and 2 f or, with a gate, 4 f. With f = 4 h that is the 34 h bytes of Korthikanti
    et al. (https://arxiv.org/abs/2205.05198), with attention that keeps no square of the sequence. Of `params`, counted
    elsewhere, blocks get what embeddings leave.

    Raises:
        UsageError: a number is not above 0, or they do not fit together.
    """
    heads = heads or max(1, hidden // 128)
    kv_heads = kv_heads or heads
    ffn = ffn or 4 * hidden
    given = {"layers": layers, "hidden": hidden, "vocab": vocab, "seq": seq, "heads": heads, "kv_heads": kv_heads,
             "ffn": ffn, "experts": experts}  # fmt: skip
    for key, value in given.items():
        if value < 1:
            raise UsageError(f"{key} must be at least 1, and is {value}")
    width = (head_dim or hidden / heads) * heads
    if not head_dim and hidden % heads:
        raise UsageError(f"hidden {hidden} cannot be divided by {heads} heads")
    if heads % kv_heads:
        raise UsageError(f"{heads} heads cannot be divided by {kv_heads} kv_heads")
    share = kv_heads / heads
    attention = hidden * width * (2 + 2 * share)
    expert = (3 if gated else 2) * hidden * ffn
    block = attention + expert * experts + (hidden * experts if experts > 1 else 0)
    root = float(vocab * hidden * (1 if tied else 2))
    total = root + layers * block
    if params is not None:
        if params <= 0:
            raise UsageError(f"params must be above 0, and is {params:g}")
        if params < root:
            raise UsageError(f"{params:g} parameters are fewer than the {root:g} of the embeddings alone")
        block, total = (params - root) / layers, params
    idle = expert * (experts - experts_used) * layers
    inner = (4 if gated else 2) * ffn * experts_used
    products = width * (1 + 2 * share) + width + hidden + (2 if gated else 1) * ffn * experts_used + hidden
    return Model(
        name=name,
        params=total,
        used=max(total - vocab * hidden * (0 if tied else 1) - idle, 1.0),
        layers=layers,
        block_params=block,
        seq=seq,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        block_input=2.0 * hidden,
        block_kept=2.0 * (4 * hidden + width * (1 + 2 * share) + 2 * width + inner),
        block_products=2.0 * products,
        expert_params=expert * experts * layers if experts > 1 else 0.0,
        ffn=0 if gated or experts > 1 or kv_heads != heads or head_dim or params is not None else ffn,
    )


_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden", "embed"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn"),
    "vocab": ("vocab_size", "vocab"),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "context", "seq"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_used": ("num_experts_per_tok", "experts_per_token"),
}
_GATED = ("llama", "mistral", "mixtral", "qwen", "gemma", "phi3", "deepseek", "olmo")
_NEEDED = ("layers", "hidden")


def from_config(data: Mapping[str, Any], *, source: str, seq: int | None, name: str = "") -> Model:
    """The model that a config.json in the style of Hugging Face describes, or `train.model` of a spec.

    Raises:
        UsageError: what is needed is missing, or is no number.
    """
    inner = data.get("text_config")
    data = inner if isinstance(inner, Mapping) else data
    found: dict[str, Any] = {}
    for key, spellings in _KEYS.items():
        for spelling in spellings:
            if data.get(spelling) is not None:
                value = data[spelling]
                if not isinstance(value, int) or isinstance(value, bool):
                    raise UsageError(f"{spelling} is no whole number: {value!r}", where=source)
                found[key] = value
                break
    missing = [key for key in _NEEDED if key not in found]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} cannot be found", where=source,
            hint="the usual names are " + ", ".join(_KEYS[missing[0]]),
        )  # fmt: skip
    found.setdefault("vocab", 50257)
    found["seq"] = seq or min(found.get("seq", 2048), 8192)
    kind = str(data.get("model_type", ""))
    gated = "silu" in str(data.get("hidden_act", "")) or kind.startswith(_GATED)
    default_tied = not gated
    return transformer(
        **found, gated=gated, tied=bool(data.get("tie_word_embeddings", default_tied)), name=name or kind or source
    )


def read_config(path: Path, *, seq: int | None) -> Model:
    """The model of a config.json.

    Raises:
        UsageError: the file cannot be read, or says too little.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}") from exc
    except (ValueError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} is not JSON: {exc}", hint="a config.json as Hugging Face has it") from exc
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no object", hint="a config.json as Hugging Face has it")
    return from_config(data, source=str(path), seq=seq, name=path.parent.name or path.stem)
