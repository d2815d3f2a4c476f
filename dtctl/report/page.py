"""The page: facts of runs as self-contained HTML. Pure, except that it reads the template's files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dtctl
from dtctl.launch.records.events import describe_failure_subject, describe_worker_end
from dtctl.launch.records.ledger import PHASES, LedgerFacts
from dtctl.launch.records.state import LEFT
from dtctl.printable import format_count
from dtctl.render import find_builtin_templates
from dtctl.report.charts import build_charts
from dtctl.report.history import TOLD, TimelineMark
from dtctl.report.metrics import MetricsTable, compute_percentile
from dtctl.report.run import RunFacts

REPORT, ADVICE = "report/page.html.j2", "report/advise.html.j2"
LANES = 32
"""Most nodes that the timeline shows; nodes with marks come first."""
EVENTS = 400
PHASE_NAMES = {
    "connect": "connecting", "push": "sending code", "start": "starting workers", "run": "job without progress told",
    "useful": "steps that count", "stall": "waiting for snapshots", "evaluation": "evaluation",
    "lost": "steps repeated or lost", "hang": "standing still", "detect": "noticing a lost worker",
    "copy": "copying checkpoints",
    "heal": "replacing a lost worker", "restart": "restarting", "idle": "waiting to restart",
    "stop": "stopping",
}  # fmt: skip


def render_report_page(runs: Sequence[RunFacts], *, now: float) -> str:
    """Return the report of one run, or of several next to each other.

    Args:
        runs: at least one; the first is described in full.
        now: when it is made, seconds since the epoch.
    """
    chart_list = build_charts(runs)
    values = {
        "runs": [build_run_card(run, number) for number, run in enumerate(runs)],
        "differences": find_spec_differences(runs),
        "charts": chart_list,
        "told": TOLD,
    }
    return render_page_template(REPORT, values, {"charts": chart_list}, now=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyBar:
    """Bar of a strategy on the advisor's page."""

    label: str
    parts: tuple[float, ...]
    """GiB of each part."""
    short: float
    """GiB that are missing; 0 if it fits."""
    speed: float
    """Tokens per second and GPU."""


def render_advice_page(
    title: str, verdict: str, reasons: Sequence[str], *,
    parts: Sequence[str], rows: Sequence[StrategyBar], budget: float, now: float,
) -> str:  # fmt: skip
    """Return the advisor's choices as bars of memory, the best first.

    Args:
        title: model and machines.
        verdict: the recommendation.
        reasons: why.
        parts: names of the parts of memory.
        rows: the choices.
        budget: GiB that can be used of a GPU.
        now: when it is made, seconds since the epoch.
    """
    values = {"title": title, "verdict": verdict, "reasons": reasons, "parts": parts, "rows": rows}
    bars = {"parts": parts, "budget": budget, "rows": [{"label": row.label, "parts": row.parts} for row in rows]}
    return render_page_template(ADVICE, values, {"charts": [], "bars": bars}, now=now)


def render_page_template(name: str, values: Mapping[str, Any], data: Mapping[str, Any], *, now: float) -> str:
    """Return a template of a page, filled in.

    Args:
        name: of the template.
        values: for the template; text in them is escaped.
        data: for the page's script.
        now: when it is made, seconds since the epoch.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = find_builtin_templates()
    environment = Environment(
        loader=FileSystemLoader(str(folder)), undefined=StrictUndefined, autoescape=True, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["clock"] = format_time_span
    inlined = {
        name.replace(".", "_"): (folder / "report" / name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js", "uplot.min.css", "uplot.min.js", "uplot.LICENSE")
    }
    # A script element has no escapes; only this text can end it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    created = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    return environment.get_template(name).render(
        **values, **inlined, data=text, version=dtctl.__version__, made=created
    )


def build_run_card(run: RunFacts, number: int) -> dict[str, Any]:
    """Return the texts and figures of the page for one run."""
    state, plan, ledger = run.state, run.plan, run.state.ledger or LedgerFacts()
    nodes = [node["name"] for node in plan.get("nodes", [])]
    return {
        "number": number,
        "name": state.run,
        "status": state.status,
        "verdict": describe_run_outcome(run),
        "log": (failure.log or "") if (failure := state.done and state.done.first_failure) else "",
        "tiles": build_figure_tiles(run),
        "phases": list_phase_shares(ledger),
        "lanes": build_node_lanes(run),
        "more_nodes": max(0, len(run.history.nodes) - LANES),
        "events": [_build_event_row(mark) for mark in run.history.marks[:EVENTS]],
        "more_events": max(0, len(run.history.marks) - EVENTS),
        "length": run.history.length_s,
        "nodes": build_node_rows(run),
        "snapshots": [(format_time_span(mark.time_s), mark.text) for mark in run.history.list_marks_of("snapshot")],
        "metrics": describe_metrics(run.metrics),
        "where": f"{plan.get('kind', 'job')} over {plan.get('transport', '?')}, "
        f"{format_count(plan.get('world_size', 0), 'worker')} on {format_count(len(nodes), 'node')}",
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started)),
        "command": run.info.command_line if run.info.command else "",
        "spec": run.spec,
        "notes": plan.get("notes", []),
        "environment": run.environment,
        "secrets": plan.get("secrets", []),
    }


def describe_run_outcome(run: RunFacts) -> str:
    """Return the result of the run and its reason, in a sentence or two."""
    earlier = run.info.resumed_run
    return f"{_describe_run_end(run)} Continues run {earlier}{_first_step(run)}." if earlier else _describe_run_end(run)


def _first_step(run: RunFacts) -> str:
    """`, from step 120 on`: the first step that this run has done itself."""
    times = run.metrics.curves.get("time") if run.metrics is not None else None
    own = (step for step, at in zip(times.steps, times.values, strict=True) if at >= run.state.started) if times else ()
    first = next(iter(own), None)
    return "" if first is None else f"; its first line of metrics is step {int(first):,}"


def _describe_run_end(run: RunFacts) -> str:
    state = run.state
    took = format_time_span(state.duration_s)
    failure = state.done and state.done.first_failure
    if failure:
        summary = f": {failure.summary}" if failure.summary else ""
        subject = describe_failure_subject(failure.node, failure.rank, failure.exit_code, hang=failure.hang)
        first = f"Failed after {took}: {subject} {describe_worker_end(failure)}{summary}."
    elif state.status in LEFT:
        first = f"Its launcher ended unexpectedly after {took}."
    elif state.over:
        first = f"{state.status.capitalize()} after {took}."
    else:
        first = f"{state.status.capitalize()} for {took} so far."
    asked = [mark.text.partition(": ")[2] for mark in run.history.list_marks_of("restart")]
    begun, never = asked[: state.attempt], asked[state.attempt :]
    if begun:
        times = "once" if len(begun) == 1 else f"{len(begun)} times"
        first += f" Started again {times}{', the last time' if len(begun) > 1 else ''} because {begun[-1]}."
    if never:
        first += f" It was to start once more because {never[-1]}, and did not."
    return first


def build_figure_tiles(run: RunFacts) -> list[tuple[str, str, str]]:
    """Return the most important figures: name, value, explanation."""
    state, ledger, metrics = run.state, run.state.ledger or LedgerFacts(), run.metrics
    items = [
        (
            "wall time",
            format_time_span(state.duration_s),
            format_count(len(run.history.list_marks_of("restart")) + 1, "attempt"),
        )
    ]
    goodput = ledger.goodput
    lost = ledger.steps_lost or 0
    items.append(("goodput", "–" if goodput is None else f"{goodput:.1%}", f"{format_count(lost, 'step')} repeated"))
    target_steps = run.settings.get("train.steps")
    if metrics is not None:
        items.append(
            (
                "steps",
                f"{metrics.last_step:,}",
                f"of {int(target_steps):,}" if target_steps and target_steps.isdigit() else "",
            )
        )
        loss = _find_last_value(metrics, "loss")
        evaluated = _find_lowest_value(metrics, "val_loss")
        best_evaluation = "" if evaluated is None else f"best evaluation {evaluated:.4g}"
        if loss is None and (since := _not_since(metrics, "loss")) is not None:
            best_evaluation = f"since step {since:,}" + (f", {best_evaluation}" if best_evaluation else "")
        items.append(("loss", "not a number" if loss is None else f"{loss:.4f}", best_evaluation))
        items += _build_speed_tiles(metrics)
        memory = max(
            ((_find_greatest_value(metrics, key), key) for key in ("memory_gib", "rss_peak_gib")), default=(0.0, "")
        )
        if memory[0] > 0:
            items.append(("memory", f"{memory[0]:.3g} GiB", "peak of rank 0"))
    end = state.done
    if end is None:
        items.append(("exit code", "–", ""))
    else:
        left = "remaining processes could not be counted"
        if end.left_behind is not None:
            left = f"{format_count(end.left_behind, 'process', 'processes')} left"
        items.append(("exit code", str(end.exit_code), left))
    return items


def _build_speed_tiles(metrics: MetricsTable) -> list[tuple[str, str, str]]:
    items = []
    for key, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        values = sorted(value for value in _read_curve_values(metrics, key) if math.isfinite(value))
        if values:
            items.append(("throughput", f"{compute_percentile(values, 0.5):,.0f}", f"{unit}, median"))
            break
    medians = sorted(filter(math.isfinite, _read_curve_values(metrics, "step_p50_s")))
    if medians:  # the same values as in the plot
        usual, slow = compute_percentile(medians, 0.5) * 1e3, _find_greatest_value(metrics, "step_p95_s") * 1e3
        items.append(
            ("step", f"{_format_three_digits(usual)} ms", f"median; 95% within {_format_three_digits(slow)} ms")
        )
    elif metrics.step_s:
        p50, p95, p99 = (compute_percentile(metrics.step_s, share) * 1e3 for share in (0.5, 0.95, 0.99))
        items.append(("step", f"{p50:.3g} ms", f"95% {p95:.3g}, 99% {p99:.3g} ms"))
    return items


def _format_three_digits(value: float) -> str:
    """Return a number with three digits, without powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _read_curve_values(metrics: MetricsTable, key: str) -> Sequence[float]:
    curve = metrics.curves.get(key)
    return curve.values if curve else ()


def _find_last_value(metrics: MetricsTable, key: str) -> float | None:
    values = _read_curve_values(metrics, key)
    return values[-1] if values and math.isfinite(values[-1]) else None


def _not_since(metrics: MetricsTable, key: str) -> int | None:
    """Return the first step of those at the end that have no number; None without any line."""
    curve, first = metrics.curves.get(key), None
    for step, value in zip(reversed(curve.steps), reversed(curve.values), strict=True) if curve else ():
        if math.isfinite(value):
            break
        first = int(step)
    return first


def _find_lowest_value(metrics: MetricsTable, key: str) -> float | None:
    curve = metrics.curves.get(key)
    return None if curve is None else min(filter(math.isfinite, curve.low or curve.values), default=None)


def _find_greatest_value(metrics: MetricsTable, key: str) -> float:
    curve = metrics.curves.get(key)
    return 0.0 if curve is None else max(filter(math.isfinite, curve.high or curve.values), default=0.0)


def list_phase_shares(ledger: LedgerFacts) -> list[dict[str, Any]]:
    """Return the time by phase: every phase that took time, with its share."""
    seconds = ledger.phases_s
    total = sum(seconds.values())
    if total <= 0:
        return []
    return [
        {"name": name, "told": PHASE_NAMES[name], "share": seconds[name] / total, "seconds": seconds[name]}
        for name in ("useful", *(phase for phase in PHASES if phase != "useful"))
        if seconds.get(name, 0.0) > 0.0005 * total
    ]


def build_node_lanes(run: RunFacts) -> list[dict[str, Any]]:
    """Return the timeline: a lane for each node, places in percent of the run's length."""
    history = run.history
    length = max(history.length_s, 1e-9)
    blamed = {mark.node for mark in history.list_marks_of("failure", "restart")}
    nodes_shown = sorted(history.nodes, key=lambda node: node not in blamed)[:LANES]
    ordered = [node for node in history.nodes if node in nodes_shown]
    return [
        {
            "node": node,
            "spans": [
                {
                    "doing": span.doing,
                    "left": round(100 * span.begin_s / length, 3),
                    "width": round(max(0.15, 100 * (span.end_s - span.begin_s) / length), 3),
                    "told": f"{TOLD[span.doing]}: {format_time_span(span.begin_s)} to {format_time_span(span.end_s)}",
                }
                for span in history.spans
                if span.node == node
            ],
            "marks": [
                _build_mark_position(mark, length) for mark in history.list_marks_of("failure") if mark.node == node
            ],
        }
        for node in ordered
    ] + [
        {
            "node": "",
            "spans": [],
            "marks": [_build_mark_position(m, length) for m in history.list_marks_of("restart", "snapshot", "hang")],
        }
    ]


def _build_mark_position(mark: TimelineMark, length: float) -> dict[str, Any]:
    return {
        "kind": mark.kind,
        "left": round(100 * mark.time_s / length, 3),
        "told": f"{format_time_span(mark.time_s)} {mark.node} {mark.text}",
    }


def _build_event_row(mark: TimelineMark) -> dict[str, str]:
    return {"time": format_time_span(mark.time_s), "kind": mark.kind, "node": mark.node, "text": mark.text}


def build_node_rows(run: RunFacts) -> list[dict[str, str]]:
    """Return the known facts about every node that took part."""
    planned = {node["name"]: node for node in run.plan.get("nodes", [])}
    rows = []
    for node, state in run.history.nodes.items():
        plan = planned.get(node, {})
        slots, first = int(plan.get("slots", 0)), int(plan.get("first_rank", 0))
        ranks = f"{first}–{first + slots - 1}" if slots > 1 else str(first)
        troubles = [mark.text for mark in run.history.marks if mark.node == node and mark.kind in ("failure", "note")]
        rows.append(
            {
                "node": node,
                "address": str(plan.get("address", "took part earlier")),
                "ranks": ranks if slots else "",
                "interface": run.history.interfaces.get(node, ""),
                "state": state,
                "first": str(run.history.failures.get(node, 0) or ""),
                "trouble": "; ".join(dict.fromkeys(troubles)),
            }
        )
    return rows


def describe_metrics(metrics: MetricsTable | None) -> str:
    """Return a sentence about the completeness of the plots, or the reason why there are none."""
    if metrics is None:
        return (
            "This run has no metrics: its job does not train with dtctl.runtime, or ended before the first line of "
            "metrics.jsonl, and its output has no losses with their steps (job.progress names them)."
        )
    if metrics.is_printed:
        return f"Read from the output of the first rank that prints a loss: {format_count(metrics.rows, 'line')}."
    parts = [f"{format_count(metrics.rows, 'line')} of metrics.jsonl"]
    if metrics.stride > 1:
        parts.append(
            "loss, norm of the gradient and mean time of a step: mean, least and greatest of every line; the other "
            f"values: of one line in {metrics.stride}, and every evaluation"
        )
    elif any(curve.low for curve in metrics.curves.values()):
        parts.append("curves are the mean of neighbouring lines, the band their least and greatest")
    if metrics.damaged:
        parts.append(f"{format_count(metrics.damaged, 'damaged line')} left out")
    return "; ".join(parts) + "."


def find_spec_differences(runs: Sequence[RunFacts]) -> list[tuple[str, list[str]]]:
    """Return the keys of the specs in which the runs differ, with the value of each."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [(key, [run.settings.get(key, "–") for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def format_time_span(seconds: float) -> str:
    """Return a time span as text: 7.2 s, 12:34, 3:04:05."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours}:{minutes:02}:{int(seconds) % 60:02}" if hours else f"{minutes}:{int(seconds) % 60:02}"
