"""`dtctl launch --sweep KEY=A,B`: a run for each combination of values, one after another or as an array of Slurm."""

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
    from dtctl.spec.model import Spec

MOST_RUNS = 1000
STOPPED = (130, 143)
"""Exit codes of a run after which the sweep ends."""


def parse_sweep(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return the settings of each run in the order of the launches; the last key changes fastest.

    Args:
        texts: values of `--sweep` such as `KEY=A,B`; commas in brackets and quotes do not separate.

    Raises:
        UsageError: a text has another form, a key appears twice, or there would be too many runs.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        key, equals, rest = text.partition("=")
        if not key or not equals or not rest:
            raise UsageError(f"--sweep {text}: expected KEY=A,B", hint="dtctl launch --sweep train.lr=1e-3,3e-3")
        if key in values:
            raise UsageError(f"--sweep has {key} twice", hint=f"--sweep {key}=A,B,C")
        values[key] = _split_sweep_values(rest)
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    if len(rows) > MOST_RUNS:
        raise UsageError(f"these are {len(rows):,} runs; at most {MOST_RUNS:,} are launched one after another")
    return rows


def _split_sweep_values(text: str) -> list[str]:
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
    """Launch a run for each row of settings, one after another; return the first exit code that is not 0.

    Args:
        options: options of all runs.
        rows: settings of each run, as key -> value.
        dry: whether to print only the runs, and the files that the first one would send.

    Raises:
        DtctlError: a run cannot be launched; earlier runs have ended by themselves.
        UsageError: an option cannot be combined with a sweep.
    """
    from dtctl.cli.common.launch_steps import show_dry_launch

    if options.resume is not None:
        raise UsageError("--sweep launches new runs, and --resume continues one")
    runs, specs = _plan_sweep_runs(options, rows)
    if any(spec.cluster.transport == "slurm" for spec in specs):
        return _launch_array_sweep(options, runs, specs, dry=dry)
    if options.detach:
        raise UsageError("--sweep launches one run after another, which --detach does not")
    if dry:
        if not options.json_lines:
            show_sweep(runs, {})
        return show_dry_launch(runs[0], None)
    codes = _launch_in_turn(runs)
    if not options.json_lines:
        show_sweep(runs, codes)
    return next((code for code in codes.values() if code), 0)


def _plan_sweep_runs(options: LaunchOptions, rows: Sequence[dict[str, str]]) -> tuple[list[LaunchOptions], list[Spec]]:
    """Return the options and the spec of each run; a wrong value is an error now, not after the runs before it."""
    from dtctl.cli.common.launch_steps import load_launch_spec
    from dtctl.launch.records.record import check_run_name, make_run_id

    runs, specs = [], []
    for number, settings in enumerate(rows, 1):
        overrides = tuple(f"{key}={value}" for key, value in settings.items())
        run = replace(options, overrides=(*options.overrides, *overrides), sweep=settings)
        spec = load_launch_spec(run)
        name = f"{options.name}-{number}" if options.name else make_run_id(spec.job.name, now=time.time())
        runs.append(replace(run, name=check_run_name(name)))
        specs.append(spec)
    return runs, specs


def _launch_in_turn(runs: Sequence[LaunchOptions]) -> dict[str, int]:
    """Launch each run after the end of the one before it; return name -> exit code of those that were launched."""
    from dtctl.cli.common.launch_steps import run_real_launch

    codes: dict[str, int] = {}
    for number, run in enumerate(runs):
        settings = ", ".join(f"{key}={value}" for key, value in run.sweep.items())
        output.print_stderr(f"run {number + 1} of {len(runs)}: {settings}", "bold")
        is_first = number == 0
        try:
            code = run_real_launch(run if is_first else replace(run, begun=time.monotonic()))
        except DtctlError as exc:
            if is_first:
                raise
            output.print_error_with_hint(exc)
            code = exc.exit_code
        codes[run.name or ""] = code
        if code in STOPPED:
            break
    return codes


def _launch_array_sweep(
    options: LaunchOptions, runs: Sequence[LaunchOptions], specs: Sequence[Spec], *, dry: bool
) -> int:
    """Submit all runs as one array of Slurm, which decides how many of them run at the same time.

    Raises:
        UsageError: the spec requests an array itself.
        PlanError: one array cannot have tasks with these settings.
    """
    from dtctl.cli.common.agreement import require_spec_agreement
    from dtctl.cli.common.launch_steps import show_dry_launch
    from dtctl.cli.common.slurm_runs import launch_array
    from dtctl.launch.records.record import check_run_name, make_run_id
    from dtctl.spec.model import Slurm

    first = specs[0]
    if any(spec.slurm is not None and spec.slurm.array is not None for spec in specs):
        raise UsageError(
            "--sweep makes an array, but the spec has one already (slurm.array)", where=first.written_at("slurm.array")
        )
    array = f"1-{len(runs)}"  # the same numbers as in the names of runs without Slurm
    if dry:
        if not options.json_lines:
            show_sweep([replace(one, name=f"task {number}") for number, one in enumerate(runs, 1)], {})
        return show_dry_launch(
            replace(runs[0], name=options.name, overrides=(*runs[0].overrides, f"slurm.array={array}")), None
        )
    tasks = {
        number: spec.model_copy(update={"slurm": (spec.slurm or Slurm()).model_copy(update={"array": array})})
        for number, spec in enumerate(specs, 1)
    }
    require_spec_agreement(tasks[1], yes=options.yes, launching=True)
    run = check_run_name(options.name) if options.name else make_run_id(first.job.name, now=time.time())
    return launch_array(
        tasks, run, spec_name=options.spec_name, json_lines=options.json_lines,
        sweep={number: one.sweep for number, one in enumerate(runs, 1)},
    )  # fmt: skip


def show_sweep(runs: Sequence[LaunchOptions], codes: dict[str, int]) -> None:
    """Print the settings of all runs next to their results."""
    from dtctl.cli.common.progress_line import format_loss, read_newest_metrics
    from dtctl.launch.records.record import RunRecord

    rows = []
    for one in runs:
        name = one.name or ""
        base = Path(one.spec).parent if one.spec is not None and str(one.spec) != "-" else Path()
        logged = read_newest_metrics(RunRecord(base / names.STATE_DIR / names.RUNS_DIR / name))
        newest = logged[-1] if logged else {}
        status = "not launched"
        if name in codes:
            status = f"exit code {codes[name]}" if codes[name] else "succeeded"
        step = f"{newest['step']:.0f}" if newest else ""
        rows.append([name, *one.sweep.values(), status, step, format_loss(newest)])
    output.print_table(rows, header=["RUN", *runs[0].sweep, "STATUS", "STEP", "LOSS"])
