"""The line below all others: how far the training is, on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pyte
import pytest

from dtctl.cli import output
from dtctl.cli.common import progress_line, run_display
from dtctl.launch.records.events import OutputLine, RunStopping


class Terminal:
    """A stream that a terminal shows."""

    def __init__(self) -> None:
        self.screen = pyte.Screen(60, 6)
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> None:
        self._stream.feed(text.replace("\n", "\r\n"))

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    shown = Terminal()
    streams = SimpleNamespace(stdout=shown, stderr=shown)  # not in sys itself: pytest takes its streams back there
    monkeypatch.setattr(output, "sys", streams)
    monkeypatch.setattr(run_display, "sys", streams)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(output, "_last", [])
    return shown


def test_a_printed_bar_is_no_share_of_the_whole() -> None:
    row = {"step": 30, "steps": 32, "step_s": 0.05}
    assert progress_line.format_progress_line(row, steps=None, runs=True).startswith("step 30 of 32  94%  0:00 to go")
    printed = {**row, progress_line.PRINTED: True}
    assert progress_line.format_progress_line(printed, steps=None, runs=True) == "step 30 of 32  50.0 ms/step"


def test_it_stays_below_what_is_printed_and_is_one_line(terminal: Terminal) -> None:
    output.set_status_line("step 1")
    output.print_stdout("a")
    output.set_status_line("step 2 " + 100 * "x")
    output.print_stderr("b")
    *above, last = terminal.lines()
    assert above == ["a", "b"]
    assert last.startswith("step 2 x")
    output.set_status_line("")
    output.print_stdout("c")
    assert terminal.lines() == ["a", "b", "c"]


def test_a_pipe_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    output.set_status_line("step 1")
    output.print_stdout("a")
    assert capsys.readouterr() == ("a\n", "")


def test_it_tells_the_newest_row_and_goes_when_the_run_stops(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"step": 30, "loss": 1.25, "step_s": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(progress_line, "read_training_steps", lambda _: 120)
    view = run_display.LaunchView(json_lines=False, record=SimpleNamespace(folder=tmp_path))  # type: ignore[arg-type]
    view.event(OutputLine(node="node1", rank=0, text="step 30"))
    assert terminal.lines() == ["[node1:0] step 30", "step 30 of 120  25%  0:45 to go  500.0 ms/step  loss 1.2500"]
    view.event(RunStopping(reason="asked to"))
    assert [line for line in terminal.lines() if "to go" in line] == []
