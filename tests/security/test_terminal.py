"""What comes from elsewhere reaches a terminal as text or not at all; long output costs no more than it is long."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.cli import output
from dtctl.cli.common.run_display import LaunchView
from dtctl.errors import NodeError, NodeFailures
from dtctl.launch.records.events import AttemptRestarting, JobQueued, NodeChanged, Note, OutputLine, RunStopping
from dtctl.launch.records.logs import LONGEST_BYTES, LineSplitter
from dtctl.printable import make_printable
from dtctl.supervisor.node_processes import NodeProcesses, StartedProcess
from dtctl.supervisor.output_log import RankLogs

EVIL = "a\x1b[2J\x1b]0;owned\x07\x1b]52;c;cm0gLXJm\x1b\\\x1bP1$r\x1b\\\x9b31m\x08\x7f\u202e\u2028[/red][link=x]b"


@given(st.text())
def test_no_control_character_but_tab_and_line_end_is_left(text: str) -> None:
    shown = make_printable(text)
    assert not any((ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 for c in shown)
    assert make_printable(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [bold] text\t1\n", "plain [bold] text\t1\n"),
        ("äöü 日本", "äöü 日本"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("\x1b]never ends", ""),
        ("bell\x07", "bell\\x07"),
        ("\x1b", "\\x1b"),
        ("back\rward", "back\\rward"),
        ("c1 \x9b31m", "c1 \\x9b31m"),
        ("around \u202e", "around \\u202e"),
    ],
)
def test_sequences_go_and_what_else_is_no_text_is_written_out(text: str, shown: str) -> None:
    assert make_printable(text) == shown


def test_nothing_that_prints_lets_them_through(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_stdout(EVIL, "red")
    output.print_stderr(EVIL)
    output.print_table([[EVIL, "x"]], header=["A", "B"])
    output.print_error_with_hint(NodeError(EVIL, node=EVIL, hint=EVIL))
    output.print_error_with_hint(NodeFailures({EVIL: NodeError(EVIL, node="n", hint=EVIL)}))
    view = LaunchView(json_lines=False)
    for event in (
        OutputLine(node=EVIL, rank=0, text=EVIL),
        Note(node=EVIL, text=EVIL),
        RunStopping(reason=EVIL),
        AttemptRestarting(node=EVIL, rank=0, reason=EVIL),
        JobQueued(job=EVIL, reason=EVIL),
    ):
        view.event(event)
    said = capsys.readouterr()
    assert said.out
    assert said.err
    assert not set(said.out + said.err) & set("\x1b\x07\x08\x7f\x9b\u202e\u2028")


def test_the_table_of_nodes_has_no_markup_of_theirs() -> None:
    from rich.console import Console

    view = LaunchView(json_lines=False)
    view.expect(["a[/]"])
    view.event(NodeChanged(node="a[/]", state="failed", error=EVIL + "[/]"))
    console = Console(file=io.StringIO(), width=400)
    console.print(view._build_node_table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[/red][link=x]b[/]" in shown
    assert "\x1b" not in shown


def test_logs_on_a_terminal(tmp_path: Path) -> None:
    run = tmp_path / ".dtctl" / "runs" / "one"
    (run / "logs" / "a").mkdir(parents=True)
    info = '{"run": "one", "token": "x", "pid": 1, "started": 1, "spec": "", "command": [], "detached": false}'
    (run / "run.json").write_text(info)
    (run / "logs" / "a" / "rank-0.log").write_text(EVIL + "\nlast")
    os.mkfifo(run / "logs" / "a" / "rank-1.log")
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    argv = [sys.executable, "-m", "dtctl", "logs", "one"]
    done = subprocess.run(argv, cwd=tmp_path, stdout=theirs, stderr=theirs, env=env, check=False)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "last" in shown
    assert "rank-1.log cannot be read" in " ".join(shown.split())
    assert "\x1b" not in shown


@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\0", b"\r").replace(b"\1", b"\n"))))
def test_pieces_make_the_lines_of_the_whole(pieces: list[bytes]) -> None:
    lines, found = LineSplitter(), []
    for piece in pieces:
        found += lines.feed(piece)
    *whole, rest = b"".join(pieces).split(b"\n")
    wanted = [line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace") for line in whole]
    assert found == wanted
    assert lines.flush() == rest.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")


def cost_s(pieces: int, piece: bytes) -> float:
    """Processor time to take in so many pieces, the least of three times."""

    def once() -> float:
        lines = LineSplitter()
        begun = time.thread_time()
        for _ in range(pieces):
            lines.feed(piece)
        return time.thread_time() - begun

    return min(once() for _ in range(3))


@pytest.mark.parametrize("piece", [b"x" * 4096, b"\r 10%" * 800])
def test_output_without_line_ends_costs_time_by_its_length(piece: bytes) -> None:
    """Ten times as much takes about ten times as long; it was a hundred times."""
    assert cost_s(20_000, piece) < 40 * cost_s(2_000, piece)


def test_what_is_kept_of_a_line_is_bounded_and_a_bars_last_state_is_shown() -> None:
    lines = LineSplitter()
    assert all(len(line) <= LONGEST_BYTES for line in lines.feed(b"x" * 1_000_000))
    assert len(lines._partial_line) <= LONGEST_BYTES
    assert lines.feed(b"\n" + b"\r 1%" * 100_000 + b"\r 99%\r\n")[1:] == [" 99%"]


def test_torchruns_output_without_line_ends_is_stored_as_it_comes(tmp_path: Path) -> None:
    group, process = NodeProcesses(RankLogs(str(tmp_path)), split_ranks=True), StartedProcess(-1, 1, -1)
    group.store(process, b"[dtctl:3] ", last=False)
    for _ in range(100):
        group.store(process, b"x" * 4096, last=False)
        assert len(process.partial) <= (1 << 16) + 4096
    group.store(process, b"end\n[dtctl:4] next\n", last=False)
    assert (tmp_path / "rank-3.log").read_bytes() == b"x" * 409_600 + b"end\n"
    assert (tmp_path / "rank-4.log").read_bytes() == b"next\n"
