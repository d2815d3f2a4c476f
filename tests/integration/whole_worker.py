"""Trains with optimizers that look at whole matrices, under several strategies; run by test_whole_steps.py."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl.errors import DtctlError
from dtctl.runtime import TensorData, Trainer, Worker, load, start
from dtctl.runtime.randomness import seed_all


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(8, 22), nn.Linear(22, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Orthogonal(torch.optim.Optimizer):
    """Muon as people write it, in the format of the parameters, with a number of steps that is no tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                update = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                if p.ndim == 2:
                    x = update / (update.norm() + 1e-7)
                    for _ in range(5):
                        a = x @ x.mT
                        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                    update = x
                p.add_(update, alpha=-group["lr"] / state["steps"])


class Coupled(Orthogonal):
    """The size of a step follows from all gradients."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            size = sum(float(torch.linalg.vector_norm(p.grad)) for p in group["params"] if p.grad is not None)
            rate, group["lr"] = group["lr"], group["lr"] / (1 + size)
            super().step()
            group["lr"] = rate


def counted(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)


OPTIMIZERS: dict[str, Any] = {
    "orthogonal": lambda model: Orthogonal(model.parameters()),
    "torch's Muon": counted,
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02),
    "coupled": lambda model: Coupled(model.parameters()),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
    "muon": None,
}


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(case: dict[str, Any], worker: Worker, folder: Path) -> dict[str, Any]:
    name = case["optimizer"]
    settings = {
        "global_batch": 8, "steps": case.get("steps", 4), "log_every": 9, "clip_norm": 1.0, "weight_decay": 0.1,
        "lr": 0.02, "optimizer": "muon" if name == "muon" else "adamw", "accumulate": 2, "schedule": "constant",
        "snapshot": {"dir": str(folder / "snapshots")}, **case["settings"],
    }  # fmt: skip
    seed_all(3)
    model = Model().double()
    if name == "torch's Muon":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
    draw = torch.Generator().manual_seed(7)
    data = TensorData(torch.randint(0, 10, (40, 3), generator=draw), torch.randint(0, 3, (40, 3), generator=draw))
    config = load(settings, argv=[], environ={})
    try:
        trainer = Trainer(config, worker, model, loss, data, optimizer=OPTIMIZERS[name])
    except DtctlError as exc:
        return {"refused": exc.message}
    own = "_dtctl_dependent" in vars(type(trainer.optimizer))
    trainer.run()
    return {"weights": trainer.full_weights(), "together": own, "began_at": trainer.training.position.began_at}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=json.loads)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    with start(timeout_s=60) as worker:
        found = [train(case, worker, args.folder / case["folder"]) for case in args.cases]
        if worker.is_first:
            torch.save(found, args.folder / "found.pt")


if __name__ == "__main__":
    main()
