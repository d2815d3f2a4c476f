"""Snapshots that leave frozen weights out, as those of an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import SnapshotError
from dtctl.runtime import Trainer
from dtctl.runtime.snapshot import newest
from dtctl.runtime.snapshot.format import layout
from tests.unit.runtime.conftest import Make

SETTINGS: dict[str, Any] = {
    "steps": 8, "micro_batch": 4, "lr": 0.05, "optimizer": "adamw",
    "snapshot": {"every_steps": 4, "trained_only": True},
}  # fmt: skip


class Adapted(nn.Module):
    """A frozen layer, and a trained one of low rank beside it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = nn.Linear(8, 64)
        with torch.no_grad():
            for parameter in self.base.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 64, bias=False)
        nn.init.zeros_(self.up.weight)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.base(inputs) + self.up(self.down(inputs))


def size_loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


def train(make: Make, *, model: nn.Module | None = None, steps: int = 8, **snapshot: Any) -> Trainer:
    torch.manual_seed(1)
    settings = {**SETTINGS, "steps": steps, "snapshot": {**SETTINGS["snapshot"], **snapshot}}
    trainer = make(settings, model=model or Adapted(), loss=size_loss)
    trainer.run()
    return trainer


def kept(folder: str = "snapshots") -> dict[str, Any]:
    found = newest(Path(folder))
    assert found is not None
    model: dict[str, Any] = found.parts["model"]
    return model


def test_a_snapshot_has_what_is_trained_and_the_buffers(make: Make) -> None:
    train(make)
    assert kept().keys() == {"down.weight", "up.weight", "calls"}


def test_a_resume_is_exact(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    straight = train(make)
    last, *_ = layout.list_step_folders(Path("snapshots"))
    shutil.rmtree(last[1])
    capsys.readouterr()
    again = train(make)
    shown = capsys.readouterr().out
    assert "resumed at step 4 of 8: nothing known differs" in shown
    assert "exact: steps 5 to 6 repeated bit for bit" in shown
    pairs = zip(straight.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_other_frozen_weights_are_refused(make: Make) -> None:
    train(make, steps=4)
    with pytest.raises(SnapshotError, match="2 frozen ones"):
        train(make, model=Adapted(seed=5))


def test_a_weight_that_the_program_writes_is_kept(make: Make) -> None:
    """An average of the trained weights, as teachers are, is written by way of `data`, which changes no version."""

    class Averaged(Adapted):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.base.bias.data.mul_(0.9)
            return super().forward(inputs)

    train(make, model=Averaged())
    assert kept().keys() == {"down.weight", "up.weight", "calls", "base.bias"}


def test_a_single_number_that_the_program_writes_is_noticed(make: Make) -> None:
    class Poked(Adapted):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.calls == 5:  # after the first snapshot
                self.base.weight.data[7, 3] += 1
            return super().forward(inputs)

    train(make, model=Poked())
    assert kept().keys() == {"down.weight", "up.weight", "calls", "base.weight"}


def test_a_whole_snapshot_is_continued_by_one_of_trained_weights(make: Make) -> None:
    train(make, steps=4, trained_only=False)
    assert "base.weight" in kept()
    train(make)
    assert "base.weight" not in kept()
