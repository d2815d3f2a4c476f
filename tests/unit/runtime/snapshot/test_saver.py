"""Training goes on while a snapshot is written, and hears of it when that fails."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime.snapshot import load, read, saver
from dtctl.runtime.snapshot.format import layout
from tests.facts import raises


class SlowDisk:
    """An fsync that waits until it is let through."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def fsync(self, descriptor: int) -> None:
        self.reached.set()
        assert self.open.wait(120)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.open.set()


def state(value: float) -> dict[str, object]:
    return {"model": {"weight": torch.full((1000,), value)}}


def steps(folder: Path) -> list[int]:
    return [step for step, _ in layout.list_step_folders(folder)]


def test_what_is_written_is_the_state_at_the_time_of_the_save(tmp_path: Path, slow_disk: SlowDisk) -> None:
    weight = torch.zeros(1000)
    found = saver.Saver(tmp_path, complain=print)
    settings = {"lr": 0.1, "betas": [0.9, 0.95]}
    assert found.save(1, {"model": {"weight": weight, "settings": settings}}, facts={"position": 8})
    assert slow_disk.reached.wait(120)
    assert found.busy
    weight += 1  # training goes on
    settings["lr"] = 0.2
    settings["betas"][0] = 0.5
    slow_disk.open.set()
    found.finish()
    good, _ = read.find_newest_good(tmp_path)
    assert good is not None
    model = load.load(good)["model"]
    assert model["weight"].tolist() == [0.0] * 1000
    assert model["settings"] == {"lr": 0.1, "betas": [0.9, 0.95]}


def test_a_save_that_comes_too_early_is_skipped_if_so_configured(tmp_path: Path, slow_disk: SlowDisk) -> None:
    found = saver.Saver(tmp_path, keep=5, when_busy="skip", complain=print)
    assert found.save(1, state(1), facts={})
    assert slow_disk.reached.wait(120)
    assert not found.save(2, state(2), facts={})
    slow_disk.open.set()
    assert found.save(3, state(3), facts={}, needed=True)
    found.finish()
    assert steps(tmp_path) == [3, 1]


def test_else_it_waits_and_memory_does_not_grow(tmp_path: Path) -> None:
    before = threading.active_count()
    found = saver.Saver(tmp_path, keep=9, complain=print)
    for step in range(1, 6):
        assert found.save(step, state(step), facts={})
        assert threading.active_count() <= before + 3  # who writes, who sums, and who renews the lease
    found.finish()
    assert steps(tmp_path) == [5, 4, 3, 2, 1]
    for step, path in layout.list_step_folders(tmp_path):
        assert load.load(read.verify_snapshot(path))["model"]["weight"][0] == step


def test_a_failed_save_is_told_at_once_and_ends_training_only_when_it_was_not_the_first(tmp_path: Path) -> None:
    told: list[DtctlError] = []
    folder = tmp_path / "snapshots"
    found = saver.Saver(folder, max_failed=2, complain=told.append)
    found.open()
    shutil.rmtree(folder)
    folder.write_text("no folder")
    found.save(1, state(1), facts={})
    found.save(2, state(2), facts={})  # waits for the first, whose failure is one too few
    with raises(SnapshotError, "step 2"):
        found.save(3, state(3), facts={})
    assert [error.message.split(" cannot")[0] for error in told] == ["the snapshot of step 1", "the snapshot of step 2"]
    folder.unlink()
    recovered = saver.Saver(folder, max_failed=2, complain=told.append)
    recovered.open()
    shutil.rmtree(folder)
    folder.write_text("no folder")
    recovered.save(1, state(1), facts={})
    with raises(SnapshotError, "step 1"):
        recovered.finish()
    folder.unlink()
    recovered.save(2, state(2), facts={})
    recovered.finish()
    assert (recovered.failed, steps(folder)) == (0, [2])
