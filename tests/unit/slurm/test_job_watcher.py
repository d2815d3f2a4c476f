"""How a job has ended, by what its log and Slurm say: workers that have succeeded have, whatever Slurm did later."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dtctl.launch.records.events import Event, Note, RunEnded
from dtctl.launch.records.record import RunInfo
from dtctl.launch.records.run_writer import RunWriter
from dtctl.slurm.answers import JobFacts
from dtctl.slurm.job_files import STATE_FILE
from dtctl.slurm.job_output import JOB_LOG
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.job_watcher import JobWatcher
from dtctl.slurm.record_sync import EVENTS_COPY
from dtctl.slurm.site import LocalCommandHost
from tests.facts import missing

AT = "2026-01-01T00:00:0"
BEGUN = f"dtctl: job 7 of run r begins on node1, requeued 0 times, {AT}0.000Z\n"
START = f"dtctl: run r, start 0 on node1, rendezvous 10.0.0.1:29500, {AT}1.000Z\n"
COUNTED = "dtctl: left on node1: 0\n"


def over(code: int) -> str:
    return f"dtctl: start 0 is over with exit code {code}, {AT}5.000Z\n"


def ended(code: int) -> str:
    return f"dtctl: ended with exit code {code}, {AT}6.000Z\n"


def result_of(
    tmp_path: Path, log: str, *, state: str, exit_code: str, inside: str = ""
) -> tuple[str, int, list[Event]]:
    """Status and exit code of a run, and what is told at its end.

    Args:
        tmp_path: for the record.
        log: of the job.
        state: of the job, as Slurm has it.
        exit_code: CODE:SIGNAL, as Slurm has it.
        inside: status of the run by the launcher inside of the job; empty if it has none.
    """
    info = RunInfo(
        run="run", token="t", pid=1, started=0.0, spec="", command=["dtctl", "launch"], detached=True, slurm=True
    )
    record = RunWriter.create(tmp_path, info)
    record.write_spec(
        "cluster: {transport: slurm, nodes: 1, slots: 1}\njob: {name: r, script: train.py, kind: direct}\n"
    )
    (record.folder / "plan.json").write_text(json.dumps({"nodes": [{"name": "node1", "slots": 1, "first_rank": 0}]}))
    (record.folder / JOB_LOG).write_text(log)
    (record.folder / STATE_FILE).write_text(json.dumps({"have": {JOB_LOG: len(log)}, "copies": {JOB_LOG: len(log)}}))
    if inside:
        end = RunEnded(run="run", status=inside, exit_code=int(inside != "succeeded"), left_behind=0)
        (record.folder / EVENTS_COPY).write_text(json.dumps(end.to_json()) + "\n")
    emitted: list[Event] = []
    ref = JobRef(
        job="7", folder=str(tmp_path / "job"), python=sys.executable, workers_apart=True, slots=1, max_attempts=1
    )
    follower = JobWatcher(record, ref, LocalCommandHost(), emitted.append)
    follower.slurm.update(JobFacts(state=state, exit_code=exit_code, nodes=["node1"], node_list="node1"))
    end = follower.result(stopped_by=None).to_event()
    return end.status, end.exit_code, [*emitted, end]


@pytest.mark.parametrize(
    ("log", "inside"),
    [
        (BEGUN + START + over(0), ""),
        (BEGUN + START + over(0) + COUNTED + ended(0), ""),
        (BEGUN + COUNTED, "succeeded"),
    ],
    ids=["before the last step", "before Slurm saw the end", "a launcher inside"],
)
@pytest.mark.parametrize("state", ["TIMEOUT", "DEADLINE"])
def test_workers_that_had_all_succeeded_when_the_time_was_up(tmp_path: Path, log: str, inside: str, state: str) -> None:
    status, code, emitted = result_of(tmp_path, log, state=state, exit_code="0:15", inside=inside)
    assert (status, code) == ("succeeded", 0)
    assert any(isinstance(event, Note) and state in event.text for event in emitted)


@pytest.mark.parametrize(
    ("log", "inside"),
    [
        (BEGUN, ""),
        (BEGUN + START, ""),
        (BEGUN + START + over(143), ""),
        (BEGUN + START + over(0) + START.replace("start 0", "start 1"), ""),
        (BEGUN + START + over(0) + ended(1), ""),
        (BEGUN + START + over(0) + BEGUN + START.replace("start 0", "start 1"), ""),
        (BEGUN, "failed"),
    ],
    ids=["no start", "running", "ended by it", "a second start", "the script failed", "requeued", "failed inside"],
)
def test_workers_of_which_that_is_not_known(tmp_path: Path, log: str, inside: str) -> None:
    status, code, _ = result_of(tmp_path, log, state="TIMEOUT", exit_code="0:15", inside=inside)
    assert status != "succeeded"
    assert code != 0


def test_a_job_that_slurm_has_ended_for_its_memory_says_what_to_ask_for(tmp_path: Path) -> None:
    status, _, emitted = result_of(tmp_path, BEGUN, state="OUT_OF_MEMORY", exit_code="0:125", inside="failed")
    assert status == "failed"
    assert not missing(json.dumps(emitted[-1].to_json()), "job 7 OUT_OF_MEMORY memory slurm.mem")
