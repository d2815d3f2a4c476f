"""The page of `/metrics`: names, labels and numbers as Prometheus reads them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dtctl.launch.records.events import AlertChanged, AttemptStarting, NodeChanged, RunEnded, RunPlanned
from dtctl.metrics.families import MetricFamily, build_metric_families, format_prometheus_text
from tests.unit.metrics.following import WrittenRun

parser = pytest.importorskip("prometheus_client.parser")


def samples(run: WrittenRun) -> dict[tuple[str, str], float]:
    """(name, its label beside `run`) -> value, as Prometheus' own reader finds them."""
    text = format_prometheus_text(build_metric_families(run.follower.figures), "try-1")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("run") == "try-1"
            found[sample.name, next(iter(sample.labels.values()), "")] = sample.value
    return found


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    found = samples(WrittenRun(tmp_path))
    assert found["dtctl_run_status", "starting"] == 1
    assert found["dtctl_attempts_total", ""] == 0
    assert ("dtctl_step", "") not in found, "what is not known is left out"


def test_a_run_on_its_way(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.happens(
        RunPlanned(run="try-1", nodes=("a", "b"), world_size=4),
        AttemptStarting(attempt=0),
        NodeChanged(node="a", state="running"),
        NodeChanged(node="b", state="lost"),
        AlertChanged(alert="restart-2", state="firing"),
        AlertChanged(alert="restart-3", state="firing"),
    )
    run.logs({"step": 7, "loss": None, "lr": 0.1, "tokens_per_s": None, "samples_per_s": 3.5, "val_loss": 2.0})
    found = samples(run)
    assert (found["dtctl_nodes", "running"], found["dtctl_nodes", "lost"]) == (1, 1)
    assert (found["dtctl_node_running", "a"], found["dtctl_node_running", "b"]) == (1, 0)
    assert found["dtctl_alerts_firing", "restart"] == 2
    assert math.isnan(found["dtctl_loss", ""])
    assert (found["dtctl_step", ""], found["dtctl_samples_per_second", ""]) == (7, 3.5)
    assert ("dtctl_tokens_per_second", "") not in found, "samples have no tokens"
    assert found["dtctl_logged", "val_loss"] == 2


def test_its_time_and_its_end(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.spends(steps=30, connect=1.5, useful=2.5)
    run.happens(RunEnded(run="try-1", status="succeeded"))
    found = samples(run)
    assert (found["dtctl_phase_seconds", "useful"], found["dtctl_phase_seconds", "connect"]) == (2.5, 1.5)
    assert found["dtctl_goodput_ratio", ""] == 0.5
    assert (found["dtctl_run_status", "succeeded"], found["dtctl_run_status", "running"]) == (1, 0)


def test_what_hurts_in_labels_and_numbers() -> None:
    hurts = 'a"b\\c\nd'
    family = MetricFamily(
        name="n", kind="gauge", help="first\nsecond \\", samples=(({"x": hurts}, math.inf), ({"x": "y"}, 1e300))
    )  # fmt: skip
    (found,) = parser.text_string_to_metric_families(format_prometheus_text(iter([family]), "r"))
    assert found.documentation == "first\nsecond \\"
    assert [(sample.labels["x"], sample.value) for sample in found.samples] == [(hurts, math.inf), ("y", 1e300)]
