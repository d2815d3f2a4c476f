"""Which snapshots stay; never the last good one is removed."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from dtctl.runtime.snapshot import write
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.storage.retention import RetentionRule


def save(folder: Path, step: int, keep: int) -> None:
    write.save_snapshot_parts(folder, step, {"model": {"weight": torch.zeros(10)}}, facts={}, keep=keep)


def steps(folder: Path) -> list[int]:
    return [step for step, _ in layout.list_step_folders(folder)]


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [10, 3]


def test_one_without_commit_does_not_count(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, keep=2)
    (layout.build_snapshot_path(tmp_path, 2) / layout.COMMIT).unlink()
    save(tmp_path, 3, keep=2)
    assert steps(tmp_path) == [3, 1]


def test_a_future_that_was_not_resumed_from_goes(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step, keep=5)
    save(tmp_path, 15, keep=1)  # the run fell back to 10, because 20 was bad
    assert steps(tmp_path) == [15]


def test_drafts_of_killed_writers_go_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".step-00000004.99.draft").mkdir(parents=True)
    (tmp_path / ".here-0123-4.draft").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").touch()
    save(tmp_path, 5, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "notes", "step-00000005"]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 4), st.integers(1, 100))
def test_one_every_so_often_stays_for_ever_and_gaps_stay_small(gaps: list[int], keep: int, every_s: int) -> None:
    rule = RetentionRule(keep=keep, every_s=every_s)
    there: list[tuple[int, float]] = []
    now_s, often = 0.0, []
    for step, gap in enumerate(gaps, 1):
        now_s += gap
        there.append((step, now_s))
        stays = rule.choose_retained_steps(there)
        there = [row for row in there if row[0] in stays]
        often = list(there[:-keep])
        assert step in stays
    # What is older than the newest ones is at least so far apart; and not much more, since saves come every 50 s.
    apart = [after - before for (_, before), (_, after) in itertools.pairwise(often)]
    assert all(every_s <= gap < every_s + 50 for gap in apart)


def test_the_best_stay_and_a_command_without_options_does_the_same() -> None:
    rule = RetentionRule(keep=2, every_s=100, best=[3])
    good = [(step, 30.0 * step) for step in range(1, 9)]
    assert rule.choose_retained_steps(good) == {8, 7, 3, 1, 5}
    assert RetentionRule.from_manifest_facts({"retention": rule.document()}) == RetentionRule(
        keep=2, every_s=100, best=[3]
    )
    assert RetentionRule.from_manifest_facts({}) == RetentionRule(keep=1)
