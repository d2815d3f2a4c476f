"""Damage at random places is noticed, the snapshot before is taken, and the bits at the end are right.

A few places here; benchmarks/damage.py tries hundreds.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dtctl.runtime import TensorData, TrainConfig, Trainer, Worker, build
from dtctl.runtime.distributed.worker import resolve_worker_from_env
from dtctl.runtime.exactness import record
from dtctl.runtime.randomness import seed_all
from dtctl.runtime.snapshot import commands
from dtctl.runtime.snapshot.format import layout
from tests.damage import hurt
from tests.unit.runtime.snapshot.gang import gang

pytestmark = pytest.mark.torch


class Killed(Exception):
    """Stands for a process that is gone."""


def train(folder: Path, worker: Worker, *, until: int | None = None) -> None:
    """Train 9 steps with dropout in `folder`, or until all are killed in a step."""
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

    snapshot = {"dir": str(folder), "every_steps": 3, "keep": 9, "layout": "sharded"}
    config = build(TrainConfig, {"steps": 9, "log_every": 9, "snapshot": snapshot}, at="train", where="test")
    Trainer(config, worker, model, loss, TensorData(inputs, inputs.sum(1, keepdim=True))).run()


def run(workers: int, folder: Path, *, until: int | None = None) -> None:
    """`train`, on so many workers; who is alone writes everything, several each their part."""

    def action(worker: Worker) -> None:
        with contextlib.suppress(Killed):
            train(folder, worker, until=until)

    if workers == 1:
        action(resolve_worker_from_env({}))
    else:
        gang(workers, folder.parent, action)


@pytest.mark.parametrize(("workers", "places"), [(1, 15), (2, 5)])
def test_all_damage_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], workers: int, places: int
) -> None:
    monkeypatch.chdir(tmp_path)
    run(workers, tmp_path / "straight")
    expected = commands.compute_snapshot_digest(tmp_path / "straight")["digest"]
    run(workers, tmp_path / "killed", until=8)
    assert [step for step, _ in layout.list_step_folders(tmp_path / "killed")] == [6, 3]
    assert (tmp_path / "killed" / "step-00000006" / "model.00001.safetensors").exists() == (workers > 1)
    source = random.Random(11)
    for index in range(places):
        folder = tmp_path / f"damaged-{index}"
        shutil.copytree(tmp_path / "killed", folder)
        (
            layout.build_snapshot_path(folder, 6) / record.FILE
        ).unlink()  # no part of the snapshot; it has a digest of its own
        what = hurt(source.choice(["flip", "truncate", "delete"]), layout.build_snapshot_path(folder, 6), source)
        found = commands.verify_snapshots(folder)
        assert [row["status"] == "ok" for row in found["snapshots"]] == [False, True], what
        assert found["newest_good"] == str(layout.build_snapshot_path(folder, 3))
        capfd.readouterr()
        run(workers, folder)
        out = capfd.readouterr().out
        assert "snapshot skipped: step-00000006 is " in out, what
        assert "resumed at step 3 of 9: nothing known differs\nexact: steps 4 to 5 repeated bit for bit" in out, what
        assert commands.compute_snapshot_digest(folder)["digest"] == expected, what
        assert commands.verify_snapshots(folder)["newest_good"] == str(layout.build_snapshot_path(folder, 9))
        shutil.rmtree(folder)
