"""The picture of a run, drawn from its folder."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from dtctl.cli.common.watch_view import Screen, clock, sparkline, tail_of_metrics
from dtctl.launch.records.events import AttemptRunning, NodeChanged, RunPlanned
from dtctl.launch.records.record import RunInfo, RunRecord
from dtctl.node_facts import boot_id, start_ticks


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    info = RunInfo(
        run="gpt-1",
        token="t",
        pid=os.getpid(),
        started=time.time() - 65,
        spec="",
        command=["dtctl"],
        detached=True,
        pid_started=start_ticks(os.getpid()),
        boot=boot_id(),
    )
    made = RunRecord.create(tmp_path, info)
    made.append_event(RunPlanned(nodes=("node1", "node2")))
    for node in ("node1", "node2"):
        made.append_event(NodeChanged(node=node, state="running"))
    made.append_event(AttemptRunning())
    return made


def drawn(screen: Screen, width: int = 78) -> str:
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
    screen = Screen(record, steps=400)
    text = drawn(screen)
    assert "run gpt-1  running  1:05" in text
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
    assert max(len(line) for line in drawn(Screen(record, steps=None), 60).splitlines()) <= 60


def test_a_run_without_metrics_has_no_progress(record: RunRecord) -> None:
    assert "step" not in drawn(Screen(record, steps=None))


def test_a_loss_that_is_not_a_number_is_said_to_be_none(record: RunRecord) -> None:
    (record.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": null}\n')
    text = drawn(Screen(record, steps=None))
    assert "loss not a number" in text


def test_many_values_become_as_many_bars_as_fit() -> None:
    assert sparkline([float(n) for n in range(1000)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0], 8) == "▄▄"
    assert sparkline([float("nan"), 1.0, 2.0], 8) == " ▁█"
    assert sparkline([float("nan")], 8) == ""


def test_only_the_end_of_long_metrics_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(20_000)))
    rows = tail_of_metrics(path)
    assert rows[-1]["step"] == 19_999
    assert 1000 < len(rows) < 4000
    assert tail_of_metrics(tmp_path / "none") == []


def test_time_is_told_as_on_a_clock() -> None:
    assert [clock(seconds) for seconds in (-1, 7, 754, 11_045)] == ["0:00", "0:07", "12:34", "3:04:05"]
