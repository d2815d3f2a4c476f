"""Tokens per second, use of the GPU and memory of a GPT, trained by the Trainer and by a loop written by hand.

    python -m benchmarks.gpu_loops                         124M and 1B parameters on this machine's first GPU
    python -m benchmarks.gpu_loops --sizes 124M --settings bf16 --repetitions 3
    python -m benchmarks.gpu_loops --sizes tiny --device cpu    whether the program runs; its figures mean nothing

Both loops do the same work: the same model and tokens, bf16 autocast, fused AdamW, clipping, no snapshots during the
steps that count. Every figure is from a fresh process, the two in turn. compile compiles each block; fsdp shards over a
group of one, which costs what fully_shard costs and saves nothing: the Trainer sees that there is nothing to shard.
Results are kept in benchmarks/results/ as JSON with date, device and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.machine import HERE, keep

BLOCK = 5
"""Steps that are timed together, between two looks at the GPU."""
SETTINGS = ("bf16", "bf16+compile", "bf16+fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and its batch."""

    layers: int
    heads: int
    embed: int
    context: int
    vocabulary: int
    micro_batch: int
    accumulate: int
    steps: int
    dropout: float = 0.0


SIZES = {
    "124M": Size(
        layers=12, heads=12, embed=768, context=1024, vocabulary=50304, micro_batch=32, accumulate=2, steps=45
    ),
    "1B": Size(layers=18, heads=16, embed=2048, context=1024, vocabulary=50304, micro_batch=8, accumulate=2, steps=30),
    "tiny": Size(layers=2, heads=2, embed=32, context=32, vocabulary=64, micro_batch=2, accumulate=2, steps=15),
}


class Block(nn.Module):
    """Attention and a feed-forward network, each added to the stream after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.embed), nn.LayerNorm(size.embed)
        self.qkv = nn.Linear(size.embed, 3 * size.embed, bias=False)
        self.out = nn.Linear(size.embed, size.embed, bias=False)
        self.wide = nn.Linear(size.embed, 4 * size.embed, bias=False)
        self.narrow = nn.Linear(4 * size.embed, size.embed, bias=False)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """[samples, tokens, embed], as before it."""
        samples, tokens, embed = stream.shape
        q, k, v = self.qkv(self.norm1(stream)).view(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).reshape(samples, tokens, embed))
        return stream + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm2(stream)))))


class GPT(nn.Module):
    """GPT-2's shape: learnt positions, tied output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.embed)
        self.positions = nn.Embedding(size.context, size.embed)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.embed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [samples, tokens, vocabulary]."""
        stream = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        return nn.functional.linear(self.norm(stream), self.tokens.weight)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def tokens_of(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of 64 micro batches."""
    source = torch.Generator().manual_seed(0)
    shape = (64 * size.micro_batch, size.context + 1)
    tokens = torch.randint(0, size.vocabulary, shape, generator=source)
    return tokens[:, :-1], tokens[:, 1:]


class Clock:
    """Told of every step; waits for the GPU at the end of each block of them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self.marks = device, 0, list[float]()
        self.peak_bytes = 0

    def step(self) -> None:
        """A step is done."""
        self.steps += 1
        if self.device.type == "cuda":  # in each, since the Trainer's lines of metrics begin the peak anew
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device))
        if self.steps % BLOCK == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.marks.append(time.perf_counter())

    def answer(self, model: nn.Module, size: Size) -> dict[str, float]:
        """Figures of the blocks after the first."""
        from dtctl.runtime.telemetry.hardware import find_peak_flops

        block_s = statistics.median(b - a for a, b in zip(self.marks, self.marks[1:], strict=False))
        per_s = BLOCK * size.micro_batch * size.accumulate * size.context / block_s
        count = sum(parameter.numel() for parameter in model.parameters())
        # Both passes: 6 per parameter (positions are looked up), and 12 for attention (PaLM, appendix B).
        flops = 6 * (count - size.context * size.embed) + 12 * size.layers * size.embed * size.context
        cuda = self.device.type == "cuda"
        peak = find_peak_flops(torch.cuda.get_device_name(self.device), "bf16") if cuda else None
        return {
            "parameters": count,
            "tokens_per_s": round(per_s, 1),
            "step_ms": round(block_s / BLOCK * 1e3, 3),
            "mfu": round(flops * per_s / peak, 4) if peak else 0.0,
            "memory_gib": round(self.peak_bytes / (1 << 30), 3),
        }


def bare(size: Size, setting: str, device: torch.device) -> dict[str, float]:
    """What one writes by hand."""
    torch.manual_seed(0)
    model: nn.Module = GPT(size).to(device)
    whole = model
    if "compile" in setting:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    if "fsdp" in setting:
        from torch.distributed.fsdp import fully_shard

        with tempfile.NamedTemporaryFile() as store:
            backend = "nccl" if device.type == "cuda" else "gloo"
            torch.distributed.init_process_group(backend, init_method=f"file://{store.name}", rank=0, world_size=1)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = tokens_of(size)
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    clock, order, at = Clock(device), torch.randperm(len(inputs)), 0
    for _ in range(size.steps):
        optimizer.zero_grad()
        for _ in range(size.accumulate):
            chosen = order[at : at + size.micro_batch]
            at = (at + size.micro_batch) % len(order)
            batch = inputs[chosen].to(device, non_blocking=True), targets[chosen].to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                value = loss(model, batch) / size.accumulate
            value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clock.step()
    return clock.answer(whole, size)


def dtctl(size: Size, setting: str, device: torch.device) -> dict[str, float]:
    """The Trainer."""
    from dtctl.runtime import TensorData, Trainer, load, start

    settings = {
        "steps": size.steps, "micro_batch": size.micro_batch, "accumulate": size.accumulate, "clip_norm": 1.0,
        "precision": "bf16", "lr": 1e-4, "beta2": 0.999, "weight_decay": 0.01, "schedule": "constant",
        "compile": "compile" in setting, "strategy": "fsdp" if "fsdp" in setting else "auto",
        "log_every": 10 * BLOCK, "on_oom": "stop", "snapshot": {"dir": "snapshots"},
    }  # fmt: skip
    with start() as worker:
        model, clock = GPT(size), Clock(device)
        trainer = Trainer(load(settings, argv=[]), worker, model, loss, TensorData(*tokens_of(size)))
        trainer.optimizer.register_step_post_hook(lambda *_: clock.step())
        trainer.run()
        return clock.answer(model, size)


LOOPS: dict[str, Callable[[Size, str, torch.device], dict[str, float]]] = {"bare": bare, "dtctl": dtctl}


def one(name: str, size: str, setting: str, device: str) -> dict[str, Any]:
    """One loop in a fresh process."""
    argv = [sys.executable, "-m", "benchmarks.gpu_loops", "--one", name, "--sizes", size, "--settings", setting]
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*argv, "--device", device], env=environ, cwd=folder, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{name} failed with {size}, {setting}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(size: str, setting: str, device: str, repetitions: int) -> dict[str, Any]:
    """Both loops in turn, and the ratio of their tokens per second, pair by pair."""
    found: dict[str, list[dict[str, Any]]] = {name: [one(name, size, setting, device)] for name in LOOPS}
    for _ in range(repetitions - 1):
        for name in LOOPS:
            found[name].append(one(name, size, setting, device))
    pairs = zip(found["dtctl"], found["bare"], strict=True)
    kept: dict[str, Any] = {
        "ratio": round(statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs), 4)
    }
    for name, values in found.items():
        kept[name] = {key: statistics.median(value[key] for value in values) for key in values[0]}
        print(f"{size:5} {setting:13} {name:6} " + "  ".join(f"{key} {value:,}" for key, value in kept[name].items()))
    print(f"{size:5} {setting:13} ratio  {kept['ratio']}")
    return kept


def main() -> None:
    """Measure, print, keep; or run one loop and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["124M", "1B"])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["bf16", "bf16+compile"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--one", choices=LOOPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; `--sizes tiny --device cpu` tries the program out without one")
    device = torch.device(options.device)
    if options.one:
        print("\n" + json.dumps(LOOPS[options.one](SIZES[options.sizes[0]], options.settings[0], device)))
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    kept: dict[str, object] = {"date": time.strftime("%Y-%m-%d %H:%M"), "device": name, "versions": versions}
    for size in options.sizes:
        for setting in options.settings:
            kept[f"{size} {setting}"] = compared(size, setting, options.device, options.repetitions)
            if options.device == "cuda":  # figures of a trial on a CPU mean nothing
                keep("gpu-loops", kept)


if __name__ == "__main__":
    main()
