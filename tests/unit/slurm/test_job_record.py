"""What a job records of itself, and where its time went by that."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from dtctl.launch.control.failure import Failure
from dtctl.launch.control.progress import ReportedPhase, Standing
from dtctl.slurm import batchlog, job_record
from dtctl.slurm.job_ledger import JobLedger
from dtctl.slurm.job_record import Hang, LeftEarly, RecordedProgress, Verdict

WORKER = Standing(
    node="node1", rank=0, pid=7, phase=ReportedPhase.STEPPING, step=3, place=0, first=0, saved=0, until=99,
    begun_s=1.0, stale_s=0.0, slowest_s=1.0, stall_s=0.0, evaluation_s=0.0, state="S",
)  # fmt: skip
FAILURE = Failure(
    node="node2", rank=3, exit_code=None, signal=None, time=50.0, summary="stuck", tail=("a.py:1 in f",), hang=True
)


def line(op: str, **facts: Any) -> str:
    return json.dumps({"op": op, "attempt": 1, "time": 50.0, **facts})


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (line("progress", worker=asdict(WORKER)), RecordedProgress(attempt=1, time=50.0, worker=WORKER)),
        (line("left-early", workers=[asdict(WORKER)]), LeftEarly(attempt=1, time=50.0, workers=[WORKER])),
        (line("hang", silent_s=30.5), Hang(attempt=1, time=50.0, silent_s=30.5)),
        (
            line("verdict", failure=asdict(FAILURE), silent_s=30.5),
            Verdict(attempt=1, time=50.0, failure=FAILURE, silent_s=30.5),
        ),
    ],
)
def test_what_a_line_means(text: str, meaning: object) -> None:
    assert job_record.read(text) == meaning


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        line("other"),
        line("hang"),
        line("hang", silent_s="x"),
        line("hang", silent_s=1.0, attempt=-1),
        line("progress", worker={**asdict(WORKER), "node": "../x"}),
        line("progress", worker={**asdict(WORKER), "step": "3"}),
        line("verdict", failure={**asdict(FAILURE), "rank": "3"}, silent_s=1.0),
        line("hang", silent_s=1.0)[:-1],
        "[" * 100_000,
    ],
)
def test_a_line_that_is_damaged_means_nothing(text: str) -> None:
    assert job_record.read(text) is None


def test_the_log_and_the_record_of_several_starts_are_put_in_order() -> None:
    log = [
        "dtctl: run a, start 0 on n1, rendezvous 10.0.0.1:25000, 1970-01-01T00:00:10.000Z",
        "srun: error: n1: task 3: Killed",
        "dtctl: start 0 is over with exit code 137, 1970-01-01T00:00:20.000Z",
        "dtctl: run a, start 1 on n1, rendezvous 10.0.0.1:25001, 1970-01-01T00:00:21.000Z",
        "srun: error: n1: task 2: Killed",
    ]
    record = [line("hang", silent_s=1.0, attempt=0, time=15.0), line("progress", worker=asdict(WORKER), time=30.0)]
    events = job_record.in_order(log, record, now=40.0)
    assert [(at, type(event).__name__) for at, event in events] == [
        (10.0, "Start"), (15.0, "Hang"), (20.0, "Ended"), (20.0, "StepEnded"), (21.0, "Start"),
        (30.0, "RecordedProgress"), (40.0, "Ended"),
    ]  # fmt: skip
    assert events[2][1] == batchlog.Ended("n1", 3, 137, 9)


def spent(ledger: JobLedger) -> dict[str, float]:
    phases: dict[str, float] = ledger.ledger.facts().phases_s
    return {name: seconds for name, seconds in phases.items() if seconds}


def at(step: int, *, begun_s: float, stale_s: float = 0.0, first: int = 0, saved: int = 0) -> Standing:
    return replace(WORKER, step=step, begun_s=begun_s, stale_s=stale_s, first=first, saved=saved)


def test_the_time_of_a_job_that_hung_and_was_started_again() -> None:
    ledger = JobLedger(begun=100.0)
    ledger.start(110.0, 0)  # ten seconds in the queue
    ledger.progress(114.0, at(2, begun_s=2.0))
    ledger.progress(122.0, at(10, begun_s=10.0, saved=6))
    ledger.fail(hung_s=30.0)
    ledger.end(155.0)
    ledger.progress(154.0, at(10, begun_s=42.0, stale_s=32.0, saved=6))  # read later than the log
    ledger.start(160.0, 1)
    ledger.progress(164.0, at(6, begun_s=1.0, first=6, saved=6))
    ledger.progress(167.0, at(10, begun_s=4.0, first=6, saved=6))
    ledger.end(167.0)
    ledger.close(168.0, succeeded=True)
    assert spent(ledger) == {
        "connect": 10.0, "start": 2.0 + 3.0, "useful": 6.0 + 4.0, "lost": 4.0, "hang": 30.0, "restart": 3.0 + 5.0,
        "stop": 1.0,
    }  # fmt: skip
    facts = ledger.ledger.facts()
    assert (facts.wall_s, facts.steps, facts.steps_lost, facts.attempts) == (68.0, 10, 4, 2)


def test_a_job_that_was_lost_with_its_node_is_counted_up_to_its_last_word() -> None:
    ledger = JobLedger(begun=100.0)
    ledger.start(100.0, 0)
    ledger.progress(103.0, at(2, begun_s=2.0))
    ledger.progress(105.0, at(4, begun_s=4.0))
    ledger.start(225.0, 1)
    ledger.progress(227.0, at(1, begun_s=1.0))
    ledger.close(228.0, succeeded=False)
    assert spent(ledger) == {"start": 1.0 + 1.0, "lost": 4.0 + 2.0, "restart": 120.0}


def test_a_program_that_tells_no_progress_has_no_goodput() -> None:
    ledger = JobLedger(begun=0.0)
    ledger.start(5.0, 0)
    ledger.end(25.0)
    ledger.close(26.0, succeeded=True)
    assert spent(ledger) == {"connect": 5.0, "run": 20.0, "stop": 1.0}
    assert ledger.ledger.facts().goodput is None
