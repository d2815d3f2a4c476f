"""Output of `dtctl advise`: the layouts as a table or as a page of bars, and the result of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.advise.advice import Advice
    from dtctl.advise.measure import MemoryMeasurement
    from dtctl.advise.search import EvaluatedLayout, PlanningTask

SHOWN = 7
"""Number of layouts in the table, in addition to the best one."""
PAST = 12
"""Number of letters of a bar that are shown behind the mark."""
COMPUTED = (
    "computed from the model's dimensions, not measured, without other data on the GPU (--measure trains a few steps)"
)
"""Sentence about the model of memory by which `fits` is decided."""
HEADER = ["", "GiB", "states", "activ.", "logits", "temp.", "over", "tok/s/GPU", "memory"]
PARTS = ("states", "activations", "logits", "temporary", "overhead")


def print_recommendation(task: PlanningTask, advice: Advice, *, origin: str = "") -> None:
    """Print the recommendation, its reasons, and a table of the layouts.

    Args:
        task: model, cluster and limits of the search.
        advice: result of the search.
        origin: sentence about the values that come from a spec.
    """
    output.print_stdout(_format_task_title(task))
    if origin:
        output.print_stdout(f"  {origin}")
    if task.model.assumed:
        output.print_stdout(f"  computed with {task.model.assumed}")
    output.print_stdout(f"  {_describe_assumptions(task, advice)}")
    output.print_stdout(_format_best_choice(advice), "bold")
    output.print_stdout(f"  {COMPUTED}", "dim")
    for reason in advice.reasons:
        output.print_stdout(f"  {reason}")
    output.print_stdout("")
    choices = [advice.best, *advice.alternatives[:SHOWN]]
    rows = [_build_choice_row(choice) for choice in choices]
    if output.count_output_columns() < sum(max(len(row[column]) for row in rows) + 2 for column in range(len(HEADER))):
        _show_narrow(rows)
    else:
        output.print_table(rows, header=HEADER)
    output.print_stdout("S states, A activations, L logits, T temporary, O overhead; | usable memory", "dim")


def _show_narrow(rows: Sequence[Sequence[str]]) -> None:
    """Print the table for a narrow terminal, with the figures of a layout below its name."""
    width = max(len(row[-2]) for row in rows)
    for name, gib, *_, speed, memory in rows:
        output.print_stdout(name)
        output.print_stdout(f"  {gib.rjust(6)} GiB  {speed.rjust(width)} tok/s/GPU  {memory.rstrip()}", "dim")


def show_measured(rows: Sequence[MemoryMeasurement]) -> None:
    """Print the memory of short training runs: predicted, measured, and by torch's tracker."""
    output.print_table(
        [
            [
                trial.strategy,
                str(trial.workers),
                f"{trial.predicted / 2**20:.0f}",
                f"{trial.measured / 2**20:.0f}",
                "" if trial.tracked is None else f"{trial.tracked / 2**20:.0f}",
                f"{trial.relative_error:+.1%}",
            ]
            for trial in rows
        ],
        header=["strategy", "workers", "predicted MiB", "measured MiB", "tracked MiB", "off"],
    )
    for reason in dict.fromkeys(trial.untracked for trial in rows if trial.untracked):
        output.print_stderr(f"torch's tracker cannot follow this model: {reason}", "dim")


def write_page(path: Path, task: PlanningTask, advice: Advice) -> None:
    """Write the layouts as a page with bars."""
    import time

    from dtctl.advise.advice import describe_layout
    from dtctl.cli.common.files import write_named
    from dtctl.estimate.memory import GIB
    from dtctl.report.page import StrategyBar, render_advice_page
    from dtctl.report.run import check_out

    rows = [
        StrategyBar(
            label=describe_layout(choice.layout),
            parts=tuple(round(part / GIB, 3) for part in _list_memory_parts(choice)),
            short=0.0 if choice.fits else choice.missing_bytes / GIB,
            speed=choice.speed.tokens_per_s_per_gpu,
        )
        for choice in (advice.best, *advice.alternatives[:SHOWN])
    ]
    text = render_advice_page(
        _format_task_title(task), _format_best_choice(advice), advice.reasons,
        parts=PARTS, rows=rows, budget=advice.best.budget / GIB, now=time.time(),
    )  # fmt: skip
    write_named(check_out(path, option="--plot"), text, option="--plot")
    output.print_stderr(f"wrote {path}")


def _list_memory_parts(choice: EvaluatedLayout) -> tuple[float, ...]:
    """Return the bytes of the parts in `PARTS`."""
    memory = choice.memory
    return memory.states, memory.activations, memory.logits, memory.temporary, memory.overhead


def _format_task_title(task: PlanningTask) -> str:
    model, hardware = task.model, task.hardware
    return (
        f"{model.name}: {model.params / 1e9:.3g}B parameters, {model.layers} blocks, {model.seq} tokens a sample; "
        f"{hardware.gpus} x {hardware.gpu.name} with {hardware.gpu.memory:g} GiB, "
        f"{hardware.nodes} node{'s' if hardware.nodes > 1 else ''}"
    )


def _describe_assumptions(task: PlanningTask, advice: Advice) -> str:
    """Return the number formats and the framework for which the figures were computed."""
    recipe = task.recipe_of(advice.best.layout)
    parts = {"weights": recipe.weight_bytes, "gradients": recipe.gradient_bytes, "fp32 copies": recipe.master_bytes,
             "optimizer": recipe.optimizer_bytes}  # fmt: skip
    bytes_each = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
    text = f"in {task.precision}{' and fp8' if task.fp8 else ''}; bytes of a parameter: {bytes_each}"
    if task.parallel is None:
        return text
    return (
        f"{text}; as FSDP holds a model, or Megatron-LM with tp or pp (a spec, or --framework runtime: dtctl.runtime)"
    )


def _format_best_choice(advice: Advice) -> str:
    from dtctl.advise.advice import describe_layout

    return f"{'use' if advice.best.fits else 'nearest'} {advice.best.strategy}: {describe_layout(advice.best.layout)}"


def _build_choice_row(choice: EvaluatedLayout) -> list[str]:
    from dtctl.advise.advice import describe_layout
    from dtctl.estimate.memory import GIB

    name = (
        describe_layout(choice.layout)
        if choice.fits
        else f"{describe_layout(choice.layout)} (short by {choice.missing_bytes / GIB:.1f})"
    )
    figures = [f"{part / GIB:.1f}" for part in _list_memory_parts(choice)]
    return [
        name,
        f"{choice.memory.total / GIB:.1f}",
        *figures,
        f"{choice.speed.tokens_per_s_per_gpu:.0f}",
        format_memory_bar(choice),
    ]


def format_memory_bar(choice: EvaluatedLayout, width: int = 30) -> str:
    """Return memory as a bar with a letter for each part; a mark shows the usable memory."""
    scale = width / choice.budget
    longest = width + PAST + 1
    parts = dict(zip("SALTO", _list_memory_parts(choice), strict=True))
    segments = "".join(letter * round(min(size * scale, longest)) for letter, size in parts.items())
    return f"{segments[:width]:<{width}}|{segments[width : width + PAST]}{'>' if len(segments) > width + PAST else ''}"
