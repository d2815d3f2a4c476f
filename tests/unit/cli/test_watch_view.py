"""The picture of a run, drawn from its folder."""

from __future__ import annotations

import io
import json
import os
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from dtctl.cli.common.progress_line import format_elapsed_time
from dtctl.cli.common.watch_view import WatchScreen, render_sparkline
from dtctl.cli.main import run as command
from dtctl.launch.records.events import AttemptRunning, NodeChanged, RunPlanned
from dtctl.launch.records.metrics_rows import read_last_rows
from dtctl.launch.records.record import RunInfo, RunRecord
from dtctl.launch.records.run_writer import RunWriter
from dtctl.node_facts import read_boot_id, start_ticks
from dtctl.supervisor.frames import AGENT
from tests.facts import missing
from tests.unit.cli.test_folding import EXIT_BARRIER


def info() -> RunInfo:
    """Of a run that began 65 s ago."""
    return RunInfo(
        run="gpt-1",
        token="t",
        pid=os.getpid(),
        started=time.time() - 65,
        spec="",
        command=["dtctl"],
        detached=True,
        pid_started=start_ticks(os.getpid()),
        boot=read_boot_id(),
    )


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    made = RunWriter.create(tmp_path, info())
    made.append_event(RunPlanned(nodes=("node1", "node2")))
    for node in ("node1", "node2"):
        made.append_event(NodeChanged(node=node, state="running"))
    made.append_event(AttemptRunning())
    return made


def drawn(screen: WatchScreen, width: int = 78) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=False)
    console.print(screen.draw(width=width))
    return console.export_text()


def test_a_run_is_shown_with_its_nodes_progress_and_last_lines(record: RunRecord) -> None:
    rows = [
        {"step": step, "loss": 4 - step / 100, "step_s": 0.25, "tokens_per_s": 4000.0, "samples_per_s": 16.0}
        for step in range(10, 110, 10)
    ]
    (record.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11')
    log = record.log_path("node2", 1)
    log.parent.mkdir()
    log.write_text("one\ntwo\nhalf")
    screen = WatchScreen(record, steps=400)
    text = drawn(screen)
    assert re.search(r"run gpt-1  running  \d:\d\d", text)
    assert "node1 running" in text
    assert "step 100 of 400  25%  1:15 to go  250.0 ms/step  4,000 tokens/s" in text
    assert "loss 3.0000  █" in text
    assert "rate  4,000  ▄" in text
    assert "[node2:1] one\n[node2:1] two\n" in text
    assert "half" not in text
    with log.open("a") as file:
        file.write(" line\n")
    assert "[node2:1] half line" in drawn(screen)


def test_lines_are_cut_at_the_edge_of_the_screen(record: RunRecord) -> None:
    log = record.log_path("node1", 0)
    log.parent.mkdir()
    log.write_text("x" * 500 + "\n")
    assert max(len(line) for line in drawn(WatchScreen(record, steps=None), 60).splitlines()) <= 60


def test_the_noise_of_torchrun_s_agents_is_folded(record: RunRecord) -> None:
    log = record.log_path("node1", AGENT)
    log.parent.mkdir()
    log.write_text(EXIT_BARRIER + "\n")
    text = drawn(WatchScreen(record, steps=None))
    assert "[node1:agent] worker 1" in text
    assert "TCPStore" not in text
    assert "api.py" not in text


def test_a_run_without_metrics_has_no_progress(record: RunRecord) -> None:
    assert "step" not in drawn(WatchScreen(record, steps=None))


def test_a_loss_that_is_not_a_number_is_said_to_be_none(record: RunRecord) -> None:
    (record.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": null}\n')
    text = drawn(WatchScreen(record, steps=None))
    assert "loss not a number" in text


def test_many_values_become_as_many_bars_as_fit() -> None:
    assert render_sparkline([float(n) for n in range(1000)], 8) == "▁▂▃▄▅▆▇█"
    assert render_sparkline([1.0, 1.0], 8) == "▄▄"
    assert render_sparkline([float("nan"), 1.0, 2.0], 8) == " ▁█"
    assert render_sparkline([float("nan")], 8) == ""


def test_only_the_end_of_long_metrics_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(20_000)))
    rows = read_last_rows(path)
    assert rows[-1]["step"] == 19_999
    assert 1000 < len(rows) < 4000
    assert read_last_rows(tmp_path / "none") == []


def test_time_is_told_as_on_a_clock() -> None:
    assert [format_elapsed_time(seconds) for seconds in (-1, 7, 754, 11_045)] == ["0:00", "0:07", "12:34", "3:04:05"]


def test_what_experts_got_is_a_line_where_a_model_has_any(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = {"step": 10, "loss": 4.0, "step_s": 0.25}
    experts = {"expert_load": 1.5, "expert_tokens": 2048.0, "experts_idle": 0.0, "tokens_dropped": 0.025}
    metrics = record.folder / "metrics.jsonl"
    metrics.write_text(json.dumps(dense) + "\n")
    assert "experts" not in drawn(WatchScreen(record, steps=400))
    metrics.write_text(json.dumps(dense | experts) + "\n")
    for text in (drawn(WatchScreen(record, steps=400)), _status(record, monkeypatch, capsys)):
        assert not missing(text, "experts 2,048 1.50 0.0% idle 2.5% dropped")
    assert json.loads(_status(record, monkeypatch, capsys, "--json"))["progress"].items() >= experts.items()


def _status(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> str:
    monkeypatch.chdir(record.folder.parents[2])
    assert command(["status", record.run, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize("nodes", [1, 2, 40])
def test_any_number_of_nodes_is_shown_on_any_terminal(tmp_path: Path, nodes: int, width: int) -> None:
    made = RunWriter.create(tmp_path, info())
    names = [f"node{number}" for number in range(1, nodes + 1)]
    made.append_event(RunPlanned(nodes=tuple(names)))
    for node in names:
        made.append_event(NodeChanged(node=node, state="running"))
    made.append_event(AttemptRunning())
    text = drawn(WatchScreen(made, steps=None), width)
    assert all(name in text for name in names)
    assert max(map(len, text.splitlines())) <= width


def test_a_name_that_is_wider_than_the_terminal_is_shown(tmp_path: Path) -> None:
    made = RunWriter.create(tmp_path, info())
    made.append_event(RunPlanned(nodes=("n" * 60,)))
    made.append_event(NodeChanged(node="n" * 60, state="running"))
    assert "nnn" in drawn(WatchScreen(made, steps=None), 20)
