"""Each alert once, and once when it is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtctl.launch.records.events import (
    AlertChanged,
    AttemptRestarting,
    AttemptRunning,
    AttemptStarting,
    FirstFailure,
    RunEnded,
    RunPlanned,
)
from dtctl.metrics.alerts import AlertRules
from dtctl.spec.model import Alerts
from tests.unit.metrics.following import WrittenRun


class Judged:
    """A run and the alerts about it."""

    def __init__(self, base: Path, *, trains: bool = True, **rules: Any) -> None:
        self.run = WrittenRun(base)
        self.rules = AlertRules(Alerts(**rules), trains=trains)
        self.run.happens(RunPlanned(run="try-1", nodes=("a",)), AttemptStarting(attempt=0, time=self.run.now))
        self.run.happens(AttemptRunning(attempt=0, time=self.run.now))

    def after(self, seconds: float) -> list[tuple[str, str]]:
        self.run.now += seconds
        changes = self.rules.evaluate_rules(self.run.follower.figures, self.run.now)
        assert self.rules.evaluate_rules(self.run.follower.figures, self.run.now) == [], "told twice"
        return [(change.alert, change.state) for change in changes]

    def steps(self, first: int, count: int, **row: Any) -> None:
        row = {"loss": 1.0, "grad_norm": 1.0, "samples_per_s": 100.0, **row}
        self.run.logs(*({"step": first + number, **row} for number in range(count)))


def test_a_standstill_is_told_once_and_its_end_once(tmp_path: Path) -> None:
    judged = Judged(tmp_path, no_step_s=60.0)
    judged.steps(1, 3)
    assert judged.after(59) == []
    assert judged.after(2) == [("no-step", "firing")]
    assert judged.after(100) == []
    judged.steps(4, 1)
    assert judged.after(1) == [("no-step", "resolved")]


def test_a_training_that_never_begins_stands_still(tmp_path: Path) -> None:
    assert Judged(tmp_path / "a", no_step_s=60.0).after(61) == [("no-step", "firing")]
    assert Judged(tmp_path / "b", no_step_s=60.0, trains=False).after(61) == [], "it may be no training"


def test_the_end_of_training_is_no_standstill(tmp_path: Path) -> None:
    judged = Judged(tmp_path, no_step_s=60.0)
    judged.steps(1, 3)
    judged.run.spends(steps=3, phase="stop", useful=1.0)
    assert judged.after(1000) == []


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    judged = Judged(tmp_path)
    judged.steps(1, 2)
    assert judged.after(0) == []
    judged.steps(3, 1, loss=None)
    assert judged.after(0) == [("loss-not-finite", "firing")]
    judged.steps(4, 1)
    assert judged.after(0) == [("loss-not-finite", "resolved")]


def test_a_run_that_fails_because_of_it(tmp_path: Path) -> None:
    """`train.on_nan: stop` ends the training before such a step is logged."""
    judged = Judged(tmp_path, restarts="off", failed=False)
    log = judged.run.record.log_path("a", 1)
    log.parent.mkdir(parents=True)
    reason = "the gradient of step 7 is not finite: the loss of rank 1 was not"
    log.write_text(f"step 6\nerror: {reason}\nhint: lower `lr`\n")
    judged.run.happens(AttemptRestarting(attempt=1, of=1, node="a", rank=1, time=judged.run.now))
    assert judged.after(0) == [("loss-not-finite", "firing")]
    assert judged.rules.firing["loss-not-finite"].text == reason
    judged.run.happens(AttemptStarting(attempt=1))
    judged.steps(1, 1)
    assert judged.after(0) == [("loss-not-finite", "resolved")]
    judged.run.happens(RunEnded(run="try-1", status="failed", first_failure=FirstFailure(node="a", rank=1)))
    (change,) = judged.rules.end(judged.run.follower.figures, judged.run.now)
    assert (change.alert, change.state) == ("loss-not-finite", "firing"), "and it stays so"


def test_each_restart_is_told(tmp_path: Path) -> None:
    judged = Judged(tmp_path, restarts=2)
    judged.steps(1, 2)
    for attempt in (1, 2, 3):
        judged.run.happens(
            AttemptRestarting(attempt=attempt, of=3, reason="was lost", node="a", time=judged.run.now),
            AttemptStarting(attempt=attempt),
            AttemptRunning(attempt=attempt, time=judged.run.now + 1),
        )
        assert judged.after(5) == ([(f"restart-{attempt}", "firing")] if attempt >= 2 else [])
        judged.steps(attempt * 10, 1)
        assert judged.after(1) == ([(f"restart-{attempt}", "resolved")] if attempt >= 2 else [])


def test_a_program_without_steps_is_back_when_it_runs(tmp_path: Path) -> None:
    judged = Judged(tmp_path, trains=False)
    judged.run.happens(AttemptRestarting(attempt=1, of=3, time=judged.run.now), AttemptStarting(attempt=1))
    assert judged.after(5) == [("restart-1", "firing")]
    judged.run.happens(AttemptRunning(attempt=1, time=judged.run.now))
    assert judged.after(5) == [("restart-1", "resolved")]


def test_a_run_that_slows_down(tmp_path: Path) -> None:
    judged = Judged(tmp_path)
    judged.steps(1, 25)
    judged.steps(26, 3, samples_per_s=85.0)
    assert judged.after(0) == [], "not by a fifth"
    judged.steps(29, 5, samples_per_s=75.0)
    assert judged.after(0) == [("throughput", "firing")]
    judged.steps(34, 5, samples_per_s=84.0)
    assert judged.after(0) == [], "it is not over at the limit"
    judged.steps(39, 5, samples_per_s=95.0)
    assert judged.after(0) == [("throughput", "resolved")]


@pytest.mark.parametrize("status", ["succeeded", "failed", "stopped"])
def test_the_end_ends_them_all(tmp_path: Path, status: str) -> None:
    judged = Judged(tmp_path, no_step_s=60.0)
    assert judged.after(61) == [("no-step", "firing")]
    failure = FirstFailure(node="a", rank=0, summary="ValueError: no") if status == "failed" else None
    judged.run.happens(RunEnded(run="try-1", status=status, first_failure=failure))
    changes = judged.rules.end(judged.run.follower.figures, judged.run.now)
    told = [(change.alert, change.state) for change in changes]
    assert told == [("no-step", "resolved"), *([("failed", "firing")] if status == "failed" else [])]
    if status == "failed":
        assert "ValueError: no" in changes[-1].text


def test_a_launcher_that_dies_is_a_failure(tmp_path: Path) -> None:
    judged = Judged(tmp_path)
    (change,) = judged.rules.end(judged.run.follower.figures, judged.run.now)
    assert (change.alert, change.state) == ("failed", "firing")


def test_what_another_process_has_told_is_not_told_again(tmp_path: Path) -> None:
    judged = Judged(tmp_path, no_step_s=60.0)
    judged.run.happens(AttemptRestarting(attempt=1, of=3, time=judged.run.now))
    told = [
        AlertChanged(alert="no-step", state="firing"),
        AlertChanged(alert="restart-1", state="firing"),
        AlertChanged(alert="restart-1", state="resolved"),
    ]
    judged.rules = AlertRules(Alerts(no_step_s=60.0), trains=True, told=told)
    assert judged.after(100) == []
    judged.run.happens(AttemptStarting(attempt=1))
    judged.steps(1, 1)
    assert judged.after(1) == [("no-step", "resolved")]
