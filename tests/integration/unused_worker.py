"""Trains many small models of which workers leave out different parts; run by test_unused.py in one process group.

Each case leaves the losses, gradient norms, weights and the optimizer's state, to be compared with one process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl import names
from dtctl.errors import DtctlError
from dtctl.runtime import TensorData, Trainer, Worker, load, start
from dtctl.runtime.randomness import seed_all
from dtctl.runtime.strategies import unused

WIDTH, SAMPLES, EXPERTS = 8, 48, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training, whatever the number of workers."""

    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the strategy."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """That one process has, too."""

    def key(self) -> str:
        """Names the case and its files."""
        text = json.dumps([self.model, self.settings.get("strategy", "single"), dict(self.settings), dict(self.common)])
        return "".join(c if c.isalnum() or c in ".-=" else "_" for c in text).strip("_")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = self.down(torch.tanh(self.up(stream)))
        return done


class Routed(nn.Module):
    """A block whose samples go to one expert each; experts without a sample are not called."""

    def __init__(self, experts: int = EXPERTS, sizes: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        if sizes:
            self.experts[1].up, self.experts[1].down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, stream: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        out = self.norm(stream)
        added = torch.zeros_like(stream)
        for number, expert in enumerate(self.experts):
            rows = (kinds == number).nonzero()[:, 0]
            if len(rows):
                added = added.index_add(0, rows, expert(out[rows]))
        return stream + added


class Mixture(nn.Module):
    """Routed blocks, which are what is sharded."""

    def __init__(self, *, blocks: int = 2, sizes: bool = False, frozen: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Routed(sizes=sizes) for _ in range(blocks))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        if frozen:
            for name, parameter in self.named_parameters():
                if "down" in name or "first" in name:
                    parameter.requires_grad_(False)
        if tied:
            for block in self.blocks:
                block.experts[1].up.weight = block.experts[0].up.weight

    def forward(self, inputs: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        stream = self.first(inputs)
        for block in self.blocks:
            stream = block(stream, kinds)
        out: torch.Tensor = self.last(stream)
        return out


class Experts(nn.Module):
    """Experts are the only list of modules, and so each is sharded by itself; a worker may call none of them."""

    def __init__(self, *, raw: bool = False, first: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if not raw else nn.Identity()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        stream = self.first(inputs)
        added = torch.zeros_like(stream)
        for number, expert in enumerate(self.experts):
            rows = (kinds == number).nonzero()[:, 0]
            if len(rows):
                added = added.index_add(0, rows, expert(stream[rows]))
        out: torch.Tensor = self.last(stream + added)
        return out


class Depth(nn.Module):
    """Blocks are left out by what samples ask for (early exit), or run again, or in another order than they are in."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Expert() for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        stream = self.first(inputs)
        order = {"exit": [0, 1, 2], "again": [0, 1, 0, 1, 2], "backward": [2, 1, 0]}[self.how]
        for turn, index in enumerate(order):
            rows = (kinds >= turn).nonzero()[:, 0]
            if len(rows):
                stream = stream.index_add(0, rows, self.blocks[index](stream[rows]))
        out: torch.Tensor = self.last(stream)
        return out


class Changing(nn.Module):
    """A layer that is used in the first step only, or in all but the first."""

    def __init__(self, *, sooner: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.sooner, self.passes = sooner, 0

    def forward(self, inputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        stream = self.first(inputs)
        out: torch.Tensor = self.last(self.second(stream) if self.sooner == (self.passes > 2) else stream)
        return out


class Own(nn.Module):
    """Each worker has a layer that the others leave out, of the same size as theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last((self.odd if os.environ["RANK"] == "1" else self.even)(inputs))
        return out


class Dense(nn.Module):
    """Nothing is left out."""

    def __init__(self, *, scalar: bool = False, formats: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Expert() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(() if scalar else 1))
        self.formats = formats

    def double(self) -> nn.Module:
        super().double()
        if self.formats:
            self.blocks[1].up.float()
            self.blocks[1].up.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            self.blocks[1].up.register_forward_hook(lambda _, __, out: out.double())
        return self

    def forward(self, inputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        stream = self.first(inputs)
        for block in self.blocks:
            stream = stream + block(stream)
        out: torch.Tensor = self.last(stream) * self.scale
        return out


class Sparse(nn.Module):
    """Blocks that mix tokens in attention only (cp), with hard routing of samples in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Token() for _ in range(2))

    def forward(self, inputs: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        stream = self.first(inputs[:, None, :] * torch.linspace(0.5, 1.5, 4, dtype=inputs.dtype)[None, :, None])
        for block in self.blocks:
            stream = block(stream)
        out: torch.Tensor = self.last(stream).mean(1)
        return out


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        heads = stream.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        kinds = (stream[..., 0].detach() * 3).long().remainder(EXPERTS)
        added = torch.zeros_like(stream)
        for number, expert in enumerate(self.experts):
            chosen = kinds == number
            if chosen.any():
                added = added.masked_scatter(chosen[..., None].expand_as(added), expert(mixed[chosen]))
        return stream + added


MODELS: dict[str, Any] = {
    "mixture": Mixture,
    "deep": lambda: Mixture(blocks=4),
    "sizes": lambda: Mixture(sizes=True),
    "frozen": lambda: Mixture(frozen=True),
    "tied": lambda: Mixture(tied=True),
    "experts": Experts,
    "raw": lambda: Experts(raw=True),
    "exit": lambda: Depth("exit"),
    "again": lambda: Depth("again"),
    "backward": lambda: Depth("backward"),
    "tokens": Sparse,
    "before 2.13": Own,
    "later": lambda: Changing(sooner=False),
    "sooner": lambda: Changing(sooner=True),
    "dense": Dense,
    "scalar": lambda: Dense(scalar=True),
    "formats": lambda: Dense(formats=True),
}


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, kinds, targets = batch
    return nn.functional.mse_loss(model(inputs, kinds), targets)


def score(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    inputs, kinds, targets = batch
    return {"loss": (model(inputs, kinds) - targets).pow(2).mean(1)}


def data() -> TensorData:
    """Kinds come in rows, so that some steps have one kind only, and the last kind is first met in a later step."""
    made = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, WIDTH, generator=made, dtype=torch.float64)
    kinds = torch.randint(0, EXPERTS - 1, (SAMPLES,), generator=made)
    kinds[torch.randperm(SAMPLES, generator=made)[:3]] = EXPERTS - 1
    return TensorData(inputs, kinds, inputs[:, :1].sin() + kinds[:, None])


def train(case: Case, worker: Worker, folder: Path) -> None:
    """Train one case and leave its results in `folder`."""
    os.environ[names.METRICS] = str(folder / "metrics.jsonl")
    given = {
        "global_batch": 4, "steps": 10, "log_every": 1, "lr": 3e-2, "optimizer": "adamw", "clip_norm": 0.5,
        "weight_decay": 0.2, "snapshot": {"dir": str(folder / "snapshots")}, **case.common, **case.settings,
    }  # fmt: skip
    given.pop("data", None)
    config = load(given, argv=[], environ={})
    unused.ZEROS = case.model != "before 2.13"
    seed_all(3)
    model = MODELS[case.model]().double()
    trainer = Trainer(config, worker, model, loss, data(), validation=data(), score=score)
    trainer.run()
    weights = trainer.full_weights()
    if worker.is_first:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        keep = [[row["loss"], row["grad_norm"], row.get("val_loss", 0.0)] for row in rows]
        torch.save({"losses": torch.tensor(keep, dtype=torch.float64), "weights": weights}, folder / "result.pt")


def main() -> None:
    cases = [Case(**values) for values in json.loads(Path(sys.argv[1]).read_text())]
    with start(timeout_s=120) as worker:
        for case in cases:
            folder = Path(sys.argv[2]) / case.key()
            if worker.is_first:
                folder.mkdir(parents=True)
            worker.barrier()
            try:
                train(case, worker, folder)
            except DtctlError as exc:
                traceback.print_exc()
                os.write(1, f"told {exc.message} | {exc.where} | {exc.hint}\n".encode())  # in one piece


def written(cases: list[Case], path: Path) -> None:
    path.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))


if __name__ == "__main__":
    main()
