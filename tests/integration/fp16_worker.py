"""Trains in fp16 with a loss that overflows at first, under several strategies; run by test_fp16.py.

The loss is a sum and the number of its tokens, both so many times too large that the first steps are skipped: a
gradient that is twice as large on some number of workers skips one step more.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl.errors import DtctlError
from dtctl.runtime import Trainer, Worker, load, start
from tests.integration import mixtures
from tests.integration.equality_worker import by_tokens, data, model

LOUD = 30.0


def summed(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    total, count = by_tokens(module, batch)
    return total * LOUD, count * LOUD


def mean(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[0]).transpose(1, 2), batch[1]) * 100 * LOUD


def train(case: dict[str, Any], worker: Worker, folder: Path) -> dict[str, Any]:
    settings = {
        "precision": "fp16", "global_batch": 16, "micro_batch": 4, "steps": 24, "log_every": 50, "lr": 1e-4,
        "optimizer": "sgd", "clip_norm": None, "snapshot": {"dir": str(folder / "snapshots")}, **case["settings"],
    }  # fmt: skip
    if "pipeline" in json.dumps(settings.get("strategy")) and worker.world_size == 2:
        del settings["micro_batch"]
        settings["accumulate"] = 4
    made = mixtures.model("own", torch.float32) if case.get("mixture") else model(torch.float32, 4)
    loss = mean if case.get("mean") else summed
    try:
        trainer = Trainer(load(settings, argv=[], environ={}), worker, made, loss, data(128))
    except DtctlError as exc:
        return {"refused": exc.message}
    trainer.run()
    rows = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()] if worker.is_first else []
    return {
        "weights": trainer.full_weights(),
        "scale": trainer.training.trained.loss_scale and trainer.training.trained.loss_scale.scale,
        "skipped": [row["step"] for row in rows if row.get("skipped")],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=json.loads)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    found = []
    with start(timeout_s=60) as worker:
        for number, case in enumerate(args.cases):
            found.append(train(case, worker, args.folder / str(number)))
            if worker.is_first:
                Path("metrics.jsonl").unlink(missing_ok=True)
            worker.barrier()
        if worker.is_first:
            torch.save(found, args.folder / "found.pt")


if __name__ == "__main__":
    main()
