"""Choice of curves for each plot. Pure: from the metrics of runs to plain data that the page's script draws."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtctl.report.metrics import MetricCurve, MetricsTable
from dtctl.report.run import RunFacts

MORE = 24
"""Largest number of plots for values that dtctl does not know."""
MARKS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Plot with its title, axes and curves."""

    name: str
    title: str
    keys: Mapping[str, str]
    """Key of metrics.jsonl -> its name in the legend."""
    unit: str = ""
    scale: float = 1.0
    """Factor by which values are multiplied."""
    note: str = ""


PLOTS = (
    Plot(name="loss", title="Loss", keys={"loss": "training", "val_loss": "evaluation"}),
    Plot(name="tokens", title="Throughput", keys={"tokens_per_s": "all workers"}, unit="tokens/s"),
    Plot(name="samples", title="Throughput", keys={"samples_per_s": "all workers"}, unit="samples/s"),
    Plot(
        name="step", title="Time of a step", unit="ms", scale=1e3,
        keys={"step_p50_s": "median", "step_p95_s": "95th percentile", "step_max_s": "longest"},
        note="of the steps between two lines of metrics.jsonl",
    ),
    Plot(name="mean", title="Time of a step", keys={"step_s": "mean"}, unit="ms", scale=1e3),
    Plot(
        name="memory", title="Memory", unit="GiB",
        keys={
            "memory_gib": "allocated, peak", "memory_reserved_gib": "reserved, peak", "rss_gib": "process",
            "rss_peak_gib": "process, peak", "fullest_gib": "the worker that needs most",
        },
        note="of rank 0, and of the worker that needs most",
    ),
    Plot(
        name="slow", title="The slowest worker", unit="ms", scale=1e3,
        keys={"slowest_own_s": "slowest", "median_own_s": "median"},
        note="time that a worker computes in a step, without waiting for others",
    ),
    Plot(
        name="data", title="Waiting for data", keys={"data_wait": "the worker that waited most"}, unit="%", scale=100.0,
        note="share of the time of steps; above some percent, more train.data_workers",
    ),
    Plot(
        name="experts", title="The busiest expert", keys={"expert_load": "of all layers"}, unit="x",
        note="tokens that it got, divided by the mean of its layer; 1: balanced",
    ),
    Plot(
        name="expert-tokens", title="Tokens of an expert", unit="tokens",
        keys={"expert_tokens_max": "the busiest", "expert_tokens": "mean"}, note="tokens that chose it in a step",
    ),
    Plot(
        name="choices", title="Experts left out", unit="%", scale=100.0,
        keys={"experts_idle": "experts that got nothing", "tokens_dropped": "choices that were dropped"},
    ),
    Plot(name="mfu", title="Use of the hardware (MFU)", keys={"mfu": "all workers"}, unit="%", scale=100.0),
    Plot(name="grad", title="Norm of the gradient", keys={"grad_norm": "before clipping"}),
    Plot(
        name="skipped", title="Skipped steps", keys={"skipped": "skipped"},
        note="1: the gradient was not finite, and the optimizer made no step",
    ),
    Plot(
        name="loss-scale", title="Loss scale (fp16)", keys={"loss_scale": "loss scale"},
        note="it is halved after a step whose gradient was not finite",
    ),
    Plot(name="lr", title="Learning rate", keys={"lr": "learning rate"}),
)  # fmt: skip
SILENT = ("time", "slowest_rank", "fullest_rank", "resume_exact")
"""Keys that no plot shows: the first is an axis, the others are names."""


def build_charts(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Return all plots of these runs, as the page's script takes them."""
    drafts = [_build_goodput_chart(runs)] if any(run.metrics for run in runs) else []
    handled = set(SILENT)
    tables = [run.metrics for run in runs]
    for plot in PLOTS:
        handled |= set(plot.keys)
        if plot.name == "samples" and _has_metric(tables, "tokens_per_s"):
            continue  # the same curve in another unit
        if plot.name == "mean" and _has_metric(tables, "step_p50_s"):
            continue
        drafts.append(_build_metric_chart(runs, plot))
    remaining = dict.fromkeys(key for metrics in tables if metrics for key in metrics.curves if key not in handled)
    drafts += [
        _build_metric_chart(runs, Plot(name=f"more-{n}", title=key, keys={key: key}))
        for n, key in enumerate([*remaining][:MORE])
    ]
    nonempty = [chart for chart in drafts if chart["series"]]
    nonempty.sort(key=lambda chart: chart["name"] != "loss")  # the loss comes first
    return nonempty


def _has_metric(tables: Iterable[MetricsTable | None], key: str) -> bool:
    return any(metrics is not None and _has_values(metrics.curves.get(key)) for metrics in tables)


def _has_values(curve: MetricCurve | None) -> bool:
    return curve is not None and any(map(math.isfinite, curve.values))


def _build_metric_chart(runs: Sequence[RunFacts], plot: Plot) -> dict[str, Any]:
    series = []
    for number, run in enumerate(runs):
        for dash, (key, label) in enumerate(plot.keys.items()):
            curve = run.metrics.curves.get(key) if run.metrics else None
            if curve is None or not _has_values(curve):
                continue
            words = [run.state.run] if len(runs) > 1 else []
            if len(runs) == 1 or len(plot.keys) > 1:
                words.append(label)
            series_name = " ".join(words)
            series.append(
                {"label": series_name, "run": number, "dash": dash, **_build_series_points(curve, plot.scale)}
            )
    marks = [_step_at(run, mark.time_s) for run in runs[:1] for mark in run.history.list_marks_of("restart")][:MARKS]
    printed = any(run.metrics is not None and run.metrics.is_printed for run in runs)
    note = "; ".join(filter(None, (plot.note, "read from the output" * printed)))
    return {
        "name": plot.name, "title": plot.title, "unit": plot.unit, "note": note, "x": "step", "series": series,
        "marks": marks if len(runs) == 1 else [],
    }  # fmt: skip


def _build_series_points(curve: MetricCurve, scale: float) -> dict[str, list[float | None]]:
    numbers = {
        "x": [_round_for_plot(step) for step in curve.steps],
        "y": [_round_for_plot(value * scale) for value in curve.values],
    }
    if curve.low and curve.low != curve.high:
        numbers["low"] = [_round_for_plot(value * scale) for value in curve.low]
        numbers["high"] = [_round_for_plot(value * scale) for value in curve.high]
    return numbers


def _round_for_plot(value: float) -> float | None:
    """Return a value with six digits, more than a screen can show; None if it is not a number."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def _step_at(run: RunFacts, time_s: float) -> float:
    """Return the last step that was logged before a time and still counts."""
    times = run.metrics.curves.get("time") if run.metrics else None
    if times is None:
        return 0.0
    place = bisect.bisect_right(times.values, run.state.started + time_s)
    return times.steps[place - 1] if place else 0.0


def _build_goodput_chart(runs: Sequence[RunFacts]) -> dict[str, Any]:
    series = []
    for number, run in enumerate(runs):
        if run.metrics is None:
            continue
        total = run.state.ledger.goodput if run.state.ledger is not None and run.state.over else None
        curve = compute_goodput_curve(run.metrics, run.state.started, total=total, length_s=run.state.duration_s)
        if curve is not None:
            series_name = "useful share so far" if len(runs) == 1 else run.state.run
            series.append({"label": series_name, "run": number, "dash": 0, **_build_series_points(curve, 1.0)})
    restarts = runs[0].history.list_marks_of("restart")[:MARKS] if len(runs) == 1 else []
    return {
        "name": "goodput", "title": "Goodput", "unit": "%", "x": "time", "series": series,
        "note": "time spent so far on steps that count in the end, as a share of all time so far",
        "marks": [round(mark.time_s, 1) for mark in restarts],
    }  # fmt: skip


def compute_goodput_curve(
    metrics: MetricsTable, started: float, *, total: float | None = None, length_s: float = 0.0
) -> MetricCurve | None:
    """Return the share of time spent on steps that count, by seconds since the start, in percent.

    Steps that were done again are not in metrics.jsonl, so all steps there count, except those of an earlier run that
    this one continues.

    Args:
        metrics: of the run.
        started: seconds since the epoch.
        total: share of the whole run as its ledger has it, with which the curve ends; None: it is not over.
        length_s: of the whole run.
    """
    times, steps = metrics.curves.get("time"), metrics.curves.get("step_s")
    if times is None or steps is None:
        return None
    at = dict(zip(times.steps, times.values, strict=True))
    wall, share, useful_s, before = [], [], 0.0, 0.0
    for number, (step, mean_s) in enumerate(zip(steps.steps, steps.values, strict=True)):
        # The step of a bucket is the first one in it, and its mean covers all steps before the next bucket.
        behind = steps.steps[number - 1] if number else 0.0
        used_s = steps.values[number - 1] if number and steps.low else mean_s
        passed_s = at.get(step, math.nan) - started
        if passed_s < 0:
            continue
        useful_s += used_s * (step - behind) if math.isfinite(used_s) else 0.0
        if passed_s > before:
            before = passed_s
            wall.append(passed_s)
            share.append(100.0 * min(1.0, useful_s / passed_s))
    if wall and total is not None and length_s > wall[-1]:
        wall.append(length_s)
        share.append(100.0 * total)
    return MetricCurve(steps=tuple(wall), values=tuple(share)) if wall else None
