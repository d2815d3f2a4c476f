"""Trains many small cases in the workers of one process group; run by test_equality.py.

Each case leaves its losses and final parameters, to be compared with one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl import names
from dtctl.runtime import TensorData, Trainer, Worker, load, start
from dtctl.runtime.randomness import seed_all
from dtctl.runtime.snapshot.saver import Saver
from tests.integration import mixtures

SAMPLES = 60  # with a global batch of 16: a short last batch of 12, of which some workers get none
CONTEXT = 8
MODEL = Path(__file__).parents[2] / "examples" / "gpt" / "model.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training, whatever the number of workers."""

    optimizer: str = "sgd"
    dtype: str = "float64"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the strategy; the batch is the same in all cases."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the one process has, too, with which the case is compared."""
    layers: int = 2
    """Blocks of the model; pipelines have four stages to fill."""

    def key(self) -> str:
        """Names the case and its files."""
        text = json.dumps(self.settings.get("strategy", "single"))
        rest = {key: value for key, value in self.settings.items() if key != "strategy"} | dict(self.common)
        words = [text, self.optimizer, self.dtype, f"{self.layers}-layers", json.dumps(rest) if rest else ""]
        return "".join(c if c.isalnum() or c in ".-=" else "_" for c in " ".join(words)).strip("_")

    def alone(self) -> Case:
        """The training of one process that this one is compared with; that compiling changes no bit is a unit test."""
        common = {key: value for key, value in self.common.items() if key != "compile"}
        return dataclasses.replace(self, settings={}, common=common)


def model(dtype: torch.dtype, layers: int) -> nn.Module:
    """The GPT of the examples: tied embeddings, and some parameters frozen."""
    spec = importlib.util.spec_from_file_location("example_gpt_model", MODEL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    seed_all(3)
    shape = module.GPTConfig(layers=layers, heads=4, embed=16, context=CONTEXT, dropout=0.0)
    made: nn.Module = module.GPT(shape).to(dtype)
    for name, parameter in made.named_parameters():
        if name in ("positions.weight", "blocks.1.norm1.weight", "blocks.0.wide.weight"):
            parameter.requires_grad_(False)
    return made


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets)


def by_tokens(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Some targets do not count, in some samples more than in others."""
    inputs, targets = batch
    targets = torch.where(inputs.cumsum(1) % 3 < inputs[:, :1] % 3, -100, targets)
    logits = model(inputs).transpose(1, 2)
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()


def score(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs, targets = batch
    return {"loss": nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none").mean(1)}


def data(samples: int) -> TensorData:
    """Few different tokens, so that a few steps learn something."""
    tokens = torch.randint(0, 8, (samples, CONTEXT + 1), generator=torch.Generator().manual_seed(11))
    return TensorData(tokens[:, :-1], tokens[:, 1:])


def trainer_of(case: Case, worker: Worker, folder: Path, snapshots: Path) -> Trainer:
    """The case's training, from the newest of the snapshots if there is one."""
    os.environ[names.NODE] = f"node{worker.rank}"
    os.environ[names.METRICS] = str(folder / "metrics.jsonl")
    given = {
        "global_batch": 16, "accumulate": 1 if worker.world_size == 1 else 2, "epochs": 1, "log_every": 1,
        "lr": 0.5 if case.optimizer == "sgd" else 3e-3, "optimizer": case.optimizer, "clip_norm": 0.7,
        "weight_decay": 0.1, "snapshot": {"dir": str(snapshots)}, **case.common, **case.settings,
    }  # fmt: skip
    config = load(given, argv=[], environ={})
    dtype = getattr(torch, case.dtype)
    made = partial(model, dtype, case.layers) if config.data.get("function") else model(dtype, case.layers)
    if config.data.get("mixture"):
        made = mixtures.model(config.data["mixture"], dtype)
    wanted = by_tokens if config.data.get("tokens") else loss
    brief = config.data.get("brief")
    validation = {} if brief else {"validation": data(13), "score": score}
    return Trainer(config, worker, made, wanted, data(32 if brief else SAMPLES), **validation)


def train(case: Case, worker: Worker, folder: Path, base: Path) -> None:
    """Train one case and leave losses and weights in `folder`.

    Also there: `again`, a snapshot made right after the last one was loaded, and `taken`, the same after one of a
    single process was.
    """
    trainer = trainer_of(case, worker, folder, folder / "snapshots")
    trainer.run()
    weights = trainer.full_weights()
    if worker.is_first:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        keep = [[row["loss"], row["grad_norm"], row.get("val_loss", 0.0)] for row in rows]
        shutil.copyfile(folder / "metrics.jsonl", folder / "first.jsonl")
        torch.save({"losses": torch.tensor(keep, dtype=torch.float64), "weights": weights}, folder / "result.pt")

    single = base / case.alone().key()
    trainer = trainer_of(case, worker, folder, single / "snapshots")
    snapshots = trainer.training.snapshots
    for origin, target in ((single, folder / "taken"), (folder, folder / "again")):  # each into what differs from it
        snapshots.folder, snapshots.saver = origin / "snapshots", Saver(folder / "nothing", keep=2, complain=print)
        trainer.run()  # no step is left to be done
        snapshots.saver = Saver(target, keep=2, complain=print)
        trainer.save()
        snapshots.saver.finish()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path, help="JSON: a list of cases")
    parser.add_argument("folder", type=Path)
    parser.add_argument("base", type=Path, help="folder of the cases that one process trained")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    cases = [Case(**values) for values in json.loads(args.cases.read_text())]
    with start(timeout_s=args.seconds) as worker:
        for case in cases:
            folder = args.folder / case.key()
            if worker.is_first:
                folder.mkdir(parents=True)
            worker.barrier()
            began_s = time.monotonic()
            train(case, worker, folder, args.base)
            if worker.is_first:
                print(f"case {case.key()} took {time.monotonic() - began_s:.1f} s", flush=True)


def written(cases: list[Case], path: Path) -> None:
    path.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))


if __name__ == "__main__":
    main()
