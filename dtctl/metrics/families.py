"""The figures of a run by name: what `/metrics` shows. Pure.

Names follow Prometheus: base units, `_total` for what only grows. Every sample has the label `run`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import dtctl
from dtctl.launch.records.ledger import PHASES
from dtctl.metrics.follow import RunFigures

STATUSES: Final = ("queued", "starting", "running", "stopping", "succeeded", "failed", "stopped")
NODE_STATES: Final = ("connecting", "connected", "hello", "pushing", "pushed", "ready", "started", "running", "away",
                      "stopped", "lost", "failed")  # fmt: skip
RULES: Final = ("no-step", "loss-not-finite", "restart", "throughput")
_ROW: Final = {
    "loss": ("dtctl_loss", "Loss of the newest logged step; NaN where it is not finite."),
    "lr": ("dtctl_learning_rate", "Learning rate of the newest logged step."),
    "grad_norm": ("dtctl_grad_norm", "2-norm of the gradient before clipping, of the newest logged step."),
    "step_s": ("dtctl_step_seconds", "Mean time of a step since the logged step before."),
    "samples_per_s": ("dtctl_samples_per_second", "Samples per second of all workers."),
    "tokens_per_s": ("dtctl_tokens_per_second", "Tokens per second of all workers."),
}
_NO_VALUE: Final = ("step", "time")
"""Keys of a row that are not metrics of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """All samples of one name."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: tuple[tuple[Mapping[str, str], float], ...]
    """Labels in addition to `run`, and the value."""


def build_metric_families(figures: RunFigures) -> Iterator[MetricFamily]:
    """Return all families of a run; figures that are not known yet are left out."""
    yield from _build_run_families(figures)
    yield from _build_node_families(figures)
    yield from _of_training(figures)
    yield from _of_ledger(figures)


def _build_gauge(name: str, text: str, *samples: tuple[Mapping[str, str], float | None]) -> Iterator[MetricFamily]:
    yield from _build_family("gauge", name, text, samples)


def _build_counter(name: str, text: str, *samples: tuple[Mapping[str, str], float | None]) -> Iterator[MetricFamily]:
    yield from _build_family("counter", name, text, samples)


def _build_family(
    kind: Literal["gauge", "counter"], name: str, text: str, samples: tuple[tuple[Mapping[str, str], float | None], ...]
) -> Iterator[MetricFamily]:
    known = tuple((labels, float(value)) for labels, value in samples if value is not None)
    if known:
        yield MetricFamily(name=name, kind=kind, help=text, samples=known)


def _build_run_families(figures: RunFigures) -> Iterator[MetricFamily]:
    progress, plan = figures.progress, figures.plan
    info = {
        "version": dtctl.__version__,
        "kind": plan.kind if plan else "",
        "slurm_job": progress.job.job if progress.job else "",
    }
    yield from _build_gauge(
        "dtctl_run_info", "Facts about the run; slurm_job: id of its job, if it is one of Slurm.", (info, 1)
    )
    statuses = [({"status": status}, progress.status == status) for status in STATUSES]
    yield from _build_gauge("dtctl_run_status", "1 for the status that the run has.", *statuses)
    yield from _build_gauge("dtctl_start_time_seconds", "When the run began, since the epoch.", ({}, figures.started))
    yield from _build_gauge("dtctl_last_event_time_seconds", "When the newest event happened.", ({}, progress.last))
    yield from _build_gauge("dtctl_workers", "Workers of the run.", ({}, plan.world_size if plan else None))
    yield from _build_gauge(
        "dtctl_launch_seconds", "From the launcher's start to all workers started.", ({}, progress.launch_s)
    )
    yield from _build_counter("dtctl_attempts_total", "Attempts that were started.", ({}, progress.attempt + 1))
    yield from _build_counter("dtctl_restarts_total", "Restarts of all workers.", ({}, len(progress.restarts)))
    yield from _build_counter("dtctl_hangs_total", "How often the run has hung.", ({}, figures.hangs))
    yield from _build_counter("dtctl_snapshots_total", "Snapshots that were begun.", ({}, figures.snapshots))
    firing = Counter("restart" if alert.startswith("restart-") else alert for alert in progress.alerts)
    rules = [({"alert": rule}, firing[rule]) for rule in RULES]
    yield from _build_gauge("dtctl_alerts_firing", "Alerts of metrics.alerts that are firing.", *rules)


def _build_node_families(figures: RunFigures) -> Iterator[MetricFamily]:
    progress = figures.progress
    states = Counter(progress.nodes.values())
    counts = [({"state": state}, states[state]) for state in NODE_STATES]
    yield from _build_gauge("dtctl_nodes", "Nodes in each state.", *counts)
    running = [({"node": node}, state == "running") for node, state in sorted(progress.nodes.items())]
    yield from _build_gauge("dtctl_node_running", "1 while the workers of the node run.", *running)
    failures = [({"node": node}, figures.failures[node]) for node in sorted(progress.all_nodes)]
    yield from _build_counter(
        "dtctl_worker_failures_total",
        "Workers and agents that failed, without those that were stopped because of it.",
        *failures,
    )


def _of_training(figures: RunFigures) -> Iterator[MetricFamily]:
    yield from _build_gauge("dtctl_step", "Optimizer steps done.", ({}, figures.step))
    yield from _build_gauge(
        "dtctl_last_step_time_seconds", "Time of the last completed step, since the epoch.", ({}, figures.stepped)
    )
    yield from _build_gauge("dtctl_snapshot_step", "Step of the newest snapshot.", ({}, figures.snapshot_step))
    row = figures.row
    for key, (name, text) in _ROW.items():
        if key in row:
            value = row[key]
            # A null number of tokens means that samples have no tokens; a null loss means that it was not finite.
            yield from _build_gauge(
                name, text, ({}, math.nan if value is None and key in ("loss", "grad_norm") else value)
            )
    others = [({"name": key}, value) for key, value in row.items() if key not in _ROW and key not in _NO_VALUE]
    yield from _build_gauge(
        "dtctl_logged", "Other values of the newest logged step, by their keys in metrics.jsonl.", *others
    )


def _of_ledger(figures: RunFigures) -> Iterator[MetricFamily]:
    ledger = figures.ledger
    phases = ledger.phases_s
    spent = [({"phase": phase}, phases.get(phase)) for phase in PHASES]
    # These are gauges and not counters: useful time decreases when a step has to be repeated.
    yield from _build_gauge("dtctl_phase_seconds", "Time by phase; the phases add up to the time of the run.", *spent)
    yield from _build_gauge(
        "dtctl_goodput_ratio", "Share of the time that was spent on steps that count.", ({}, ledger.goodput)
    )
    yield from _build_gauge("dtctl_steps_lost", "Steps that had to be repeated.", ({}, ledger.steps_lost))


def format_prometheus_text(found: Iterator[MetricFamily], run: str) -> str:
    """Return the families in Prometheus' text format, version 0.0.4."""
    lines = []
    for family in found:
        lines += [f"# HELP {family.name} {_escape_metric_text(family.help)}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in family.samples:
            pairs = ",".join(
                f'{name}="{_escape_metric_text(text, quotes=True)}"' for name, text in {"run": run, **labels}.items()
            )
            lines.append(f"{family.name}{{{pairs}}} {_format_sample_value(value)}")
    return "\n".join(lines) + "\n"


def _escape_metric_text(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _format_sample_value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    is_exact_integer = value.is_integer() and abs(value) < 1 << 53
    return repr(int(value)) if is_exact_integer else repr(value)
