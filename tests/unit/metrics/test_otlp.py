"""What a collector is sent is OTLP, and the ledger of the run."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dtctl.launch.records.events import FirstFailure, Restarting, RunEnded, SnapshotBegun, WorkerExited
from dtctl.metrics.families import families
from dtctl.metrics.otlp import Trace
from tests.unit.metrics.following import STARTED, WrittenRun

json_format = pytest.importorskip("google.protobuf.json_format")
traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
metrics = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")


def parsed(body: dict[str, Any], into: Any) -> Any:
    """The message that a collector makes of a body; unknown keys and wrong types are errors."""

    def with_base64(value: Any) -> Any:  # OTLP has ids in hexadecimal digits, where proto3's JSON has base64
        if isinstance(value, list):
            return [with_base64(item) for item in value]
        if isinstance(value, dict):
            ids = {key for key in value if key == "traceId" or key.endswith("panId")}
            plain = {key: with_base64(item) for key, item in value.items()}
            return plain | {key: base64.b64encode(bytes.fromhex(value[key])).decode() for key in ids}
        return value

    return json_format.Parse(json.dumps(with_base64(body)), into)


def spans(body: dict[str, Any]) -> list[Any]:
    (resource,) = parsed(body, traces.ExportTraceServiceRequest()).resource_spans
    assert {item.key: item.value.string_value for item in resource.resource.attributes}["dtctl.run"] == "try-1"
    return list(resource.scope_spans[0].spans)


def test_phases_are_told_when_they_are_over(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    trace = Trace("try-1", token="t", job="gpt")
    figures = run.spends(steps=10, connect=1.0, start=2.0, useful=4.0)
    told = trace.spans(figures, over=False)
    assert [span["name"] for span in told] == ["connect", "start"]
    assert trace.spans(figures, over=False) == [], "told once"
    trace.note(
        [
            SnapshotBegun(step=5),
            WorkerExited(node="a", rank=0, exit_code=0),
            WorkerExited(node="a", rank=1, exit_code=137, signal=9),
            Restarting(attempt=1, of=2, reason="was lost"),
        ]
    )
    failure = FirstFailure(node="a", rank=1, summary="killed")
    figures = run.happens(RunEnded(run="try-1", status="failed", first_failure=failure))
    last, root = spans(trace.traces(trace.spans(figures, over=True)))
    assert (last.name, root.name, root.status.code, root.status.message) == ("useful", "run", 2, "killed")
    assert (last.trace_id, last.parent_span_id) == (root.trace_id, root.span_id)
    assert root.parent_span_id == b""
    assert [event.name for event in root.events] == ["snapshot", "worker failed", "restart"]
    assert (last.start_time_unix_nano, last.end_time_unix_nano) == ((STARTED + 3) * 1e9, (STARTED + 7) * 1e9)
    facts = {item.key: item.value for item in root.attributes}
    assert facts["dtctl.phase.useful_s"].double_value == 4.0
    assert facts["dtctl.status"].string_value == "failed"


def test_another_launcher_tells_the_same_trace(tmp_path: Path) -> None:
    figures = WrittenRun(tmp_path).spends(steps=10, connect=1.0, start=2.0, useful=4.0)
    first, second = (Trace("try-1", token="t", job="gpt").spans(figures, over=True) for _ in range(2))
    assert first == second
    assert len({span["spanId"] for span in first}) == len(first)
    other = Trace("try-1", token="u", job="gpt").spans(figures, over=True)
    assert other[0]["traceId"] != first[0]["traceId"], "a run of the same name elsewhere"


def test_figures_are_gauges_and_sums(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    figures = run.logs({"step": 3, "loss": None, "lr": 0.1})
    body = Trace("try-1", token="t", job="gpt").metrics(families(figures), started=STARTED, now=STARTED + 9)
    (resource,) = parsed(body, metrics.ExportMetricsServiceRequest()).resource_metrics
    found = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert math.isnan(found["dtctl_loss"].gauge.data_points[0].as_double)
    restarts = found["dtctl_restarts_total"].sum
    assert (restarts.is_monotonic, restarts.aggregation_temporality) == (True, 2)
    assert restarts.data_points[0].start_time_unix_nano == STARTED * 1e9
