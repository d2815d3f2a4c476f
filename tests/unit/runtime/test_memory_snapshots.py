"""When snapshots in memory are made, and when not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dtctl import names
from dtctl.errors import PlanError
from dtctl.runtime import memory_snapshots
from dtctl.runtime.distributed.worker import resolve_worker_from_env
from dtctl.runtime.memory_snapshots import FIRST, MemorySnapshots
from dtctl.runtime.snapshot import read
from dtctl.runtime.snapshot.format import layout
from dtctl.train.config import MemorySnapshotConfig

STATE = {"model": {"weight": torch.arange(1000.0)}}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemorySnapshots:
    monkeypatch.setenv(names.MEMORY_DIR, str(tmp_path / "own"))
    return MemorySnapshots(MemorySnapshotConfig(), resolve_worker_from_env({}), nn.Linear(1, 1))


def test_as_many_are_made_as_cost_two_hundredths_of_a_step(memory: MemorySnapshots) -> None:
    assert next(step for step in range(1, 9) if memory.is_due(step)) == FIRST
    memory._last, memory._cost_s = (5, 100.0), 0.1
    memory._choose_snapshot_interval(15, 110.0)  # a step takes a second: 0.1 s is 2% of 5
    assert memory._every == 5
    memory._cost_s = 1e-5
    memory._choose_snapshot_interval(15, 110.0)
    assert memory._every == 1


def test_they_are_snapshots_like_any_other(memory: MemorySnapshots, tmp_path: Path) -> None:
    for step in (5, 10, 15):
        memory.save(step, STATE, {"position": step}, began_s=0.0)
    memory.close()
    listed = layout.list_step_folders(tmp_path / "own" / "snapshots")
    assert [step for step, _ in listed] == [15, 10]
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    assert read.verify_commit_record(listed[0][1]).status == "ok"


def test_a_node_without_the_memory_goes_on_without_them(
    memory: MemorySnapshots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_snapshots, "_available_bytes", lambda: 3 * 2 * 4000 - 1)
    memory.save(5, STATE, {}, began_s=0.0)
    assert memory.is_off
    assert not memory.is_due(100)
    assert "no snapshots in memory" in capsys.readouterr().out


def test_failures_in_a_row_end_them_and_not_the_training(memory: MemorySnapshots, tmp_path: Path) -> None:
    (tmp_path / "own" / "snapshots").write_text("no folder")
    for step in range(5, 50, 5):
        if memory.is_due(step):
            memory.save(step, STATE, {}, began_s=0.0)
    assert memory.is_off


def test_without_a_supervisor_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(names.MEMORY_DIR, raising=False)
    with pytest.raises(PlanError) as refused:
        MemorySnapshots(MemorySnapshotConfig(), resolve_worker_from_env({}), nn.Linear(1, 1))
    assert refused.value.where == "train.snapshot.memory"
