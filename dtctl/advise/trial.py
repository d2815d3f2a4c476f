"""A few steps of the real training, to see what memory it needs: one worker of it, under the job's Python.

Reads its settings as JSON from the first argument, trains with dtctl.runtime on random tokens, and writes the peak of
its memory to a file for each rank. On a GPU that is what torch has allocated at most; on a processor the growth of the
process from before the model was made, with an allocator that gives back what it does not use (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl.advise.inspect import load as load_factory
from dtctl.runtime import Outcome, TensorData, TrainConfig, Trainer, Worker, run


class Block(nn.Module):
    """Attention and a feed-forward network, each added to the stream after a norm."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """The stream after this block, [batch, tokens, hidden] as before it."""
        batch, tokens, hidden = stream.shape
        q, k, v = self.qkv(self.norm1(stream)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        inner: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(self.norm2(stream))))
        return stream + inner


class Decoder(nn.Module):
    """A GPT of the shape that was asked about."""

    def __init__(self, layers: int, hidden: int, heads: int, ffn: int, vocab: int, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, tokens, vocab]."""
        stream = self.tokens(tokens)
        for block in self.blocks:
            stream = block(stream)
        logits: torch.Tensor = self.output(self.norm(stream))
        return logits


def _process(name: str) -> int:
    """A figure of this process in bytes: VmRSS, VmHWM (its peak)."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name))) * 1024


def build_model(settings: dict[str, Any]) -> nn.Module:
    """The model that is asked about."""
    built = load_factory(settings["module"])() if settings["module"] else Decoder(**settings["shape"])
    model: nn.Module = built[0] if isinstance(built, tuple) else built
    return model


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean over tokens.

    Shapes:
        batch: inputs and targets, [samples, tokens] each.
    """
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def main(settings: dict[str, Any]) -> int:
    """Train and write the peak."""
    seq = settings["seq"]

    def train(config: TrainConfig, worker: Worker) -> Outcome:
        on_gpu = worker.device.type == "cuda"
        generator = torch.Generator().manual_seed(0)
        count = settings["train"]["micro_batch"] * worker.world_size * (settings["train"]["steps"] + 1)
        tokens = torch.randint(settings["vocab"], (count, seq + 1), generator=generator)
        # What the first use of the libraries takes is not the model's.
        warm = nn.Linear(8, 8)
        warm(torch.ones(1, 8)).sum().backward()
        before = 0 if on_gpu else _process("VmRSS")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(worker.device)
        model = build_model(settings)
        peaks = []

        def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            # Looked at before each step: the snapshot of the end takes memory of its own.
            peaks.append(torch.cuda.max_memory_allocated(worker.device) if on_gpu else _process("VmHWM") - before)
            return loss_of(model, batch)

        outcome = Trainer(config, worker, model, loss, TensorData(tokens[:, :-1], tokens[:, 1:])).run()
        Path(settings["out"], f"{worker.rank}.json").write_text(json.dumps({"peak": peaks[-1]}), encoding="ascii")
        return outcome

    return run(train, defaults=settings["train"])


if __name__ == "__main__":
    trial_settings = json.loads(sys.argv.pop(1))
    raise SystemExit(main(trial_settings))
