"""Progress of a run in one line, from the last rows of its metrics."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from dtctl import names
from dtctl.errors import DtctlError
from dtctl.launch.records.metrics_rows import is_number, read_last_rows

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord

PRINTED = "is_printed"
"""Key that marks a row whose figures were read from the output."""


def read_training_steps(record: RunRecord) -> int | None:
    """Return the number of training steps; None if the spec does not have it."""
    from dtctl.launch.run_spec import load_run_spec

    try:
        steps = load_run_spec(record).settings.get("steps")
    except DtctlError:
        return None
    return steps if isinstance(steps, int) else None


def read_newest_metrics(record: RunRecord) -> list[dict[str, Any]]:
    """Return the numbers in the last rows of a run's metrics; without metrics, those that the program has printed."""
    rows = read_last_rows(record.folder / names.METRICS_FILE)
    if not rows:
        return _read_printed(record)
    return [{key: value for key, value in row.items() if isinstance(value, float) or is_number(value)} for row in rows]


def _read_printed(record: RunRecord) -> list[dict[str, Any]]:
    """Return rows with the progress that the program has printed."""
    from dtctl.launch.records.printed_figures import read_figures
    from dtctl.launch.run_spec import load_run_spec

    try:
        pattern = load_run_spec(record).job.progress
    except DtctlError:
        return []
    rows = read_figures(record.folder / names.LOGS_DIR, re.compile(pattern) if pattern is not None else None)
    return [{**row, PRINTED: True} for row in rows]


def format_progress_line(row: dict[str, Any], *, steps: int | None, runs: bool) -> str:
    """Return `step 100 of 400  25%  1:15 to go  250.0 ms/step  4,000 tokens/s`.

    Args:
        row: last row of the metrics.
        steps: number of training steps; None if it is not known.
        runs: whether the run continues, so that the line has a remaining time.
    """
    step, step_s = int(row["step"]), float(row.get("step_s") or "nan")
    steps = steps or int(row.get("steps") or 0)
    facts = [f"step {step:,}"]
    if steps:
        facts[0] += f" of {steps:,}"
    if steps and not row.get(PRINTED):  # a progress bar may be that of one epoch
        facts.append(f"{step / steps:.0%}")
        if runs and math.isfinite(step_s):
            facts.append(f"{format_elapsed_time((steps - step) * step_s)} to go")
    if math.isfinite(step_s):
        facts.append(f"{step_s * 1e3:.1f} ms/step")
    tokens, samples = row.get("tokens_per_s"), row.get("samples_per_s")
    if tokens or samples:
        facts.append(f"{tokens:,.0f} tokens/s" if tokens else f"{samples:,.0f} samples/s")
    return "  ".join(facts)


def format_figure_source(row: dict[str, Any]) -> str:
    """Return the source of a row's figures; empty if it needs no mention."""
    return "  (read from the output)" if row.get(PRINTED) else ""


def format_loss(row: dict[str, Any]) -> str:
    """Return the loss of a row; empty if it has none."""
    if "loss" not in row:
        return ""
    loss = row["loss"]
    return "not a number" if loss is None or math.isnan(loss) else f"{loss:.4f}"


def format_experts_line(row: dict[str, Any]) -> str:
    """Return `experts: 256 tokens each  busiest 1.45 x mean  0.0% idle  2.5% dropped`; empty if the model has none.

    Args:
        row: last row of the metrics.
    """
    load = row.get("expert_load")
    if load is None:
        return ""
    facts = [f"busiest {load:.2f} x mean"]
    if (tokens := row.get("expert_tokens")) is not None:
        facts.insert(0, f"{tokens:,.0f} tokens each")
    for name, key in (("idle", "experts_idle"), ("dropped", "tokens_dropped")):
        if (share := row.get(key)) is not None:
            facts.append(f"{share:.1%} {name}")
    return f"experts: {'  '.join(facts)}"


def format_elapsed_time(seconds: float) -> str:
    """Return a human-readable time span: 0:07, 12:34, 3:04:05."""
    total_s = max(0, int(seconds))
    hours, minutes = divmod(total_s // 60, 60)
    return f"{hours}:{minutes:02}:{total_s % 60:02}" if hours else f"{minutes}:{total_s % 60:02}"
