"""A GPT over bytes: embeddings of a byte, the one before and the position; pre-norm blocks; tied output."""

# Shapes: B batch, T tokens, D embedding, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

VOCABULARY = 256
"""Every byte is a token, so that all nodes have the same vocabulary without exchanging one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of the model; `train.model` in the spec."""

    layers: int = 4
    heads: int = 4
    embed: int = 128
    context: int = 64
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and a feed-forward network, each added to the stream after a norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.width = config.embed // config.heads
        self.norm1 = nn.LayerNorm(config.embed)
        self.qkv = nn.Linear(config.embed, 3 * config.embed)
        self.out = nn.Linear(config.embed, config.embed)
        self.norm2 = nn.LayerNorm(config.embed)
        self.wide = nn.Linear(config.embed, 4 * config.embed)
        self.narrow = nn.Linear(4 * config.embed, config.embed)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """The stream after this block, [B, T, D] as before it."""
        batch, length, _ = stream.shape
        # Head by head, and the number of heads left open: so tensor parallelism may give each worker some of them.
        q, k, v = self.qkv(self.norm1(stream)).view(batch, length, -1, 3, self.width).permute(3, 0, 2, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, -1)))
        return stream + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm2(stream)))))


class GPT(nn.Module):
    """Logits of the next byte for every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.embed % config.heads:
            raise ValueError(f"embed {config.embed} cannot be divided by heads {config.heads}")
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.embed)
        self.before = nn.Embedding(VOCABULARY, config.embed)
        self.positions = nn.Embedding(config.context, config.embed)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.embed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What blocks add to the stream starts smaller, the more blocks there are (GPT-2, section 2.3).
                scale = (2 * config.layers) ** -0.5 if name.endswith(("out.weight", "narrow.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] for tokens [B, T]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        # The byte before is handed over rather than left to be found: small models need hundreds of steps to look back.
        before = nn.functional.pad(self.before(tokens[:, :-1]), (0, 0, 1, 0))
        stream = self.tokens(tokens) + before + self.positions(positions)
        for block in self.blocks:
            stream = block(stream)
        return nn.functional.linear(self.norm(stream), self.tokens.weight)

    @torch.no_grad()
    def write(self, prompt: str, count: int, *, temperature: float = 0.8) -> str:
        """The prompt and `count` more bytes, each drawn from the model."""
        self.eval()
        device = self.tokens.weight.device
        text = torch.tensor(list(prompt.encode()), device=device)[None]
        for _ in range(count):
            logits = self(text[:, -self.config.context :])[:, -1] / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")
