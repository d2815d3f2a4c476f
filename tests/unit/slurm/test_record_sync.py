"""The records of a launcher inside of a job, from its folder over the login node's answers to whoever follows it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from dtctl.launch.records.events import (
    AttemptRestarting,
    AttemptStarting,
    Event,
    FirstFailure,
    JobSubmitted,
    NodesAllocated,
    OutputLine,
    ReplacedWorker,
    RunEnded,
    WorkerExited,
    WorkersReplaced,
)
from dtctl.launch.records.record import RunRecord
from dtctl.slurm import answers, remote_commands
from dtctl.slurm.record_sync import METRICS, RecordSync
from dtctl.slurm.site import LocalCommandHost


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder."""
    made = tmp_path / "job"
    (made / "control" / "logs" / "node1").mkdir(parents=True)
    return made


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    (tmp_path / "run").mkdir()
    return RunRecord(tmp_path / "run")


def news(folder: Path, have: dict[str, int], tmp_path: Path) -> dict[str, tuple[int, bytes]]:
    """What the login node answers, where Slurm has forgotten the job."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho Invalid job id >&2; exit 1\n")
    scontrol.chmod(0o755)
    site = LocalCommandHost(env={"PATH": str(tmp_path)})
    return dict(
        remote_commands.send_login_request(
            site, sys.executable, answers.JobUpdate, job="1", folder=str(folder), have=have
        ).files
    )


def write_events(folder: Path, *events: Event) -> None:
    with (folder / "control" / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event.to_json()) + "\n" for event in events)


def test_events_come_after_what_was_printed_before_and_only_those_of_a_run(
    folder: Path, record: RunRecord, tmp_path: Path
) -> None:
    told: list[Event] = []
    mirror = RecordSync(record, told.append)
    assert not mirror.has_begun
    (folder / "control" / "logs" / "node1" / "rank-0.log").write_text("step 1\nstep 2\n")
    start, ended = AttemptStarting(attempt=0, world_size=2), WorkerExited(node="node1", rank=1, exit_code=137, signal=9)
    write_events(folder, NodesAllocated(nodes=("node1",)), start, JobSubmitted(job="7; rm"), ended)
    mirror.copy_arrived_files(news(folder, {}, tmp_path))
    assert told[:2] == [OutputLine(time=told[n].time, node="node1", rank=0, text=f"step {n + 1}") for n in (0, 1)]
    assert told[2:] == [NodesAllocated(time=told[2].time, nodes=("node1",)), start, ended]
    assert (record.folder / "logs" / "node1" / "rank-0.log").read_text() == "step 1\nstep 2\n"
    assert RecordSync(record, told.append).progress == mirror.progress, "another follower goes on from there"


def test_files_that_grow_and_files_that_are_replaced(folder: Path, record: RunRecord, tmp_path: Path) -> None:
    mirror = RecordSync(record, lambda _: None)
    ledger, metrics = folder / "control" / "ledger.json", folder / "control" / "metrics.jsonl"
    ledger.write_text('{"goodput": 0.25}')
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    first = news(folder, {}, tmp_path)
    mirror.copy_arrived_files(first)
    assert mirror.close_ledger(0.0) == 0.25
    have = {"control/ledger.json": first["control/ledger.json"][0], METRICS: metrics.stat().st_size}
    assert news(folder, have, tmp_path) == {}
    ledger.write_text('{"goodput": 0.75}')
    os.utime(ledger, ns=(1, ledger.stat().st_mtime_ns + 1))  # of the same size, in the same tick of the clock
    metrics.write_text('{"step": 1}\n')
    write_events(folder, WorkersReplaced(step=1, replaced=(ReplacedWorker(rank=0, node="node1", by="node2"),)))
    assert mirror.copy_arrived_files(news(folder, have, tmp_path)), "the metrics may be others"
    assert mirror.close_ledger(0.0) == 0.75
    assert (record.folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(("ended", "phase"), [(True, "stop"), (False, "lost")])
def test_the_time_after_the_last_word_of_the_job_is_counted(
    folder: Path, record: RunRecord, tmp_path: Path, ended: bool, phase: str
) -> None:
    mirror = RecordSync(record, lambda _: None)
    ledger = {"wall_s": 8.0, "phases_s": {"connect": 2.0, "useful": 6.0}, "goodput": 0.75, "phase": "useful"}
    (folder / "control" / "ledger.json").write_text(json.dumps({**ledger, "course": [["useful", 2.0]]}))
    write_events(folder, AttemptStarting(attempt=0), *([RunEnded(run="a", status="succeeded")] if ended else []))
    mirror.copy_arrived_files(news(folder, {}, tmp_path))
    assert mirror.close_ledger(10.0) == 0.6
    facts = json.loads((record.folder / "ledger.json").read_text())
    assert facts["phases_s"] == {"connect": 2.0, "useful": 6.0, phase: 2.0}
    assert (facts["wall_s"], facts["phase"]) == (10.0, phase)
    assert facts["course"] == [["useful", 2.0], [phase, 8.0]]
    assert mirror.close_ledger(10.0) == 0.6, "once"
    assert json.loads((record.folder / "ledger.json").read_text()) == facts


def test_the_end_and_the_reason_of_a_start_that_only_slurm_knows(
    folder: Path, record: RunRecord, tmp_path: Path
) -> None:
    told: list[Event] = []
    mirror = RecordSync(record, told.append)
    mirror.requeue_reason = "it was preempted"
    first = FirstFailure(node="node1", rank=0, exit_code=1, log="/job/control/logs/node1/rank-0.log", summary="no")
    (folder / "control" / "logs" / "node1" / "rank-0.log").write_text("ValueError: no\n")
    write_events(
        folder,
        AttemptRestarting(attempt=1, reason="Slurm requeued it"),
        AttemptStarting(attempt=1),
        RunEnded(run="a", status="failed", exit_code=8, first_failure=first),
    )
    mirror.copy_arrived_files(news(folder, {}, tmp_path))
    assert [event.reason for event in told if isinstance(event, AttemptRestarting)] == ["it was preempted"]
    assert not any(isinstance(event, RunEnded) for event in told), "the follower's own is the last"
    failure = mirror.failure()
    assert failure is not None
    assert (failure.node, failure.rank, failure.exit_code, failure.tail) == ("node1", 0, 1, ("ValueError: no",))
    assert failure.log == str(record.folder / "logs" / "node1" / "rank-0.log")
