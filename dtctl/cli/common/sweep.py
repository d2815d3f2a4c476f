"""`dtctl launch --sweep KEY=A,B`: one run after another, for each combination of values."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtctl import names
from dtctl.cli import output
from dtctl.errors import DtctlError, UsageError

if TYPE_CHECKING:
    from dtctl.cli.common.launch_steps import LaunchOptions

MOST_RUNS = 1000
STOPPED = (130, 143)
"""Exit codes after which no further run begins."""


def parse_sweep(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return the settings of each run, in the order in which they are launched: the last key changes fastest.

    Args:
        texts: `KEY=A,B` each; commas in brackets and quotes do not separate.

    Raises:
        UsageError: one is something else, a key stands twice, or there would be too many runs.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        key, equals, rest = text.partition("=")
        if not key or not equals or not rest:
            raise UsageError(f"--sweep {text}: expected KEY=A,B", hint="dtctl launch --sweep train.lr=1e-3,3e-3")
        if key in values:
            raise UsageError(f"--sweep has {key} twice", hint=f"--sweep {key}=A,B,C")
        values[key] = _split(rest)
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    if len(rows) > MOST_RUNS:
        raise UsageError(f"these are {len(rows):,} runs; at most {MOST_RUNS:,} are launched one after another")
    return rows


def _split(text: str) -> list[str]:
    """Return the parts between commas that are neither in brackets nor in quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (character in "[{") - (character in "]}") if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def launch_sweep(options: LaunchOptions, rows: Sequence[dict[str, str]], *, dry: bool = False) -> int:
    """Launch a run for each row of settings, one after another; the first exit code that is not 0.

    Args:
        options: of all runs.
        rows: key -> value, for each run.
        dry: whether to show the runs alone, and what the first one would send.

    Raises:
        DtctlError: a run cannot be launched; those before it were.
        UsageError: the options do not go together with a sweep.
    """
    from dtctl.cli.common.launch_steps import dry_launch, real_launch, spec_of
    from dtctl.launch.records.record import check_run_name, new_run_id

    if options.detach or options.resume is not None:
        raise UsageError("--sweep launches one run after another, which neither --detach nor --resume does")
    runs = []
    for number, settings in enumerate(rows):
        overrides = tuple(f"{key}={value}" for key, value in settings.items())
        one = replace(options, overrides=(*options.overrides, *overrides), sweep=settings)
        spec = spec_of(one)  # a wrong value is found now, and not after the runs before it
        if spec.cluster.transport == "slurm":
            raise UsageError(
                "--sweep does not go with Slurm, whose jobs wait each for itself",
                hint="submit each with --set and --detach, or use `slurm.array`",
            )
        name = f"{options.name}-{number + 1}" if options.name else new_run_id(spec.job.name, now=time.time())
        runs.append(replace(one, name=check_run_name(name)))
    if dry:
        if not options.json_lines:
            show_sweep(runs, {})
        return dry_launch(runs[0], None)
    codes: dict[str, int] = {}
    for number, one in enumerate(runs):
        shown = ", ".join(f"{key}={value}" for key, value in one.sweep.items())
        output.err(f"run {number + 1} of {len(runs)}: {shown}", "bold")
        try:
            codes[one.name or ""] = real_launch(replace(one, started=time.time()) if number else one)
        except DtctlError as exc:
            if number == 0:
                raise
            output.error(exc)
            codes[one.name or ""] = exc.exit_code
        if codes[one.name or ""] in STOPPED:
            break
    if not options.json_lines:
        show_sweep(runs, codes)
    return next((code for code in codes.values() if code), 0)


def show_sweep(runs: Sequence[LaunchOptions], codes: dict[str, int]) -> None:
    """Print the settings of all runs next to their results."""
    from dtctl.cli.common.progress_line import loss_text, metrics_of
    from dtctl.launch.records.record import RunRecord

    rows = []
    for one in runs:
        name = one.name or ""
        base = Path(one.spec).parent if one.spec is not None and str(one.spec) != "-" else Path()
        logged = metrics_of(RunRecord(base / names.STATE_DIR / names.RUNS_DIR / name))
        newest = logged[-1] if logged else {}
        code = codes.get(name)
        status = "not launched" if code is None else "succeeded" if code == 0 else f"exit code {code}"
        step = f"{newest['step']:.0f}" if newest else ""
        rows.append([name, *one.sweep.values(), status, step, loss_text(newest)])
    output.table(rows, header=["RUN", *runs[0].sweep, "STATUS", "STEP", "LOSS"])
