"""Metrics as curves: what matters survives the thinning, whatever the length of the file."""

from __future__ import annotations

import json
import math
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.report import metrics
from dtctl.report.metrics import compute_percentile, downsample_curve, read_metrics_table
from tests.unit.report.runs import row


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(1, 20))
def test_thinning_keeps_the_least_and_the_greatest(values: list[float], points: int) -> None:
    curve = downsample_curve(range(len(values)), values, points)
    assert len(curve.values) <= 2 * points
    assert min(curve.low or curve.values) == min(values)
    assert max(curve.high or curve.values) == max(values)
    assert list(curve.steps) == sorted(set(curve.steps))


def test_a_bucket_with_a_loss_that_is_no_number_is_a_gap() -> None:
    curve = downsample_curve(range(9), [1.0, 2, 3, 4, math.nan, 6, 7, 8, 9], 3)
    assert curve.values[0] == 2.0
    assert math.isnan(curve.values[1])
    assert (curve.low[1], curve.high[1]) == (4.0, 6.0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 40))
def test_every_line_is_in_one_block(lengths: list[int], parts: int, size: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        lines = [str(number) * length + "\n" for number, length in enumerate(lengths)]
        file.write("".join(lines).encode())
        file.flush()
        edges = [file.tell() * part // parts for part in range(parts + 1)]
        blocks = [metrics._read_line_blocks(Path(file.name), *part, size) for part in pairwise(edges)]
        assert "".join(block for part in blocks for block in part) == "".join(lines)


@pytest.mark.parametrize("short", [True, False])
def test_a_file_is_read_whole_however_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
    """A spike on one line, a null, evaluations, damaged lines: the same from both readers."""
    rows = [row(step) for step in range(1, 9001)]
    rows[4321]["loss"] = 99.0
    rows[7000]["loss"] = None
    for step in range(1000, 9001, 1000):
        rows[step - 1]["val_loss"] = step / 1000
    lines = [json.dumps(one) for one in rows]
    lines[100] = lines[100][:40]
    lines[5000] = "\x00nonsense"
    if not short:
        monkeypatch.setattr(metrics, "SHORT_BYTES", 0)
    found = read_metrics_table(write(tmp_path / "m.jsonl", lines))
    assert found is not None
    assert (found.rows, found.damaged, found.last_step) == (8998, 2, 9000)
    assert (found.stride > 1) is not short
    loss = found.curves["loss"]
    assert len(loss.steps) <= metrics.POINTS + 2 * metrics.PROCESSES
    assert max(loss.high) == 99.0
    assert sum(map(math.isnan, loss.values)) == 1
    assert found.curves["val_loss"].values == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    assert set(found.curves) == {*row(1), "val_loss"} - {"step"}
    assert compute_percentile(found.step_s, 0.5) == 1.0


def test_of_steps_done_twice_the_newest_counts(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0), (2, 5.0))]
    found = read_metrics_table(write(tmp_path / "m.jsonl", lines))
    assert found is not None
    assert found.curves["loss"].values == (9.0, 5.0, 7.0)


def test_no_file_and_an_empty_one_are_no_metrics(tmp_path: Path) -> None:
    assert read_metrics_table(tmp_path / "none") is None
    (tmp_path / "empty").touch()
    assert read_metrics_table(tmp_path / "empty") is None


def test_percentiles_are_values_that_occurred() -> None:
    assert [compute_percentile((1.0, 2.0, 3.0, 4.0), share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 2.0, 4.0, 4.0]
    assert math.isnan(compute_percentile((), 0.5))


def test_what_no_plot_can_show_is_damaged_or_off_the_scale(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    huge = "1" + "0" * 400
    lines = [
        '{"step": 1, "loss": 2.0}',
        f'{{"step": {huge}, "loss": 2.0}}',
        '{"step": NaN, "loss": 2.0}',
        '{"step": 2, "\\ud800k": 2.0}',
        "[" * 100_000,
        f'{{"step": 3, "loss": {huge}}}',
    ]
    path.write_text("\n".join(lines) + "\n")
    found = read_metrics_table(path)
    assert found is not None
    assert (found.rows, found.damaged) == (3, 3), "of the fourth, only the name cannot be shown"
    assert found.curves["loss"].values == (2.0, math.inf)
