"""Output of `dtctl advise`: the choices as a table or as a page of bars, and the result of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.advise.advice import Advice
    from dtctl.advise.measure import Measured
    from dtctl.advise.search import Choice, Task

SHOWN = 7
"""Choices in the table besides the best one."""
PAST = 12
"""Letters of a bar that are shown past the mark."""
COMPUTED = (
    "computed from the model's dimensions, not run: what else is on the GPU, and what the program keeps, is not in it "
    "(--measure trains a few steps)"
)
"""Model for which `fits` is an answer."""
HEADER = ["", "GiB", "states", "activ.", "logits", "temp.", "over", "tok/s/GPU", "memory"]
PARTS = ("states", "activations", "logits", "temporary", "overhead")


def show(task: Task, advice: Advice, *, origin: str = "") -> None:
    """The recommendation, why, and a table of the choices.

    Args:
        task: what was asked.
        advice: the answer.
        origin: what was taken from a spec, and from which.
    """
    output.out(_title(task))
    if origin:
        output.out(f"  {origin}")
    if task.model.assumed:
        output.out(f"  computed with {task.model.assumed}")
    output.out(f"  {_how(task, advice)}")
    output.out(_verdict(advice), "bold")
    output.out(f"  {COMPUTED}", "dim")
    for reason in advice.reasons:
        output.out(f"  {reason}")
    output.out("")
    choices = [advice.best, *advice.alternatives[:SHOWN]]
    rows = [_row(choice) for choice in choices]
    if output.columns() < sum(max(len(row[column]) for row in rows) + 2 for column in range(len(HEADER))):
        _show_narrow(rows)
    else:
        output.table(rows, header=HEADER)
    output.out("S states, A activations, L logits, T temporary, O overhead; | usable memory", "dim")


def _show_narrow(rows: Sequence[Sequence[str]]) -> None:
    """The table where a terminal has no room for all of it: the figures of a choice below its name."""
    width = max(len(row[-2]) for row in rows)
    for name, gib, *_, speed, memory in rows:
        output.out(name)
        output.out(f"  {gib.rjust(6)} GiB  {speed.rjust(width)} tok/s/GPU  {memory.rstrip()}", "dim")


def show_measured(rows: Sequence[Measured]) -> None:
    """Memory of short trainings: predicted, measured, and by torch's tracker."""
    output.table(
        [
            [
                trial.strategy,
                str(trial.workers),
                f"{trial.predicted / 2**20:.0f}",
                f"{trial.measured / 2**20:.0f}",
                "" if trial.tracked is None else f"{trial.tracked / 2**20:.0f}",
                f"{trial.off:+.1%}",
            ]
            for trial in rows
        ],
        header=["strategy", "workers", "predicted MiB", "measured MiB", "tracked MiB", "off"],
    )
    for reason in dict.fromkeys(trial.untracked for trial in rows if trial.untracked):
        output.err(f"torch's tracker cannot follow this model: {reason}", "dim")


def write_page(path: Path, task: Task, advice: Advice) -> None:
    """Write the choices as a page of bars."""
    import time

    from dtctl.advise.advice import described
    from dtctl.cli.common.files import write_named
    from dtctl.estimate.memory import GIB
    from dtctl.report.page import Bar, advice_page
    from dtctl.report.run import check_out

    rows = [
        Bar(
            label=described(choice.layout),
            parts=tuple(round(part / GIB, 3) for part in _parts(choice)),
            short=0.0 if choice.fits else choice.short / GIB,
            speed=choice.speed.tokens_per_s_per_gpu,
        )
        for choice in (advice.best, *advice.alternatives[:SHOWN])
    ]
    text = advice_page(
        _title(task), _verdict(advice), advice.reasons, parts=PARTS, rows=rows, budget=advice.best.budget / GIB,
        now=time.time(),
    )  # fmt: skip
    write_named(check_out(path, option="--plot"), text, option="--plot")
    output.err(f"wrote {path}")


def _parts(choice: Choice) -> tuple[float, ...]:
    """Bytes, as `PARTS` names them."""
    memory = choice.memory
    return memory.states, memory.activations, memory.logits, memory.temporary, memory.overhead


def _title(task: Task) -> str:
    model, hardware = task.model, task.hardware
    return (
        f"{model.name}: {model.params / 1e9:.3g}B parameters, {model.layers} blocks, {model.seq} tokens a sample; "
        f"{hardware.gpus} x {hardware.gpu.name} with {hardware.gpu.memory:g} GiB, "
        f"{hardware.nodes} node{'s' if hardware.nodes > 1 else ''}"
    )


def _how(task: Task, advice: Advice) -> str:
    """Return number format and framework: what the figures were computed for."""
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


def _verdict(advice: Advice) -> str:
    from dtctl.advise.advice import described

    return f"{'use' if advice.best.fits else 'nearest'} {advice.best.strategy}: {described(advice.best.layout)}"


def _row(choice: Choice) -> list[str]:
    from dtctl.advise.advice import described
    from dtctl.estimate.memory import GIB

    name = (
        described(choice.layout) if choice.fits else f"{described(choice.layout)} (short by {choice.short / GIB:.1f})"
    )
    figures = [f"{part / GIB:.1f}" for part in _parts(choice)]
    return [name, f"{choice.memory.total / GIB:.1f}", *figures, f"{choice.speed.tokens_per_s_per_gpu:.0f}", bar(choice)]


def bar(choice: Choice, width: int = 30) -> str:
    """Memory as a bar: a letter for each part, up to the mark what can be used."""
    scale = width / choice.budget
    longest = width + PAST + 1
    parts = dict(zip("SALTO", _parts(choice), strict=True))
    segments = "".join(letter * round(min(size * scale, longest)) for letter, size in parts.items())
    return f"{segments[:width]:<{width}}|{segments[width : width + PAST]}{'>' if len(segments) > width + PAST else ''}"
