"""Figures of a model that determine memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model of equal blocks. Bytes are for half precision (2 each); fp32 doubles them."""

    name: str
    params: float
    """Number of all parameters."""
    active_params: float
    """Parameters that a token is multiplied with: not embeddings that are looked up, nor experts that are not used."""
    layers: int
    block_params: float
    """Parameters of the largest block; the mean of all blocks if a config has different ones."""
    seq: int
    """Tokens of a sample; 1 for other models."""
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    """Size of the vocabulary; 0 if the model has no logits over a vocabulary."""
    block_input: float
    """Bytes for each token that enter a block: what full recomputation keeps."""
    block_kept: float
    """Bytes for each token and block kept for the backward pass."""
    block_products: float
    """Bytes for each token and block of matrix products and attention: what selective recomputation keeps."""
    block_upcast: float = 0.0
    """Further bytes per token and block in half precision, where norms and rotary embeddings compute in fp32."""
    expert_params: float = 0.0
    """Part of `params` that is in experts."""
    experts: int = 0
    """Experts of a block; 0 where there are none."""
    experts_used: int = 0
    """Experts to which a token is sent."""
    expert_width: int = 0
    """Inner width of an expert."""
    expert_kept: float = 0.0
    """Part of `block_kept` that is in experts."""
    expert_products: float = 0.0
    """Part of `block_products` that is in experts."""
    frozen: float = 0.0
    """Part of `params` that is not trained: it has neither gradients nor optimizer state."""
    table_params: float = 0.0
    """Part of `params` in tables of embeddings, also where the output has the same."""
    stacked_params: float = 0.0
    """Part of `params` in tensors of three and more dimensions, such as the experts of dtctl.runtime."""
    vector_params: float = 0.0
    """Part of `params` in tensors of one dimension; 0 if these few were not counted."""
    ffn: int = 0
    """Inner width of a plain GPT, which can be built from these figures; 0 of other models."""
    assumed: str = ""
    """Assumptions of the figures, in one line."""
    doubts: tuple[str, ...] = ()
    """Parts that are not counted, or were guessed."""

    @property
    def tied(self) -> bool:
        """Return whether the output shares its weight with the embedding, in a model without experts."""
        return self.active_params == self.params

    @property
    def expert_params_used(self) -> float:
        """Part of `active_params` that is in experts."""
        return self.expert_params * self.experts_used / self.experts if self.experts else 0.0

    @property
    def dense_block_params(self) -> float:
        """Part of `block_params` that is not in experts."""
        return max(0.0, self.block_params - self.expert_params / self.layers)

    @property
    def root_params(self) -> float:
        """Parameters outside of blocks: embeddings, output."""
        return max(0.0, self.params - self.layers * self.block_params)


def build_inspected_model(data: Mapping[str, Any], *, name: str) -> ModelProfile:
    """Return a model from the figures of `dtctl.estimate.model_shapes`."""
    layers = max(1, int(data["layers"]))
    seq = max(1, int(data["seq"]))
    kept_values = float(data["kept_bytes"]) / 2 / layers / seq  # measured in fp32
    hidden = max(1, int(data["hidden"]))
    entering = data.get("entering_bytes")
    return ModelProfile(
        name=name,
        params=float(data["params"]),
        active_params=max(1.0, float(data["params"]) - float(data["looked_up"])),
        layers=layers,
        block_params=float(data["block_params"]),
        seq=seq,
        hidden=hidden,
        heads=max(1, int(data.get("heads") or 1)),
        kv_heads=max(1, int(data.get("heads") or 1)),
        vocab=int(data["vocab"]),
        block_input=float(entering) / 2 / seq if entering else 2.0 * hidden,
        block_kept=kept_values,
        block_products=kept_values / 2,
        frozen=float(data.get("frozen") or 0.0),
        table_params=float(data.get("tables") or 0.0),
        stacked_params=float(data.get("stacked") or 0.0),
        vector_params=float(data.get("vectors") or 0.0),
        assumed=f"{layers} blocks, width {hidden}, vocabulary {int(data['vocab'])}, activations measured: "
        f"{float(data['params']) / 1e9:.3g}B parameters",
    )
