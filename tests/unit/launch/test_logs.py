from pathlib import Path

import pytest

from dtctl.launch.records.logs import LineSplitter, RunLogs
from dtctl.launch.records.progress_bars import shorten_progress_bar
from dtctl.launch.records.run_writer import RunWriter
from dtctl.supervisor.frames import AGENT, METRICS


def test_lines_are_cut_whole_and_kept_as_they_came(tmp_path: Path) -> None:
    logs = RunLogs(RunWriter(tmp_path))
    assert logs.write("a", 0, b"one\ntw") == ["one"]
    assert logs.write("a", 0, b"o\n10%\r50%\r100%\n") == ["two", "100%"]
    assert logs.write("a", 1, b"no end") == []
    assert logs.flush() == [("a", 1, "no end")]
    assert (tmp_path / "logs/a/rank-0.log").read_bytes() == b"one\ntwo\n10%\r50%\r100%\n"
    assert logs.offsets == {"a": {0: 21, 1: 6}}
    logs.close()


def test_the_tail_is_that_of_this_attempt(tmp_path: Path) -> None:
    logs = RunLogs(RunWriter(tmp_path))
    logs.write("a", 0, b"old failure\n")
    logs.begin_attempt()
    logs.write("a", 0, b"new failure\n")
    assert logs.tail("a", 0) == "new failure\n"
    assert logs.tail("a", 7) == ""
    logs.close()


def test_metrics_start_again_when_a_snapshot_has_taken_rank_0_back(tmp_path: Path) -> None:
    logs = RunLogs(RunWriter(tmp_path))
    logs.write("a", METRICS, b'{"step": 1}\n{"step": 2}\n')
    logs.begin_attempt()
    logs.restart_metrics_copy("a")
    logs.write("a", METRICS, b'{"step": 1}\n')
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
    logs.close()


def test_metrics_of_a_node_that_takes_the_place_of_another_follow_those_of_that(tmp_path: Path) -> None:
    logs = RunLogs(RunWriter(tmp_path))
    logs.write("a", METRICS, b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    for node in ("b", "b"):  # the second time because a snapshot took it back
        logs.restart_metrics_copy(node)
        for piece in (b'{"ste', b'p": 3}\n{"st', b'ep": 4}\n'):
            logs.write(node, METRICS, piece)
        assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4}\n'
        assert logs.offsets["b"][METRICS] == 24
    logs.close()


def test_bytes_that_are_no_text_do_not_hurt(tmp_path: Path) -> None:
    logs = RunLogs(RunWriter(tmp_path))
    assert logs.write("a", 0, b"\xff\xfe\n") == ["\ufffd\ufffd"]
    logs.close()


def test_another_launcher_goes_on_behind_what_is_on_disk(tmp_path: Path) -> None:
    first = RunLogs(RunWriter(tmp_path))
    first.write("a", 0, b"attempt 0\n")
    first.begin_attempt()
    first.write("a", 0, b"attempt 1, li")
    first.write("b", AGENT, b"agent\n")
    first.close()
    second = RunLogs(RunWriter(tmp_path))
    second.continue_attempt_logs()
    assert second.offsets == {"a": {0: 13}, "b": {AGENT: 6}}
    second.write("a", 0, b"ne 2\n")
    assert second.tail("a", 0) == "attempt 1, line 2\n"
    second.begin_attempt()
    assert second.tail("a", 0) == ""
    second.close()


def test_above_its_limit_the_middle_is_cut_and_that_is_said(tmp_path: Path) -> None:
    logs = RunLogs(RunWriter(tmp_path), 10_000)
    logs.write("a", 0, b"attempt 0\n")
    logs.begin_attempt()
    printed = [b"%06d\n" % number for number in range(10_000)]
    for number in range(0, 10_000, 10):
        logs.write("a", 0, b"".join(printed[number : number + 10]))
    text = (tmp_path / "logs/a/rank-0.log").read_bytes()
    assert len(text) <= 10_000
    (mark,) = [line for line in text.splitlines() if b"cut" in line]
    assert int(mark.split()[1]) == 10 + 70_000 - (len(text) - len(mark) - 2)
    assert logs.cut == {"a": int(mark.split()[1])}, "what is kept and what is cut are what was printed"
    assert text.startswith(b"attempt 0\n000000\n")
    assert text.endswith(b"009999\n")
    assert logs.tail("a", 0, 70).splitlines()[-1] == "009999"
    logs.close()
    second = RunLogs(RunWriter(tmp_path))
    second.continue_attempt_logs()
    assert second.offsets == {"a": {0: 70_000}}, "a new launcher knows what has come"
    second.close()


@pytest.mark.parametrize("every", [7, 100, 901, 2_990])
def test_what_a_node_has_cut_out_counts_with_what_is_cut_here(tmp_path: Path, every: int) -> None:
    logs = RunLogs(RunWriter(tmp_path), 10_000)
    printed = 0
    for number in range(3_000):
        logs.write("a", 0, b"%06d\n" % number)
        printed += 7
        if number % every == every - 1:  # in the first half that is kept, behind it, or in the end that is kept
            logs.write("a", 0, b"half a line")
            logs.skip("a", 0, 50_000 + number)
            printed += 11 + 50_000 + number
    text = (tmp_path / "logs/a/rank-0.log").read_bytes()
    kept = text
    for at, length in sorted(logs._logs["a", 0]._marks, reverse=True):
        kept = kept[:at] + kept[at + length :]
    assert len(kept) + logs.cut["a"] == printed
    assert set(kept) <= set(b"0123456789\nhalf a line"), "all that dtctl has added is known"
    assert logs.lost == {}
    logs.close()


BAR = "epoch 0:  50%|█████     | 30/60 [00:03<00:03,  9.72it/s, loss=0.0968, rank=1]"


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_what_is_printed_next_to_a_progress_bar_is_a_line_of_its_own(piece: int) -> None:
    data = f"\r{BAR[:20]}\r{BAR}halfway 30\n\r 31it [00:03, 9.8it/s]after\n\r{BAR}\nplain 1/2 [00:03, x]y\n".encode()
    lines, found = LineSplitter(), []
    for at in range(0, len(data), piece):
        found += lines.feed(data[at : at + piece])
    assert found == [BAR, "halfway 30", " 31it [00:03, 9.8it/s]", "after", BAR, "plain 1/2 [00:03, x]y"]


@pytest.mark.parametrize("columns", [40, 70, 71, 200])
def test_a_progress_bar_fits_into_a_line(columns: int) -> None:
    shown = shorten_progress_bar(BAR, columns)
    assert len(shown) <= columns
    assert "50%" in shown
    assert ("loss=0.0968" in shown) == (columns >= 70), "the drawing goes before figures do"
    assert shorten_progress_bar("x" * 300, columns) == "x" * 300, "other lines are not touched"
