"""Trains drawn architectures in the workers of one process group; run by test_architectures.py.

An architecture is drawn from its number: the way queries, keys and values are made, groups of heads, gates, norms of
queries and keys, tied embeddings, residual branches that begin at zero, names that are known or need a plan.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dtctl.errors import DtctlError
from dtctl.runtime import TensorData, Trainer, Worker, load, start
from dtctl.runtime.randomness import seed_all

WIDTH, HEADS, TOKENS, VOCABULARY, HIDDEN = 16, 4, 6, 12, 32
HEAD = WIDTH // HEADS

QKV = ("separate", "chunk", "split", "by head", "vit", "unbind", "swapped")
MLP = ("plain", "gated", "chunk", "glu", "halves", "strided")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A model's architecture."""

    qkv: str
    groups: int
    mlp: str
    normed: str
    tied: bool
    zero: bool
    bias: bool
    renamed: bool
    scaled: bool

    def plan(self) -> dict[str, str]:
        """Return the plan that a user would write, fused matrices not named; empty if names are known."""
        plan = {}
        if self.renamed:
            plan = {"layers.*.a": "colwise", "layers.*.b": "rowwise", "layers.*.c": "colwise", "layers.*.d": "rowwise"}
            if self.qkv == "separate":
                plan |= dict.fromkeys(("layers.*.query", "layers.*.key", "layers.*.value"), "colwise")
            if self.mlp == "gated":
                plan["layers.*.gate"] = "colwise"
            if self.tied:
                plan |= {"table": "embedding", "head": "colwise-gather"}
            plan = {name: style for name, style in plan.items() if name != "layers.*.a" or self.qkv != "separate"}
        return plan


def drawn(number: int) -> Drawn:
    """Return the architecture of a number; the first ones are the usual kinds."""
    draw = random.Random(number)
    return Drawn(
        qkv=QKV[number % len(QKV)],
        groups=draw.choice((4, 2)),
        mlp=MLP[number % len(MLP)],
        normed=draw.choice(("no", "no", "heads", "heads", "rows")),
        tied=draw.random() < 0.4,
        zero=draw.random() < 0.6,
        bias=draw.random() < 0.4,
        renamed=draw.random() < 0.3,
        scaled=draw.random() < 0.3,
    )


class Attention(nn.Module):
    def __init__(self, kind: Drawn) -> None:
        super().__init__()
        self.kind = kind
        keys = kind.groups * HEAD
        first = "a" if kind.renamed else "qkv"
        self.last = "b" if kind.renamed else "o_proj"
        if kind.qkv == "separate":
            for name, size in (("query", WIDTH), ("key", keys), ("value", keys)):
                self.add_module(name, nn.Linear(WIDTH, size, bias=kind.bias))
        else:
            both = WIDTH if kind.qkv != "split" else keys
            self.add_module(first, nn.Linear(WIDTH, WIDTH + 2 * both, bias=kind.bias))
        self.first = first
        self.add_module(self.last, nn.Linear(WIDTH, WIDTH, bias=kind.bias))
        if kind.normed != "no":
            self.norm_q = nn.RMSNorm(HEAD if kind.normed == "heads" else WIDTH)
            self.norm_k = nn.RMSNorm(HEAD if kind.normed == "heads" else keys if kind.qkv == "split" else WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, (batch, tokens, _) = self.kind, x.shape
        if kind.qkv == "separate":
            q, k, v = self.query(x), self.key(x), self.value(x)
        else:
            made = self.get_submodule(self.first)(x)
            if kind.qkv == "chunk":
                q, k, v = made.chunk(3, dim=-1)
            elif kind.qkv == "split":  # parts in proportion, as each worker has its share
                unit = made.shape[-1] // (HEADS + 2 * kind.groups)
                q, k, v = made.split([HEADS * unit, kind.groups * unit, kind.groups * unit], dim=-1)
            elif kind.qkv == "by head":
                q, k, v = (t.flatten(2) for t in made.view(batch, tokens, -1, 3 * HEAD).chunk(3, dim=-1))
            elif kind.qkv == "vit":
                q, k, v = (t.flatten(2) for t in made.view(batch, tokens, 3, HEADS, HEAD).unbind(2))
            elif kind.qkv == "unbind":
                q, k, v = made.view(batch, tokens, 3, -1).unbind(2)
            else:
                v, q, k = made.view(batch, tokens, 3, -1).unbind(2)
        if kind.normed == "rows":
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (t.reshape(batch, tokens, -1, HEAD) for t in (q, k, v))
        if kind.normed == "heads":
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.get_submodule(self.last)(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, kind: Drawn) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = ("c", "d") if kind.renamed else ("up", "down")
        wide = HIDDEN if kind.mlp in ("plain", "gated") else 2 * HIDDEN
        self.add_module(self.first, nn.Linear(WIDTH, wide, bias=kind.bias))
        self.add_module(self.last, nn.Linear(HIDDEN, WIDTH, bias=kind.bias))
        if kind.mlp == "gated":
            self.gate = nn.Linear(WIDTH, HIDDEN, bias=kind.bias)
        if kind.scaled:
            self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, made = self.kind, self.get_submodule(self.first)(x)
        if kind.mlp == "plain":
            hidden = functional.gelu(made)
        elif kind.mlp == "gated":
            hidden = functional.silu(self.gate(x)) * made
        elif kind.mlp == "chunk":
            gate, up = made.chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
        elif kind.mlp == "glu":
            hidden = functional.glu(made, dim=-1)
        elif kind.mlp == "halves":
            half = made.shape[-1] // 2
            hidden = functional.silu(made[..., :half]) * made[..., half:]
        else:
            hidden = functional.silu(made[..., ::2]) * made[..., 1::2]
        if kind.scaled:
            hidden = hidden * self.scale
        return self.get_submodule(self.last)(hidden)


class Layer(nn.Module):
    def __init__(self, kind: Drawn) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(kind)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp(kind)
        if kind.zero:
            for module in (self.attention, self.mlp):
                nn.init.zeros_(module.get_submodule(module.last).weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, kind: Drawn) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if kind.tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Mixing(nn.Module):
    """Blocks that mix tokens otherwise than by attention, and begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mean() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x - x.mean(1, keepdim=True))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(number: int, mesh: dict[str, int] | None, worker: Worker, folder: Path) -> dict[str, Any]:
    """Train one architecture; returns its weights, or the words of the refusal."""
    kind = drawn(number)
    settings = {
        "global_batch": 8, "steps": 3, "optimizer": "sgd", "lr": 0.5, "log_every": 9, "clip_norm": 1.0,
        "accumulate": 2 if mesh and "pp" in mesh else 1, "snapshot": {"dir": str(folder / f"{number}")},
        **({"strategy": mesh, "tp": {"plan": kind.plan()}} if mesh else {}),
    }  # fmt: skip
    seed_all(number)
    model = (Mixing() if mesh and "cp" in mesh else Model(kind)).double()
    tokens = torch.randint(
        0, VOCABULARY, (24, (8 if mesh and "cp" in mesh else TOKENS) + 1), generator=torch.Generator().manual_seed(7)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        trainer = Trainer(
            load(settings, argv=[], environ={}), worker, model, loss, TensorData(tokens[:, :-1], tokens[:, 1:])
        )
    except DtctlError as exc:
        if all(torch.equal(value, before[name]) for name, value in model.state_dict().items()):
            return {"refused": exc.message}
        return {"refused": f"CHANGED THE MODEL: {exc.message}"}
    trainer.run()
    return {"weights": trainer.full_weights(), "split": getattr(trainer.training.engine.strategy, "name", "")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", type=json.loads)
    parser.add_argument("mesh", type=json.loads)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    found = {}
    with start(timeout_s=60) as worker:
        for number in args.numbers:
            found[number] = train(number, args.mesh, worker, args.folder)
        if worker.is_first:
            torch.save(found, args.folder / "found.pt")


if __name__ == "__main__":
    main()
