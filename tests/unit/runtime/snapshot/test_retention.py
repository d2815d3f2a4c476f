"""Which snapshots stay; never the last good one is removed."""

from __future__ import annotations

from pathlib import Path

import torch

from dtctl.runtime.snapshot import layout, write


def save(folder: Path, step: int, keep: int) -> None:
    write.save(folder, step, {"model": {"weight": torch.zeros(10)}}, facts={}, keep=keep)


def steps(folder: Path) -> list[int]:
    return [step for step, _ in layout.listing(folder)]


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [10, 3]


def test_one_without_commit_does_not_count(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, keep=2)
    (layout.folder_of(tmp_path, 2) / layout.COMMIT).unlink()
    save(tmp_path, 3, keep=2)
    assert steps(tmp_path) == [3, 1]


def test_a_future_that_was_not_resumed_from_goes(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step, keep=5)
    save(tmp_path, 15, keep=1)  # the run fell back to 10, because 20 was bad
    assert steps(tmp_path) == [15]


def test_drafts_of_killed_writers_go_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".step-00000004.99.draft").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").touch()
    save(tmp_path, 5, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "notes", "step-00000005"]
