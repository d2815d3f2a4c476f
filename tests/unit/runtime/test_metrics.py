"""metrics.jsonl: each step stands once, whatever happened in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtctl.runtime.telemetry.metrics import MetricsWriter, remove_later_lines
from dtctl.runtime.telemetry.sinks import TensorBoard

KEYS = {"step", "loss", "lr", "grad_norm", "step_s", "samples_per_s", "tokens_per_s", "time"}


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log(metrics: MetricsWriter, step: int, loss: float = 1.0, **extra: float) -> None:
    metrics.log(step, loss=loss, lr=0.1, grad_norm=2.0, samples=32, tokens=None, extra=extra)


def test_the_keys_are_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = MetricsWriter(tmp_path / "deep" / "metrics.jsonl", step=0, steps=100)
    log(metrics, 10, val_loss=0.5)
    metrics.close()
    (row,) = rows(tmp_path / "deep" / "metrics.jsonl")
    assert row.keys() == KEYS | {"val_loss"}
    assert (row["step"], row["loss"], row["tokens_per_s"]) == (10, 1.0, None)
    out = capsys.readouterr().out
    assert out.startswith("step  10/100  loss 1.0000  lr 1.00e-01  grad 2.00")
    assert out.endswith("samples/s  val_loss 0.5000\n")


def test_a_diverged_loss_is_still_json(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", step=0, steps=1)
    log(metrics, 1, loss=float("nan"))
    metrics.close()
    assert rows(tmp_path / "metrics.jsonl")[0]["loss"] is None


def test_resuming_removes_later_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n{"step": 10}\n{"step": 15}\n{"step": 2')
    metrics = MetricsWriter(path, step=10, steps=20)
    log(metrics, 15)
    metrics.close()
    assert [row["step"] for row in rows(path)] == [5, 10, 15]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_cutting_nothing_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    remove_later_lines(path, 3)
    assert not path.exists()
    path.write_text('{"step": 3}\n')
    before = path.stat().st_ino
    remove_later_lines(path, 3)
    assert path.stat().st_ino == before


def test_pauses_are_not_part_of_a_step(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", step=0, steps=10)
    metrics.pause(-100.0)  # as if the last line were 100 s ago
    log(metrics, 10)
    metrics.pause(-100.0)
    metrics.pause(90.0)
    log(metrics, 20)
    metrics.close()
    first, second = rows(tmp_path / "metrics.jsonl")
    assert first["step_s"] == pytest.approx(10, rel=0.01)
    assert second["step_s"] == pytest.approx(1, rel=0.01)
    assert first["samples_per_s"] == pytest.approx(3.2, rel=0.01)


def test_tensorboard_when_asked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    metrics = MetricsWriter(
        tmp_path / "metrics.jsonl", step=0, steps=10, sinks=[TensorBoard(tmp_path / "board", step=0)]
    )
    log(metrics, 10)
    metrics.close()
    assert any(entry.name.startswith("events.") for entry in (tmp_path / "board").iterdir())
