"""Trains models and losses that others' code is full of, under several strategies; run by test_odd_models.py."""

from __future__ import annotations

import argparse
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl.errors import DtctlError
from dtctl.runtime import TensorData, Trainer, Worker, load, start
from dtctl.runtime.randomness import seed_all


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head, self.x = nn.Linear(8, 1), nn.Parameter(torch.full((1,), 0.1))
        if kind == "weight norm":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for block in self.blocks:
                    nn.utils.weight_norm(block.inner)
        if kind == "kept graph":
            self.kept = self.head.weight * 2
        if kind == "complex":
            self.turn = nn.Parameter(torch.full((8,), 0.7 + 0.7j, dtype=torch.complex128))
        if kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(1.5))

    def penalty(self) -> torch.Tensor:
        return self.x.square().sum() + sum(p.square().sum() for p in self.head.parameters())

    def whole(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stream = inputs
        for block in self.blocks:
            found = block(stream)
            if self.kind == "in place":
                found += stream
                stream = found
            else:
                stream = stream + found
        if self.kind == "complex":
            stream = (stream * self.turn).real
        if self.kind == "kept graph":
            self.kept = self.head.weight * 2
        if self.kind == "scalar":
            stream = stream * self.scale
        return self.head(stream) if self.kind in ("attribute", "method") else self.head(stream) * self.x


class Block(nn.Module):
    """Returns a view."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(8, 8), kind

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return self.inner(stream).unsqueeze(1).squeeze(1)


class Lookahead(torch.optim.SGD):
    """Has slow weights in its state dict, divided like parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.slow: list[torch.Tensor] = []
        self.count = 0

    def everything(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.slow = self.slow or [parameter.detach().clone() for parameter in self.everything()]
        super().step()
        self.count += 1
        if self.count % 2 == 0:
            for parameter, slow in zip(self.everything(), self.slow, strict=True):
                parameter.copy_(slow.lerp_(parameter.detach(), 0.5))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "slow": list(self.slow), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        slow, self.count = own.pop("slow"), own.pop("count")
        super().load_state_dict(own)
        self.slow = [torch.empty_like(p).copy_(w) for p, w in zip(self.everything(), slow, strict=False)]


def loss_of(kind: str) -> Any:
    def loss(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if kind == "past the model":
            return model.whole(batch)  # type: ignore[no-any-return]
        value = (model(batch[0]) - batch[1]).square().mean()
        if kind == "attribute":
            value = value + model.x.square().sum()
        if kind == "method":
            value = value + model.penalty()
        return value

    return loss


def train(case: dict[str, Any], worker: Worker, folder: Path) -> dict[str, Any]:
    kind, settings = case["kind"], case["settings"]
    given = {
        "global_batch": 16, "micro_batch": 16 // worker.world_size, "steps": 4, "log_every": 9, "lr": 0.05,
        "schedule": "constant", "clip_norm": 1.0, "snapshot": {"dir": str(folder), "every_steps": 2}, **settings,
    }  # fmt: skip
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results: dict[str, Any] = {}
    for steps in case.get("steps", [4]):
        seed_all(0)
        optimizer = (lambda model: Lookahead(model.parameters())) if kind == "own state" else None
        try:
            trainer = Trainer(
                load({**given, "steps": steps}, argv=[], environ={}), worker, Model(kind).double(), loss_of(kind),
                TensorData(inputs, inputs[:, :1]), optimizer=optimizer,
            )  # fmt: skip
            trainer.run()
        except DtctlError as exc:
            return {"refused": f"{exc.message} {exc.where} {exc.hint}"}
        results = {"weights": trainer.full_weights(), "began_at": trainer.training.position.began_at}
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=json.loads)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    with start(timeout_s=60) as worker:
        found = [train(case, worker, args.folder / str(number)) for number, case in enumerate(args.cases)]
        if worker.is_first:
            torch.save(found, args.folder / "found.pt")


def plateau() -> None:
    """A rate that falls by torch's ReduceLROnPlateau, stepped from the loss; killed in a pass if KILL names it."""
    holder = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(holder, factor=0.5, patience=1, threshold=0.2)
    passes = 0

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        nonlocal passes
        value = (model(batch[0]) - batch[1]).square().mean()
        scheduler.step(value.item())
        passes += 1
        if passes == int(os.environ.get("KILL", "-1")):
            trainer.training.snapshots.saver.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    settings = {"global_batch": 8, "steps": 20, "log_every": 9, "optimizer": "sgd", "snapshot": {"every_steps": 5}}
    with start() as worker:
        seed_all(1)
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        trainer = Trainer(
            load(settings, argv=[], environ={}), worker, nn.Linear(8, 1), loss,
            TensorData(inputs, inputs.sum(1, keepdim=True)), rate=lambda _: holder.param_groups[0]["lr"],
        )  # fmt: skip
        trainer.run()
        torch.save(trainer.full_weights(), "weights.pt")


if __name__ == "__main__":
    plateau() if "PLATEAU" in os.environ else main()
