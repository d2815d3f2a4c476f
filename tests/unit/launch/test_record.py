"""A run's folder: private, readable while it is written, and found again whatever lies beside it."""

from __future__ import annotations

import json
import os
import resource
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import LaunchError, UsageError
from dtctl.launch.records.events import Note, RunPlanned
from dtctl.launch.records.logs import RunLogs
from dtctl.launch.records.record import (
    RUN_NAME,
    RunInfo,
    RunRecord,
    check_run_name,
    find_run,
    list_run_records,
    make_run_id,
)
from dtctl.launch.records.run_writer import RunWriter, write_private
from tests.facts import raises

INFO = RunInfo(
    run="one", token="t" * 32, pid=1, started=100.0, spec="/p/dtctl.yaml", command=["dtctl", "launch"], detached=False
)


def made(base: Path, run: str, started: float = 100.0) -> RunRecord:
    return RunWriter.create(base, replace(INFO, run=run, started=started))


@given(st.text(max_size=80), st.floats(0, 4e9))
def test_any_job_name_gives_a_run_name(job: str, now: float) -> None:
    assert RUN_NAME.match(make_run_id(job, now=now))


def test_run_names_of_one_second_differ() -> None:
    assert len({make_run_id("gpt", now=0.0) for _ in range(30)}) > 25
    assert make_run_id("gpt", now=0.0, salt="ab").endswith("-ab")


@pytest.mark.parametrize("name", ["a", "A1", "run-1.2_x", "a" * 64])
def test_names_that_may_be_given(name: str) -> None:
    assert check_run_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-x", "a/b", "../x", "a b", "a\n", "é", "a" * 65, "$(id)", "\0"])
def test_names_that_may_not_be_given(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_run_name(name)
    assert caught.value.hint


def test_everything_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        record = made(tmp_path, "one")
        record.append_event(RunPlanned())
        record.write_spec("cluster: {}\n")
        write_private(record.folder / "x", "text")
    finally:
        os.umask(before)
    inside = [path for path in (tmp_path / ".dtctl").rglob("*") if path.is_file()]
    assert len(inside) > 3
    assert {oct(path.stat().st_mode & 0o777) for path in inside} == {"0o600"}
    folders = [tmp_path / ".dtctl" / "runs", record.folder, record.folder / "logs"]
    assert {oct(path.stat().st_mode & 0o777) for path in folders} == {"0o700"}
    assert (tmp_path / ".dtctl" / ".gitignore").read_text() == "*\n"


def test_a_file_is_replaced_in_one_step_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_private(tmp_path / "x", "old")
    with (tmp_path / "x").open() as reader:
        write_private(tmp_path / "x", "new and longer")
        assert reader.read() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_name_is_used_once(tmp_path: Path) -> None:
    made(tmp_path, "one")
    with raises(LaunchError, "already exists") as caught:
        made(tmp_path, "one")
    assert "--name" in str(caught.value.hint)


def test_who_launched_a_run_is_found_again(tmp_path: Path) -> None:
    record = made(tmp_path, "one")
    assert find_run(tmp_path, "one").info() == INFO == record.info()
    assert record.base_dir == tmp_path
    assert record.plan() == {}
    assert list(record.events()) == []


def test_a_record_of_an_older_version_is_read(tmp_path: Path) -> None:
    record = made(tmp_path, "one")
    path = record.folder / "run.json"
    old = json.loads(path.read_text())
    del old["pid_started"]
    path.write_text(json.dumps(old))
    assert record.info().pid_started == 0


def test_runs_are_listed_oldest_first_and_the_newest_is_the_default(tmp_path: Path) -> None:
    for run, started in (("b", 30.0), ("c", 10.0), ("a", 20.0)):
        made(tmp_path, run, started)
    assert [record.run for record in list_run_records(tmp_path)] == ["c", "a", "b"]
    assert find_run(tmp_path, None).run == "b"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"run": "bad"}', "null", "\ufffd"])
def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, damage: str) -> None:
    made(tmp_path, "good")
    bad = made(tmp_path, "bad", 1e12)
    (bad.folder / "run.json").write_text(damage)
    (tmp_path / ".dtctl" / "runs" / "a file").write_text("")
    (tmp_path / ".dtctl" / "runs" / "half-made").mkdir()
    assert [record.run for record in list_run_records(tmp_path)] == ["good"]
    assert find_run(tmp_path, None).run == "good"
    with raises(LaunchError, "bad"):
        find_run(tmp_path, "bad")


def test_an_unknown_run_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with raises(LaunchError, "launched folder"):
        find_run(tmp_path, None)
    made(tmp_path, "gpt-1121-093012-k7")
    with pytest.raises(LaunchError) as caught:
        find_run(tmp_path, "gpt-1121-093012-k8")
    assert caught.value.hint == "did you mean gpt-1121-093012-k7?"
    for name in ("zzz", "../../etc", "", "."):
        with raises(LaunchError, "run"):
            find_run(tmp_path, name)


def test_events_are_whole_lines_for_whoever_reads_along(tmp_path: Path) -> None:
    record = made(tmp_path, "one")
    record.append_event(Note(text="line\nend \u2028 é"))
    with (record.folder / "events.jsonl").open("ab") as file:
        file.write(b'12\n[]\n\xff\xfe\n\n{"event": "start"}\n{"event": "half')
    assert [event.event for event in RunRecord(record.folder).events()] == ["note", "start"]
    assert next(iter(record.events())) == Note(text="line\nend \u2028 é", time=ANY)


def test_logs_lie_by_node_and_rank(tmp_path: Path) -> None:
    record = RunWriter(tmp_path)
    assert record.log_path("gpu1", 12) == tmp_path / "logs" / "gpu1" / "rank-12.log"
    assert record.log_path("gpu1", -1) == tmp_path / "logs" / "gpu1" / "agent.log"


@pytest.mark.parametrize("blocked", [".dtctl", ".dtctl/runs"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, blocked: str) -> None:
    (tmp_path / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / blocked).write_text("a file where a folder belongs")
    with raises(LaunchError, "records") as caught:
        made(tmp_path, "one")
    assert str(caught.value.where).startswith(str(tmp_path / ".dtctl"))
    assert caught.value.hint


def test_a_full_disk_costs_records_and_not_the_run(tmp_path: Path) -> None:
    record = made(tmp_path, "one")
    (record.folder / "events.jsonl").symlink_to("/dev/full")
    record.append_event(RunPlanned())
    logs = RunLogs(record)
    logs._open_rank_log("a", 0)._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 - closed with the logs
    assert logs.write("a", 0, b"shown\n") == ["shown"], "people still see it"
    assert logs.offsets["a"][0] == 6
    logs.close()


def test_a_file_that_does_not_fit_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    write_private(tmp_path / "x", "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, hard))
    try:
        with raises(LaunchError, "too large"):
            write_private(tmp_path / "x", "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_who_only_looks_for_a_launcher_turns_none_away(tmp_path: Path) -> None:
    """Two `logs -f` that take up a run at once both look, while their launchers want to be it."""
    record = RunWriter(tmp_path)
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            RunWriter(tmp_path).has_launcher()

    lookers = [threading.Thread(target=look, daemon=True) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(50):
            with record.launcher_lock():
                assert record.has_launcher()
    finally:
        over.set()
        for looker in lookers:
            looker.join()
    assert not record.has_launcher()


def test_there_is_one_launcher_at_most(tmp_path: Path) -> None:
    record = RunWriter(tmp_path)
    with (
        record.launcher_lock(),
        raises(LaunchError, "already launcher"),
        RunWriter(tmp_path).launcher_lock(),
    ):
        pass
