"""Which lines `dtctl logs` shows."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from dtctl.cli.common.log_reader import LogFilter, LogReader
from dtctl.launch.records import logs as module
from dtctl.launch.records.logs import Logs
from dtctl.launch.records.record import RunRecord


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    """Two attempts: two workers on a, one on b that takes part in the second only."""
    logs = Logs(RunRecord(tmp_path))
    logs.begin_attempt()
    logs.write("a", 0, b"first 1\nfirst 2\n")
    logs.write("a", 1, b"first other\n")
    logs.begin_attempt()
    logs.write("a", 0, b"second 1\nsecond 2\nsecond 3\nhalf")
    logs.write("b", 2, b"late\n")
    logs.close()
    return RunRecord(tmp_path)


def shown(record: RunRecord, capsys: pytest.CaptureFixture[str], **chosen: object) -> list[str]:
    reader = LogReader(record, LogFilter(**chosen))  # type: ignore[arg-type]
    reader.print_new()
    reader.print_rest()
    return capsys.readouterr().out.splitlines()


def test_an_attempt_has_its_lines_alone(record: RunRecord, capsys: pytest.CaptureFixture[str]) -> None:
    first = ["[a:0] first 1", "[a:0] first 2", "[a:1] first other"]
    second = ["[a:0] second 1", "[a:0] second 2", "[a:0] second 3", "[b:2] late", "[a:0] half"]
    assert shown(record, capsys, attempt=0) == first
    assert shown(record, capsys, attempt=1) == shown(record, capsys, attempt=-1) == second
    assert shown(record, capsys, attempt=7) == []
    assert len(shown(record, capsys)) == len(first) + len(second)


def test_the_last_lines_and_those_with_a_pattern(record: RunRecord, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(record, capsys, tail=1) == ["[a:0] second 3", "[a:1] first other", "[b:2] late", "[a:0] half"]
    assert shown(record, capsys, pattern=re.compile("1$")) == ["[a:0] first 1", "[a:0] second 1", "[a:0] half"]
    assert shown(record, capsys, rank=0, pattern=re.compile(r"\d"), tail=1)[0] == "[a:0] second 3"


def test_new_lines_are_shown_once_and_in_full(record: RunRecord, capsys: pytest.CaptureFixture[str]) -> None:
    reader = LogReader(record, LogFilter(tail=0, node="a"))
    reader.print_new()
    with record.log_path("a", 0).open("a") as file:
        file.write(" and half\nnew 1\nnew 2\n")
    reader.print_new()
    assert capsys.readouterr().out.splitlines() == ["[a:0] half and half", "[a:0] new 1", "[a:0] new 2"]


def test_only_what_was_printed_lately(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = Logs(RunRecord(tmp_path))
    now = time.time()
    for age, text in ((500.0, b"old\n"), (100.0, b"newer\n"), (10.0, b"newest\n")):
        monkeypatch.setattr(module.time, "time", lambda age=age: now - age)
        logs.write("a", 0, text)
    logs.close()
    record = RunRecord(tmp_path)
    assert shown(record, capsys, changed_since=now - 1000) == ["[a:0] old", "[a:0] newer", "[a:0] newest"]
    assert shown(record, capsys, changed_since=now - 50) == ["[a:0] newer", "[a:0] newest"]
    assert shown(record, capsys, changed_since=now - 5) == ["[a:0] newest"]
    os.utime(record.log_path("a", 0), (now - 10, now - 10))
    assert shown(record, capsys, changed_since=now - 5) == []


def test_a_run_of_an_earlier_version_has_one_attempt_as_far_as_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs/a/rank-0.log"
    path.parent.mkdir(parents=True)
    path.write_text("x\n")
    assert shown(RunRecord(tmp_path), capsys, attempt=0) == ["[a:0] x"]
