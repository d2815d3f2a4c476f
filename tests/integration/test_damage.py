"""Damage at a hundred random places is noticed, the snapshot before is taken, and the bits at the end are right."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dtctl.runtime import TensorData, TrainConfig, Trainer, Worker, build
from dtctl.runtime.snapshot import commands, layout
from dtctl.runtime.worker import identify, seed_all

pytestmark = pytest.mark.torch

PLACES = 100


class Killed(Exception):
    """Stands for a process that is gone."""


def train(folder: Path, *, until: int | None = None) -> None:
    """Train 9 steps with dropout in `folder`, or until it is killed in a step."""
    seed_all(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    calls = 0

    def loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == until:
            raise Killed
        return nn.functional.mse_loss(module(batch[0]), batch[1])

    settings = {"steps": 9, "log_every": 9, "snapshot": {"dir": str(folder), "every_steps": 3, "keep": 9}}
    config = build(TrainConfig, settings, at="train", where="test")
    worker: Worker = identify({})
    Trainer(config, worker, model, loss, TensorData(inputs, inputs.sum(1, keepdim=True))).run()


def hurt(kind: str, folder: Path, source: random.Random) -> str:
    """Damage one file; each byte of the snapshot is as likely as any other, each file for `delete`."""
    files = sorted(folder.iterdir())
    sizes = [path.stat().st_size for path in files]
    (path,) = source.choices(files, sizes if source.random() < 0.5 and kind != "delete" else None)
    if kind == "delete":
        path.unlink()
        return f"{path.name} deleted"
    whole = bytearray(path.read_bytes())
    place = source.randrange(len(whole))
    if kind == "truncate":
        del whole[place:]
    else:
        whole[place] ^= 1 << source.randrange(8)
    path.write_bytes(whole)
    return f"{kind} at {place} of {path.name}"


def test_a_hundred_of_a_hundred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "straight")
    expected = commands.digest(tmp_path / "straight")["digest"]
    with pytest.raises(Killed):
        train(tmp_path / "killed", until=8)
    assert [step for step, _ in layout.listing(tmp_path / "killed")] == [6, 3]
    source = random.Random(11)
    for index in range(PLACES):
        folder = tmp_path / f"damaged-{index}"
        shutil.copytree(tmp_path / "killed", folder)
        what = hurt(source.choice(["flip", "truncate", "delete"]), layout.folder_of(folder, 6), source)
        found = commands.verify(folder)
        assert [row["status"] == "ok" for row in found["snapshots"]] == [False, True], what
        assert found["newest_good"] == str(layout.folder_of(folder, 3))
        capsys.readouterr()
        train(folder)
        out = capsys.readouterr().out
        assert "snapshot passed over: step-00000006 is " in out, what
        assert "resumed at step 3 of 9: exact" in out, what
        assert commands.digest(folder)["digest"] == expected, what
        assert commands.verify(folder)["newest_good"] == str(layout.folder_of(folder, 9))
        shutil.rmtree(folder)
