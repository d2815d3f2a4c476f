"""Which lines `dtctl logs` shows."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from dtctl.cli.common.log_reader import LogFilter, LogReader
from dtctl.launch.records import logs as module
from dtctl.launch.records.logs import RunLogs
from dtctl.launch.records.record import RunRecord
from dtctl.launch.records.run_writer import RunWriter


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    """Two attempts: two workers on a, one on b that takes part in the second only."""
    logs = RunLogs(RunWriter(tmp_path))
    logs.begin_attempt()
    logs.write("a", 0, b"first 1\nfirst 2\n")
    logs.write("a", 1, b"first other\n")
    logs.begin_attempt()
    logs.write("a", 0, b"second 1\nsecond 2\nsecond 3\nhalf")
    logs.write("b", 2, b"late\n")
    logs.close()
    return RunWriter(tmp_path)


def shown(record: RunRecord, **chosen: object) -> list[str]:
    reader = LogReader(record, LogFilter(**chosen))  # type: ignore[arg-type]
    return [f"[{line.node}:{line.rank}] {line.text}" for line in (*reader.read_new(), *reader.read_rest())]


def test_an_attempt_has_its_lines_alone(record: RunRecord) -> None:
    first = ["[a:0] first 1", "[a:0] first 2", "[a:1] first other"]
    second = ["[a:0] second 1", "[a:0] second 2", "[a:0] second 3", "[b:2] late", "[a:0] half"]
    assert shown(record, attempt=0) == first
    assert shown(record, attempt=1) == shown(record, attempt=-1) == second
    assert shown(record, attempt=7) == []
    assert len(shown(record)) == len(first) + len(second)


def test_attempts_are_found_in_a_log_whose_middle_was_cut_out(tmp_path: Path) -> None:
    logs = RunLogs(RunWriter(tmp_path), 10_000)
    for name in ("first", "second", "third"):
        logs.begin_attempt()
        for number in range(300):
            logs.write("a", 0, f"{name} {number:06}\n".encode())
    logs.close()
    record = RunWriter(tmp_path)
    assert logs.cut["a"] > 3_000
    first, second, third = (shown(record, attempt=number) for number in range(3))
    assert (first[0], third[-1]) == ("[a:0] first 000000", "[a:0] third 000299")
    assert any("bytes were cut" in line for line in second)
    assert all("third" in line for line in third[1:])
    assert shown(record, attempt=3) == [], "a cut begins no attempt"
    assert shown(record, attempt=-1) == third


def test_the_last_lines_and_those_with_a_pattern(record: RunRecord) -> None:
    assert shown(record, tail=1) == ["[a:0] second 3", "[a:1] first other", "[b:2] late", "[a:0] half"]
    assert shown(record, pattern=re.compile("1$")) == ["[a:0] first 1", "[a:0] second 1", "[a:0] half"]
    assert shown(record, rank=0, pattern=re.compile(r"\d"), tail=1)[0] == "[a:0] second 3"


def test_new_lines_are_shown_once_and_in_full(record: RunRecord) -> None:
    reader = LogReader(record, LogFilter(tail=0, node="a"))
    assert not [*reader.read_new()]
    with record.log_path("a", 0).open("a") as file:
        file.write(" and half\nnew 1\nnew 2\n")
    assert [line.text for line in reader.read_new()] == ["half and half", "new 1", "new 2"]


def test_only_what_was_printed_lately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = RunLogs(RunWriter(tmp_path))
    now = time.time()
    for age, text in ((500.0, b"old\n"), (100.0, b"newer\n"), (10.0, b"newest\n")):
        monkeypatch.setattr(module.time, "time", lambda age=age: now - age)
        logs.write("a", 0, text)
    logs.close()
    record = RunWriter(tmp_path)
    assert shown(record, changed_since=now - 1000) == ["[a:0] old", "[a:0] newer", "[a:0] newest"]
    assert shown(record, changed_since=now - 50) == ["[a:0] newer", "[a:0] newest"]
    assert shown(record, changed_since=now - 5) == ["[a:0] newest"]
    os.utime(record.log_path("a", 0), (now - 10, now - 10))
    assert shown(record, changed_since=now - 5) == []


def test_a_run_of_an_earlier_version_has_one_attempt_as_far_as_is_known(tmp_path: Path) -> None:
    path = tmp_path / "logs/a/rank-0.log"
    path.parent.mkdir(parents=True)
    path.write_text("x\n")
    assert shown(RunWriter(tmp_path), attempt=0) == ["[a:0] x"]
