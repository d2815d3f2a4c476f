"""Where the time went: every moment belongs to exactly one phase."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.launch.control.progress import RankProgress, ReportedPhase
from dtctl.launch.records.ledger import PHASES, Ledger


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 1e5)), max_size=20))
def test_the_phases_add_up_to_the_wall_time(steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    ledger = Ledger(clock, begun=49.0)
    for phase, seconds in steps:
        ledger.enter(phase)
        clock.now += seconds
    total = ledger.total_s()
    ledger.enter("stop")
    assert sum(ledger.spent.values()) == pytest.approx(total)
    assert all(spent >= 0 for spent in ledger.spent.values())


def test_what_is_written(tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(clock)
    for phase, at in (("push", 51.0), ("run", 53.5), ("stop", 60.0)):
        clock.now = at
        ledger.enter(phase)
    clock.now = 60.25
    ledger.write(tmp_path / "ledger.json", attempts=2)
    found = json.loads((tmp_path / "ledger.json").read_text())
    assert (found["wall_s"], found["attempts"]) == (10.25, 2)
    spent = {"connect": 1.0, "push": 2.5, "run": 6.5, "stop": 0.25}
    assert found["phases_s"] == dict.fromkeys(PHASES, 0.0) | spent
    assert found["goodput"] is None, "it has told no progress"
    clock.now = 61.25
    ledger.write(tmp_path / "ledger.json", attempts=2)
    assert json.loads((tmp_path / "ledger.json").read_text())["wall_s"] == 11.25, "it may be written again later"


def standing(step: int, *, first: int = 0, begun_s: float = 0.0, stall_s: float = 0.0, saved: int = 0) -> RankProgress:
    return RankProgress(
        node="a", rank=0, pid=1, phase=ReportedPhase.STEPPING, step=step, place=0, first=first, saved=saved, until=99,
        begun_s=begun_s, stale_s=0.0, slowest_s=1.0, stall_s=stall_s, evaluation_s=0.0, state="S",
    )  # fmt: skip


class Run:
    """A ledger, and a clock that is moved by hand; one step a second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ledger = Ledger(self.clock)

    def start(self, after_s: float) -> None:
        self.ledger.enter("start")
        self.pass_(1.0)
        self.ledger.record_processes_started()
        self.pass_(after_s)

    def pass_(self, seconds: float) -> None:
        self.clock.now += seconds

    def spent(self) -> dict[str, float]:
        facts = self.ledger.facts()
        assert sum(facts.phases_s.values()) == pytest.approx(facts.wall_s)
        return {phase: spent for phase, spent in facts.phases_s.items() if spent}


def test_steps_that_are_done_again_are_lost_and_not_useful() -> None:
    run = Run()
    run.start(4.5)
    run.ledger.record_worker_progress([standing(0, begun_s=0.5)])  # heard of half a second late
    for step in range(1, 11):
        run.pass_(1.0)
        run.ledger.record_worker_progress([standing(step, saved=4)])
    run.pass_(2.0)  # nobody knew at first
    run.ledger.record_attempt_end(failed_s=1.5)
    run.ledger.enter("restart")
    assert run.spent() == {"start": 5.0, "useful": 11.0, "restart": 1.5}
    run.start(3.0)
    run.ledger.record_worker_progress([standing(4, first=4)])
    assert run.spent() == {"start": 9.0, "useful": 4.5, "lost": 6.5, "restart": 1.5}
    run.pass_(8.0)
    run.ledger.record_worker_progress([standing(12, first=4)])
    run.ledger.record_attempt_end()
    run.ledger.close(succeeded=True)
    assert run.spent()["useful"] == 12.5
    assert (run.ledger.facts().steps, run.ledger.facts().steps_lost) == (12, 6)
    assert run.ledger.facts().goodput == pytest.approx(12.5 / 29.5, abs=1e-3)


def test_what_passed_until_a_loss_was_noticed_is_not_useful() -> None:
    run = Run()
    run.start(1.0)
    run.ledger.record_worker_progress([standing(0, begun_s=1.0)])
    run.pass_(30.0)
    run.ledger.record_worker_progress([standing(10)])
    run.ledger.record_worker_loss(20.0)
    run.pass_(0.5)
    run.ledger.enter("useful")
    run.pass_(4.0)
    assert run.spent() == {"start": 1.0, "useful": 15.0, "detect": 20.0, "heal": 0.5}
    course = [phase for phase, _ in run.ledger.facts().course]
    assert course[-4:] == ["useful", "detect", "heal", "useful"]


def test_a_replacement_counts_its_stalls_from_the_beginning() -> None:
    run = Run()
    run.start(0.0)
    run.ledger.record_worker_progress([standing(0)])
    run.pass_(10.0)
    run.ledger.record_worker_progress([standing(5, stall_s=2.0)])
    run.pass_(10.0)
    run.ledger.record_worker_progress([replace(standing(9, stall_s=1.5), pid=2)])
    assert run.spent() == {"start": 1.0, "useful": 16.5, "stall": 3.5}


def test_waiting_for_snapshots_is_not_useful() -> None:
    run = Run()
    run.start(0.0)
    run.ledger.record_worker_progress([standing(0)])
    run.pass_(10.0)
    run.ledger.record_worker_progress([standing(8, stall_s=2.0)])
    run.pass_(5.0)
    run.ledger.record_worker_progress([standing(12, stall_s=3.0)])
    assert run.spent() == {"start": 1.0, "useful": 12.0, "stall": 3.0}


def test_a_hang_costs_the_time_since_the_last_sign_of_progress() -> None:
    run = Run()
    run.start(0.0)
    run.ledger.record_worker_progress([standing(0)])
    run.pass_(4.0)
    run.ledger.record_worker_progress([standing(4, saved=4)])
    run.pass_(33.0)
    run.ledger.record_attempt_end(failed_s=1.0, hung_s=32.0)
    run.ledger.close(succeeded=False)
    assert run.spent() == {"start": 1.0, "useful": 4.0, "hang": 32.0, "restart": 1.0}


def test_a_run_that_ends_badly_has_lost_what_came_after_its_last_snapshot() -> None:
    run = Run()
    run.start(0.0)
    run.ledger.record_worker_progress([standing(0)])
    run.pass_(9.0)
    run.ledger.record_worker_progress([standing(9, saved=6)])
    run.ledger.record_attempt_end()
    run.ledger.close(succeeded=False)
    assert run.spent() == {"start": 1.0, "useful": 6.0, "lost": 3.0}


def test_another_launcher_goes_on_with_what_one_that_was_killed_has_written(tmp_path: Path) -> None:
    run = Run()
    run.ledger.path = tmp_path / "ledger.json"
    run.start(2.0)
    run.ledger.record_worker_progress([standing(0)])
    run.pass_(6.0)
    run.ledger.record_worker_progress([standing(5, stall_s=1.0)])  # which writes it down
    run.pass_(4.0)
    after = Run()
    after.clock.now = run.clock.now
    after.ledger = Ledger(after.clock, begun=run.ledger.begun, phase="run")
    after.ledger.resume(tmp_path / "ledger.json")
    assert after.spent() == {"start": 3.0, "useful": 9.0, "stall": 1.0}
    after.pass_(1.0)
    after.ledger.record_worker_progress([standing(9, stall_s=1.5)])
    assert after.spent() == {"start": 3.0, "useful": 9.5, "stall": 1.5}


def test_a_ledger_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{")
    run = Run()
    run.pass_(5.0)
    run.ledger.resume(tmp_path / "ledger.json")
    assert run.spent() == {"connect": 5.0}


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "watch", "fail", "hang"]), st.floats(0, 50), st.integers(0, 30)),
        max_size=30,
    )
)
def test_whatever_workers_tell_the_phases_add_up(acts: list[tuple[str, float, int]]) -> None:
    run = Run()
    for act, seconds, number in acts:
        run.pass_(seconds)
        if act == "start":
            run.start(seconds)
        elif act == "watch":
            run.ledger.record_worker_progress(
                [standing(number, first=number // 2, begun_s=seconds, stall_s=seconds / 3)]
            )
        else:
            run.ledger.record_attempt_end(failed_s=seconds / 2, hung_s=seconds if act == "hang" else 0.0)
    run.ledger.close(succeeded=False)
    facts = run.ledger.facts()
    assert sum(facts.phases_s.values()) == pytest.approx(facts.wall_s, abs=0.02)
    assert all(spent >= -1e-6 for spent in run.ledger.spent.values())


def durations(ledger: Ledger) -> dict[str, float]:
    """Phase -> its seconds by the course."""
    facts = ledger.facts()
    ends = [*(at_s for _, at_s in facts.course[1:]), facts.wall_s]
    spent = dict.fromkeys(PHASES, 0.0)
    for (phase, at_s), end_s in zip(facts.course, ends, strict=True):
        assert end_s >= at_s
        spent[phase] += end_s - at_s
    return spent


@given(
    st.lists(
        st.tuples(st.floats(0.01, 50), st.floats(0, 60), st.integers(1, 5), st.floats(0, 0.5), st.floats(0, 0.3)),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_the_course_is_where_the_time_went(attempts: list[tuple[float, float, int, float, float]]) -> None:
    """What is moved and is not of one piece (snapshots, evaluation, steps done again) was useful when it happened."""
    clock = Clock()
    ledger = Ledger(clock)
    for start_s, begun_s, steps, failed, hung in attempts:
        ledger.enter("start")
        clock.now += 1
        ledger.record_processes_started()
        clock.now += start_s
        for step in range(steps):
            ledger.record_worker_progress([standing(step, begun_s=min(begun_s, start_s) + step, stall_s=step / 8)])
            clock.now += 1
        ledger.record_attempt_end(failed_s=failed * steps, hung_s=hung * steps)
        clock.now += 0.5
        ledger.enter("restart")
        clock.now += 2
    ledger.enter("stop")
    ledger.close(succeeded=False)
    spent = dict(ledger.spent)
    for name in ("stall", "evaluation", "lost"):
        spent["useful"] += spent.pop(name)
    course = durations(ledger)
    assert {phase: course[phase] for phase in spent} == pytest.approx(spent, abs=0.02)


def test_a_launcher_that_takes_over_continues_the_course(tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(clock, path=tmp_path / "ledger.json")
    ledger.enter("start")
    clock.now += 2
    ledger.record_processes_started()
    clock.now += 3
    ledger.record_worker_progress([standing(1, begun_s=1.0)])
    clock.now += 4
    ledger.write(tmp_path / "ledger.json", attempts=1)
    clock.now += 5
    other = Ledger(clock, begun=ledger.begun, phase="run")
    other.resume(tmp_path / "ledger.json")
    clock.now += 6
    assert other.facts().course == [("connect", 0.0), ("start", 0.0), ("useful", 4.0)]
    assert durations(other)["useful"] == other.spent["useful"] == 16.0


def test_the_course_is_not_endless() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    for number in range(5000):
        clock.now += 1
        ledger.enter("start" if number % 2 else "restart")
    assert len(ledger.facts().course) == 1000
    assert ledger.facts().course[0] == ("connect", 0.0)
    assert ledger.facts().course[-1] == ("start", 5000.0)
