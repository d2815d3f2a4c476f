from pathlib import Path

from dtctl.launch.control.failure import AGENT
from dtctl.launch.records.logs import METRICS, Logs
from dtctl.launch.records.run_writer import RunWriter


def test_lines_are_cut_whole_and_kept_as_they_came(tmp_path: Path) -> None:
    logs = Logs(RunWriter(tmp_path))
    assert logs.write("a", 0, b"one\ntw") == ["one"]
    assert logs.write("a", 0, b"o\n10%\r50%\r100%\n") == ["two", "100%"]
    assert logs.write("a", 1, b"no end") == []
    assert logs.flush() == [("a", 1, "no end")]
    assert (tmp_path / "logs/a/rank-0.log").read_bytes() == b"one\ntwo\n10%\r50%\r100%\n"
    assert logs.offsets == {"a": {0: 21, 1: 6}}
    logs.close()


def test_the_tail_is_that_of_this_attempt(tmp_path: Path) -> None:
    logs = Logs(RunWriter(tmp_path))
    logs.write("a", 0, b"old failure\n")
    logs.begin_attempt()
    logs.write("a", 0, b"new failure\n")
    assert logs.tail("a", 0) == "new failure\n"
    assert logs.tail("a", 7) == ""
    logs.close()


def test_metrics_start_again_when_a_snapshot_has_taken_rank_0_back(tmp_path: Path) -> None:
    logs = Logs(RunWriter(tmp_path))
    logs.write("a", METRICS, b'{"step": 1}\n{"step": 2}\n')
    logs.begin_attempt()
    logs.begin_metrics("a")
    logs.write("a", METRICS, b'{"step": 1}\n')
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
    logs.close()


def test_metrics_of_a_node_that_takes_the_place_of_another_follow_those_of_that(tmp_path: Path) -> None:
    logs = Logs(RunWriter(tmp_path))
    logs.write("a", METRICS, b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    for node in ("b", "b"):  # the second time because a snapshot took it back
        logs.begin_metrics(node)
        for piece in (b'{"ste', b'p": 3}\n{"st', b'ep": 4}\n'):
            logs.write(node, METRICS, piece)
        assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4}\n'
        assert logs.offsets["b"][METRICS] == 24
    logs.close()


def test_bytes_that_are_no_text_do_not_hurt(tmp_path: Path) -> None:
    logs = Logs(RunWriter(tmp_path))
    assert logs.write("a", 0, b"\xff\xfe\n") == ["\ufffd\ufffd"]
    logs.close()


def test_another_launcher_goes_on_behind_what_is_on_disk(tmp_path: Path) -> None:
    first = Logs(RunWriter(tmp_path))
    first.write("a", 0, b"attempt 0\n")
    first.begin_attempt()
    first.write("a", 0, b"attempt 1, li")
    first.write("b", AGENT, b"agent\n")
    first.close()
    second = Logs(RunWriter(tmp_path))
    second.rejoin()
    assert second.offsets == {"a": {0: 13}, "b": {AGENT: 6}}
    second.write("a", 0, b"ne 2\n")
    assert second.tail("a", 0) == "attempt 1, line 2\n"
    second.begin_attempt()
    assert second.tail("a", 0) == ""
    second.close()


def test_above_its_limit_the_middle_is_cut_and_that_is_said(tmp_path: Path) -> None:
    logs = Logs(RunWriter(tmp_path), 10_000)
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
    second = Logs(RunWriter(tmp_path))
    second.rejoin()
    assert second.offsets == {"a": {0: 70_000}}, "a new launcher knows what has come"
    second.close()


def test_what_a_node_has_cut_out_counts_with_what_is_cut_here(tmp_path: Path) -> None:
    logs = Logs(RunWriter(tmp_path), 10_000)
    line = b"%06d\n"
    sent = 0
    for number in range(3_000):
        sent += 7
        logs.write("a", 0, line % number)
        if number == 900:  # behind the first half that is kept, and before the end
            logs.write("a", 0, b"half a line")
            sent += 11
            logs.skip("a", 0, 50_000)
    text = (tmp_path / "logs/a/rank-0.log").read_bytes()
    marks = [one for one in text.splitlines() if b"cut" in one]
    kept = len(text) - sum(len(mark) + 1 for mark in marks) - 1
    assert kept + logs.cut["a"] == sent + 50_000
    assert logs.lost == {}
    logs.close()
