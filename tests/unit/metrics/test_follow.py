"""What is known of a run, from files that grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtctl.launch.records.events import (
    AttemptRestarting,
    AttemptRunning,
    AttemptStarting,
    RunPlanned,
    RunStopping,
    SnapshotBegun,
    WorkerExited,
)
from dtctl.launch.records.ledger import LedgerFacts
from dtctl.metrics.follow import FileTail, TrainingSpeed
from tests.unit.metrics.following import STARTED, WrittenRun


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path)


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = FileTail(path)
    assert tail.lines() == []
    path.write_text("one\ntw")
    assert tail.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert tail.lines() == ["two", "three"]
    path.write_text("anew\n")
    assert tail.lines() == ["anew"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    assert FileTail(tmp_path / "pipe").lines() == []


def test_a_worker_that_is_ended_because_of_another_has_not_failed(run: WrittenRun) -> None:
    figures = run.happens(
        RunPlanned(run="try-1", nodes=("a", "b"), world_size=2),
        AttemptStarting(attempt=0),
        WorkerExited(node="a", rank=0, exit_code=1),
        RunStopping(reason="a failed"),
        WorkerExited(node="b", rank=1, exit_code=143, signal=15),
        AttemptRestarting(attempt=1, of=3, reason="ended with exit code 1", node="a", rank=0),
        AttemptStarting(attempt=1),
        WorkerExited(node="b", rank=1, exit_code=9),
        SnapshotBegun(step=40),
    )
    assert figures.failures == {"a": 1, "b": 1}
    assert (figures.snapshots, figures.snapshot_step, len(figures.progress.restarts)) == (1, 40, 1)


def test_what_an_attempt_sends_again_is_no_step(run: WrittenRun) -> None:
    run.happens(AttemptStarting(attempt=0), AttemptRunning(attempt=0))
    figures = run.logs({"step": 10, "loss": 1.0}, {"step": 20, "loss": 0.5})
    stepped = figures.stepped
    assert (figures.step, stepped) == (20, run.now)
    run.now += 50
    run.happens(AttemptStarting(attempt=1))
    path = run.record.folder / "metrics.jsonl"
    text = path.read_text()
    path.write_text("")  # as the launcher does when rank 0 begins again from a snapshot
    run.follower.collect_new_events()
    path.write_text(text.splitlines(keepends=True)[0])
    run.follower.collect_new_events()
    assert figures.stepped == stepped
    assert run.logs({"step": 11, "loss": 0.9}).stepped == run.now
    assert figures.step == 11


def test_the_step_that_an_attempt_resumes_at_was_not_done_by_it(run: WrittenRun) -> None:
    run.happens(AttemptStarting(attempt=0))
    assert run.spends(steps=30, useful=3.0).stepped is None
    run.now += 5
    figures = run.spends(steps=35, useful=4.0)
    assert (figures.step, figures.stepped) == (35, run.now)
    stepped = run.now
    run.now += 5
    run.happens(AttemptStarting(attempt=1))
    run.spends(steps=30, useful=4.5)
    assert figures.stepped == stepped
    run.now += 5
    assert run.spends(steps=31, useful=5.0).stepped == run.now > stepped


def test_one_bad_step_among_good_ones_is_seen(run: WrittenRun) -> None:
    good = {"loss": 1.0, "grad_norm": 1.0}
    assert run.logs({"step": 1, **good}).spoilt == ""
    figures = run.logs({"step": 2, **good}, {"step": 3, "loss": None, "grad_norm": 1.0}, {"step": 4, **good})
    assert figures.spoilt == "loss of step 3 not finite"
    run.follower.collect_new_events()
    assert figures.spoilt, "nothing new was logged"
    assert run.logs({"step": 5, **good}).spoilt == ""


def test_lines_that_are_none_are_left_out(run: WrittenRun) -> None:
    with (run.record.folder / "metrics.jsonl").open("w") as file:
        file.write('{"step": "x"}\n[1]\nnonsense\n' + '{"a":' * 5000 + "\n")
        file.write(json.dumps({"step": 3, "text": "no number", "huge": 10**400, "time": STARTED}) + "\n")
    run.follower.collect_new_events()
    assert run.follower.figures.row == {"step": 3.0, "huge": None, "time": STARTED}
    (run.record.folder / "ledger.json").write_text('{"phases_s": []}')
    run.follower.collect_new_events()
    assert run.follower.figures.ledger == LedgerFacts()


def test_a_job_may_log_what_it_likes(run: WrittenRun) -> None:
    """It decides about names of time series, and those are kept for good."""
    hurts = {"a\nb": 1.0, 'a"b': 1.0, "x" * 101: 1.0, "\ud800": 1.0, "": 1.0, "val_loss/top-5": 2.0}
    figures = run.logs({"step": 1, "loss": 1.0, **hurts, **{f"name{number}": 0.0 for number in range(1000)}})
    assert len(figures.row) == 100
    assert figures.row["val_loss/top-5"] == 2.0
    assert not hurts.keys() - {"val_loss/top-5"} & figures.row.keys()


def test_the_best_speed_is_no_outlier() -> None:
    speed = TrainingSpeed()
    for value in [1.0] * 5 + [100.0] * 10 + [1000.0] * 3 + [100.0] * 7:
        speed.add(value)
    assert (speed.best, speed.recent_median) == (100.0, 100.0)
    speed.begin_attempt()
    for _ in range(5):
        speed.add(1.0)
    assert (speed.best, speed.recent_median) == (100.0, None)
