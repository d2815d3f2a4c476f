"""A run for OpenTelemetry: its ledger as spans, its figures as gauges and sums. Pure.

OTLP's JSON form (https://opentelemetry.io/docs/specs/otlp/#otlphttp) is small enough to be written here: the SDK would
bring twelve packages for two requests. Ids follow from the run, so that a launcher that takes over writes the same
trace, and what is sent twice is one span.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import dtctl
from dtctl.launch.records.events import (
    AlertChanged,
    Event,
    Healed,
    Hung,
    NodeReplaced,
    Restarting,
    SnapshotBegun,
    WorkerExited,
)
from dtctl.metrics.families import MetricFamily
from dtctl.metrics.follow import RunFigures

_SCOPE: Final = {"name": "dtctl", "version": dtctl.__version__}
_INTERNAL: Final = 1
_OK: Final = 1
_ERROR: Final = 2
_CUMULATIVE: Final = 2


class Trace:
    """The spans of one run, each once it is over."""

    def __init__(self, run: str, *, token: str, job: str) -> None:
        """Nothing was told yet.

        Args:
            run: run id.
            token: of the run, which tells runs of the same name apart.
            job: `job.name` of the spec.
        """
        self._run, self._job = run, job
        self._seed = f"{run}\n{token}"
        self._told_at = -1.0
        """Second at which the newest phase that was told began."""
        self._events: list[dict[str, Any]] = []

    def note(self, events: Iterable[Event]) -> None:
        """Keep what will be events of the run's span."""
        for event in events:
            name = {
                Restarting: "restart", WorkerExited: "worker failed", Hung: "hang", NodeReplaced: "node replaced",
                SnapshotBegun: "snapshot", AlertChanged: "alert", Healed: "heal",
            }.get(type(event))  # fmt: skip
            facts = event.to_json()
            if name is not None and (name != "worker failed" or facts["exit_code"]):
                kept = {key: value for key, value in facts.items() if key not in ("event", "time")}
                self._events.append({"timeUnixNano": _nano(event.time), "name": name, "attributes": attributes(kept)})

    def spans(self, figures: RunFigures, *, over: bool) -> list[dict[str, Any]]:
        """Spans of phases that are over and were not told yet; with the run's own if it is `over`."""
        course = figures.ledger.course
        wall_s = figures.ledger.wall_s
        ends = [*(at_s for _, at_s in course[1:]), wall_s]
        count = len(course) if over else max(0, len(course) - 1)
        span_rows = []
        for (phase, begin_s), end_s in list(zip(course, ends, strict=True))[:count] if course else []:
            if begin_s > self._told_at:
                self._told_at = begin_s
                begin, end = figures.started + begin_s, figures.started + end_s
                span_rows.append(
                    self._span(f"{phase} {begin_s}", phase, begin, end, attributes({"dtctl.phase": phase}))
                )
        if over:
            span_rows.append(self._root(figures, figures.started + wall_s))
        return span_rows

    def _root(self, figures: RunFigures, end: float) -> dict[str, Any]:
        phases = {f"dtctl.phase.{phase}_s": spent for phase, spent in figures.ledger.phases_s.items()}
        done = figures.progress.end
        status = done.status if done is not None else "abandoned"
        facts = {
            "dtctl.status": status, "dtctl.attempts": figures.progress.attempt + 1, "dtctl.steps": figures.step,
            "dtctl.goodput": figures.ledger.goodput, "dtctl.steps_lost": figures.ledger.steps_lost,
            **phases,
        }  # fmt: skip
        failure = done.first_failure if done is not None else None
        result: dict[str, Any] = {"code": _OK if status == "succeeded" else _ERROR if status != "stopped" else 0}
        if failure is not None and failure.summary:
            result["message"] = failure.summary
        root = self._span("", "run", figures.started, end, attributes(facts))
        del root["parentSpanId"]
        return {**root, "events": self._events, "status": result}

    def _span(self, key: str, name: str, begin: float, end: float, facts: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "traceId": self._id("trace", 32),
            "spanId": self._id(f"span {key}", 16),
            "parentSpanId": self._id("span ", 16),
            "name": name,
            "kind": _INTERNAL,
            "startTimeUnixNano": _nano(begin),
            "endTimeUnixNano": _nano(max(begin, end)),
            "attributes": facts,
        }

    def _id(self, what: str, digits: int) -> str:
        return hashlib.sha256(f"{self._seed}\n{what}".encode()).hexdigest()[:digits]

    def traces(self, spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The body of a request to /v1/traces."""
        return {
            "resourceSpans": [{"resource": self._resource(), "scopeSpans": [{"scope": _SCOPE, "spans": list(spans)}]}]
        }

    def metrics(self, found: Iterable[MetricFamily], *, started: float, now: float) -> dict[str, Any]:
        """The body of a request to /v1/metrics.

        Args:
            found: what `/metrics` shows.
            started: when the run began.
            now: when the figures were so.
        """
        scope = {"scope": _SCOPE, "metrics": [_metric(family, started=started, now=now) for family in found]}
        return {"resourceMetrics": [{"resource": self._resource(), "scopeMetrics": [scope]}]}

    def _resource(self) -> dict[str, Any]:
        facts = {"service.name": "dtctl", "service.version": dtctl.__version__, "dtctl.run": self._run}
        return {"attributes": attributes({**facts, "dtctl.job": self._job})}


def _metric(family: MetricFamily, *, started: float, now: float) -> dict[str, Any]:
    points = [
        {
            "attributes": attributes(labels),
            "startTimeUnixNano": _nano(started),
            "timeUnixNano": _nano(now),
            # proto3's JSON spells what JSON has no number for.
            "asDouble": value if math.isfinite(value) else _spelt(value),
        }
        for labels, value in family.samples
    ]
    kind: dict[str, Any] = {"dataPoints": points}
    if family.kind == "counter":
        return {
            "name": family.name,
            "description": family.help,
            "sum": {**kind, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True},
        }
    return {"name": family.name, "description": family.help, "gauge": kind}


def _spelt(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def attributes(facts: Any) -> list[dict[str, Any]]:
    """Attributes as OTLP has them; those without a value are left out."""
    return [{"key": key, "value": _value(value)} for key, value in facts.items() if value is not None]


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def _nano(seconds: float) -> str:
    return str(round(seconds * 1e6) * 1000)
