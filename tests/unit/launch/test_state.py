"""What became of a run, from its events and from whether its launcher lives."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl import names
from dtctl.errors import LaunchError
from dtctl.launch import stop
from dtctl.launch.records.events import (
    AttemptRunning,
    ReplacedWorker,
    RunProgress,
    SurvivingWorker,
    WorkersReplaced,
    parse_event,
)
from dtctl.launch.records.record import RunInfo, RunRecord
from dtctl.launch.records.run_writer import RunWriter
from dtctl.launch.records.state import is_launcher_alive, read_run_state
from dtctl.node_facts import read_boot_id, start_ticks
from tests.facts import missing, raises
from tests.unit.report.runs import append

ME = RunInfo(
    run="r", token="t", pid=os.getpid(), started=100.0, spec="", command=[], detached=False,
    pid_started=start_ticks(os.getpid()), boot=read_boot_id(),
)  # fmt: skip


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def record_of(folder: Path, *events: dict[str, object], info: RunInfo = ME) -> RunRecord:
    record = RunWriter.create(folder, info)
    for event in events:
        append(record, event)
    return record


PLAN = {"event": "plan", "time": 101.0, "nodes": ["a", "b"]}
STARTED = {"event": "started", "time": 103.0}
DONE = {"event": "done", "time": 110.0, "status": "failed"}


@pytest.mark.parametrize(
    ("events", "status", "attempt"),
    [
        ([], "starting", 0),
        ([PLAN], "starting", 0),
        ([PLAN, {"event": "start", "attempt": 0}, STARTED], "running", 0),
        ([PLAN, STARTED, {"event": "stopping"}], "stopping", 0),
        ([PLAN, STARTED, {"event": "stopping"}, {"event": "restart"}], "starting", 0),
        ([PLAN, STARTED, {"event": "restart"}, {"event": "start", "attempt": 1}, STARTED], "running", 1),
        ([PLAN, STARTED, DONE], "failed", 0),
        ([{"event": "unheard of"}, {}], "starting", 0),
    ],
)
def test_the_status_follows_the_events(
    tmp_path: Path, events: list[dict[str, object]], status: str, attempt: int
) -> None:
    state = read_run_state(record_of(tmp_path, *events))
    assert (state.status, state.attempt) == (status, attempt)
    assert state.over is (status == "failed")


def test_nodes_have_the_last_state_that_was_told(tmp_path: Path) -> None:
    told = [PLAN, {"event": "node", "node": "b", "state": "ready"}, {"event": "node", "node": "b", "state": "started"}]
    assert read_run_state(record_of(tmp_path, *told)).nodes == {"a": "connecting", "b": "started"}


def test_a_run_that_is_over_has_lasted_until_its_last_event(tmp_path: Path, gone: int) -> None:
    assert read_run_state(record_of(tmp_path / "1", PLAN, DONE)).duration_s == 10.0
    record = record_of(tmp_path / "2", PLAN, STARTED, info=replace(ME, pid=gone))
    lost = read_run_state(record)
    assert (lost.status, lost.duration_s, lost.over) == ("abandoned", 3.0, True)
    log = record.folder / names.LOGS_DIR / "a" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.touch()
    os.utime(log, (ME.started + 500, ME.started + 500))
    assert read_run_state(record).duration_s == 500.0, "it has printed until then"
    ledger = record.folder / names.LEDGER_FILE
    ledger.write_text("{}")
    os.utime(ledger, (ME.started + 600, ME.started + 600))
    assert read_run_state(record).duration_s == 600.0, "its launcher has counted until then"
    before = read_run_state(record_of(tmp_path / "3", info=replace(ME, started=time.time() + 1e6)))
    assert before.duration_s == 0.0, "a clock that was set back"


def test_a_dead_launcher_is_told_from_a_later_process_of_the_same_id(sleeper: subprocess.Popen[bytes]) -> None:
    info = replace(ME, pid=sleeper.pid, pid_started=start_ticks(sleeper.pid))
    assert is_launcher_alive(ME)
    assert is_launcher_alive(info)
    assert not is_launcher_alive(replace(info, pid_started=info.pid_started - 1))
    assert not is_launcher_alive(replace(info, pid_started=0))
    assert not is_launcher_alive(replace(info, boot="")), "the same number and start, of nobody knows which boot"
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_launcher_alive(info), "a zombie"
    sleeper.wait()
    assert not is_launcher_alive(info)


def test_stop_does_not_signal_a_stranger(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    stale = replace(ME, pid=sleeper.pid, pid_started=start_ticks(sleeper.pid) - 1)
    assert not stop.request_launcher_stop(record_of(tmp_path, PLAN, STARTED, info=stale), wait_s=0)
    assert sleeper.poll() is None


def test_stop_leaves_a_run_alone_that_is_over(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    info = replace(ME, pid=sleeper.pid, pid_started=start_ticks(sleeper.pid))
    assert not stop.request_launcher_stop(record_of(tmp_path, PLAN, DONE, info=info), wait_s=0)
    assert sleeper.poll() is None


def test_stop_waits_for_the_launcher(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    info = replace(ME, pid=sleeper.pid, pid_started=start_ticks(sleeper.pid))
    record = record_of(tmp_path, PLAN, STARTED, info=info)
    assert not stop.request_launcher_stop(record, wait_s=10), "a launcher holds its run's lock"
    with record.launcher_lock(), raises(LaunchError, "stop"):
        stop.request_launcher_stop(record, wait_s=0)
    assert sleeper.wait(60) == -15


def test_only_nodes_that_counted_no_process_at_the_end_are_not_queried_again(tmp_path: Path) -> None:
    def node(name: str, state: str, **facts: object) -> dict[str, object]:
        return {"event": "node", "node": name, "state": state, **facts}

    record = record_of(
        tmp_path, PLAN, node("d", "stopped", left=0), {"event": "start"}, node("a", "stopped", left=0),
        node("b", "stopped", left=2), node("c", "lost", left=None), node("e", "stopped", left=0), node("e", "running"),
    )  # fmt: skip
    assert stop.read_clean_nodes(record) == {"a"}, "d is of an earlier attempt, and e has started again"


def test_a_run_without_a_plan_has_nothing_to_stop(tmp_path: Path) -> None:
    with raises(LaunchError, "never started"):
        stop.stop_on_nodes(record_of(tmp_path, PLAN), {}, None, by_launcher=False)  # type: ignore[arg-type]


def test_why_it_was_started_again(tmp_path: Path) -> None:
    again = [{"event": "restart", "time": 104.0 + n, "reason": f"was rank {n} on b"} for n in range(2)]
    assert read_run_state(record_of(tmp_path, PLAN, STARTED, *again)).restarts == ("was rank 0 on b", "was rank 1 on b")


def test_who_was_replaced() -> None:
    """As the line of `status`, `watch` and the report has it."""
    killed = ReplacedWorker(rank=1, node="b", by="b", reason="was ended by signal 9 (SIGKILL)")
    stayed = (SurvivingWorker(rank=0, node="a", pid=5), SurvivingWorker(rank=2, node="c", pid=6))
    healed = WorkersReplaced(step=7, replaced=(killed,), survivors=stayed, repeated_steps=1, detect_s=0.0, heal_s=0.25)
    progress = RunProgress()
    for event in (AttemptRunning(), parse_event(json.dumps(healed.to_json()))):
        assert event is not None
        progress.apply(event)
    assert progress.heals == [healed]
    assert progress.status == "running"
    assert missing(healed.event_text, "1 b 9 7 0.25 2 stayed again") == []
