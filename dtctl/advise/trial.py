"""A few steps of real trainings, to measure their memory, under the job's Python.

Reads settings as JSON from the first argument: `workers`, `out` (a folder) and `trainings`, which run one after the
other. This process imports torch once and forks the workers of each, which train with dtctl.runtime on random tokens
and write the peak of their memory to a file `TRAINING-RANK.json`. On a GPU that is what torch has allocated at most; on
a processor the growth of the process from before the model was made, with an allocator that gives back what it does
not use (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl.advise.inspect import load as load_factory
from dtctl.runtime import Outcome, TensorData, TrainConfig, Trainer, Worker, run


class Block(nn.Module):
    """Block with attention and a feed-forward network, each with a norm before it and a residual connection."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream after this block, [batch, tokens, hidden] as before it."""
        batch, tokens, hidden = stream.shape
        q, k, v = self.qkv(self.norm1(stream)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        inner: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(self.norm2(stream))))
        return stream + inner


class Decoder(nn.Module):
    """GPT of the requested shape."""

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


def _read_process_memory(name: str) -> int:
    """Return a figure of this process in bytes: VmRSS, VmHWM (its peak)."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name))) * 1024


def build_model(settings: dict[str, Any]) -> nn.Module:
    """Return the requested model."""
    built = load_factory(settings["module"])() if settings["module"] else Decoder(**settings["shape"])
    model: nn.Module = built[0] if isinstance(built, tuple) else built
    return model


def compute_token_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean over tokens.

    Shapes:
        batch: inputs and targets, [samples, tokens] each.
    """
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def train_and_note(settings: dict[str, Any], out: Path) -> int:
    """Run one worker of a training, write the peak of its memory, and return the exit code."""
    seq = settings["seq"]

    def train(config: TrainConfig, worker: Worker) -> Outcome:
        on_gpu = worker.device.type == "cuda"
        generator = torch.Generator().manual_seed(0)
        count = settings["train"]["micro_batch"] * worker.world_size * (settings["train"]["steps"] + 1)
        tokens = torch.randint(settings["vocab"], (count, seq + 1), generator=generator)
        # The first use of the libraries allocates memory that does not belong to the model.
        warm = nn.Linear(8, 8)
        warm(torch.ones(1, 8)).sum().backward()
        before = 0 if on_gpu else _read_process_memory("VmRSS")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(worker.device)
        model = build_model(settings)
        peaks = []

        def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            # The peak is read before each step, since the snapshot at the end takes additional memory.
            peaks.append(
                torch.cuda.max_memory_allocated(worker.device) if on_gpu else _read_process_memory("VmHWM") - before
            )
            return compute_token_loss(model, batch)

        outcome = Trainer(config, worker, model, loss, TensorData(tokens[:, :-1], tokens[:, 1:])).run()
        out.write_text(json.dumps({"peak": peaks[-1]}), encoding="ascii")
        return outcome

    return run(train, defaults=settings["train"])


def main(settings: dict[str, Any]) -> int:
    """Run the trainings; return the exit code of the first worker that failed, after its peers were ended."""
    for number, training in enumerate(settings["trainings"]):
        running = _fork_training_workers(training, settings["workers"], Path(settings["out"]), number)
        while running:
            pid, status = os.waitpid(-1, 0)
            rank = running.pop(pid)
            if status:
                for left in running:
                    os.kill(left, 9)
                sys.stdout.write(json.dumps({"training": number, "rank": rank}) + "\n")
                return os.waitstatus_to_exitcode(status) or 1
    return 0


def _fork_training_workers(training: dict[str, Any], workers: int, out: Path, number: int) -> dict[int, int]:
    """Start the workers of a training; return process -> rank."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(workers))
    own = out / str(number)  # a new folder, so that no snapshot is resumed
    own.mkdir()
    running = {}
    for rank in range(workers):
        pid = os.fork()
        if pid:
            running[pid] = rank
            continue
        code = 1
        try:
            os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
            log = os.open(out / f"{number}-{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(own)
            code = train_and_note(training, out / f"{number}-{rank}.json")
        except BaseException:  # noqa: BLE001 - it ends the process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return running


if __name__ == "__main__":
    trial_settings = json.loads(sys.argv.pop(1))
    raise SystemExit(main(trial_settings))
