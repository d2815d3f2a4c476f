"""A snapshot is there whole or not at all."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import load, read, write
from dtctl.runtime.snapshot.format import layout
from tests.facts import raises

PARTS = {"model": {"weight": torch.zeros(100)}}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_but_snapshots_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "snapshots"
    path = write.save_snapshot_parts(folder, 7, PARTS, facts={"a": [1, None, 0.1]}, keep=1)
    assert names(folder) == ["step-00000007"] == [path.name]
    assert names(path) == ["COMMIT", "manifest.json", "model.safetensors"]


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    write.save_snapshot_parts(tmp_path, 7, PARTS, facts={}, keep=2)
    write.save_snapshot_parts(tmp_path, 7, {"model": {"weight": torch.ones(3)}}, facts={}, keep=2)
    good, _ = read.find_newest_good(tmp_path)
    assert good is not None
    assert load.load(good)["model"]["weight"].tolist() == [1, 1, 1]
    assert names(tmp_path) == ["step-00000007"]


def test_a_full_disk_leaves_older_snapshots(tmp_path: Path) -> None:
    write.save_snapshot_parts(tmp_path, 1, PARTS, facts={}, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # writes beyond it fail as on a full disk
    try:
        with raises(SnapshotError, "step 2") as caught:
            write.save_snapshot_parts(tmp_path, 2, {"model": {"weight": torch.zeros(10_000)}}, facts={}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.where == str(tmp_path)
    assert names(tmp_path) == ["step-00000001"]
    assert read.verify_snapshot(layout.build_snapshot_path(tmp_path, 1)).status == "ok"
