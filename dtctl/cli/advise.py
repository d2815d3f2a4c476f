"""`dtctl advise`: how to parallelize a training, judged by memory and speed."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.errors import PlanError, UsageError

if TYPE_CHECKING:
    from dtctl.advise.advice import Advice
    from dtctl.advise.search import Choice, Task
    from dtctl.spec.model import Spec

SHOWN = 7
"""Choices in the table besides the best one."""
PAST = 12
"""Letters of a bar that are shown past the mark."""
COMPUTED = (
    "computed from the model's dimensions, not run: what else is on the GPU, and what the program keeps, is not in it "
    "(--measure trains a few steps)"
)
"""What `fits` is an answer to."""
PARTS = ("states", "activations", "logits", "temporary", "overhead")


class PrecisionName(str, Enum):
    """Number formats."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class FrameworkName(str, Enum):
    """Frameworks whose way to hold a model is known; those of `dtctl.estimate.frameworks`."""

    runtime = "runtime"
    fsdp = "fsdp"
    megatron = "megatron"
    deepspeed = "deepspeed"
    internevo = "internevo"
    accelerate = "accelerate"
    pure = "pure"


class OptimizerName(str, Enum):
    """Optimizers of dtctl.runtime."""

    adamw = "adamw"
    sgd = "sgd"


class RecomputeName(str, Enum):
    """What is computed again in the backward pass."""

    none = "none"
    selective = "selective"
    full = "full"


def advise(
    spec: Annotated[Path | None, typer.Argument(help="The spec. Default: ./dtctl.yaml, if it exists.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A config.json in Hugging Face's format.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODULE:FACTORY", help="A model of your own, built on the meta device."),
    ] = None,
    params: Annotated[str | None, typer.Option("--params", help="Parameters: 7B.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Blocks.")] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", help="Width.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Heads of keys and values.")] = None,
    ffn: Annotated[int | None, typer.Option("--ffn", help="Inner width of the feed-forward network.")] = None,
    gated: Annotated[bool, typer.Option("--gated", help="The feed-forward network has a gate (SwiGLU).")] = False,
    vocab: Annotated[int | None, typer.Option("--vocab", help="Size of the vocabulary.")] = None,
    experts: Annotated[int | None, typer.Option("--experts", help="Experts of a block, two of them used.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens of a sample.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Samples of a step, over all GPUs.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs of all nodes.")] = None,
    per_node: Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs of a node.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="H100, A100, ...")] = None,
    gpu_memory: Annotated[str | None, typer.Option("--gpu-memory", help="80GiB; the GPU's own otherwise.")] = None,
    network: Annotated[
        str | None, typer.Option("--network", help="Between nodes: ethernet-100, ndr-8, ... or GB/s of a node.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option("--host-memory", help="Memory of a node, for offloading. Default: twice that of its GPUs."),
    ] = None,
    precision: Annotated[
        PrecisionName | None,
        typer.Option("--precision", help="Number format. Default: the spec's, else bf16, or fp16 where GPUs lack it."),
    ] = None,
    optimizer: Annotated[
        OptimizerName | None, typer.Option("--optimizer", help="Default: the spec's, else adamw.")
    ] = None,
    states: Annotated[
        str | None,
        typer.Option("--states", metavar="fp32|bf16", help="bf16: weights, gradients and moments in bf16 alone."),
    ] = None,
    framework: Annotated[
        FrameworkName | None,
        typer.Option(
            "--framework",
            help="What trains, as far as memory and time depend on it. Default: runtime with a spec, else fsdp, and "
            "megatron where there is tp or pp.",
        ),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Blocks are compiled.")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Matrix products in fp8.")] = False,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            help="Price this mesh only: dp=2,fsdp=8,tp=4,cp=1,pp=1 (one degree may be -1), or a strategy's name.",
        ),
    ] = None,
    zero: Annotated[
        int | None, typer.Option("--zero", min=0, max=2, help="Stage of ZeRO over dp; stage 3 is the axis fsdp.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Samples of a GPU and pass.")] = None,
    accumulate: Annotated[int | None, typer.Option("--accumulate", help="Passes of a step.")] = None,
    recompute: Annotated[
        RecomputeName | None, typer.Option("--recompute", help="Activations that are computed again.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option("--stages-per-worker", help="More than 1: an interleaved pipeline.")
    ] = None,
    offload: Annotated[bool | None, typer.Option("--offload/--no-offload", help="Shards in the host's memory.")] = None,
    beyond: Annotated[
        bool,
        typer.Option(
            "--beyond",
            help="Try expert parallelism, and context parallelism in pipelines: `--write` cannot express them.",
        ),
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the recommendation into the spec.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.html", help="A page with the memory of the choices as bars.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Train a few steps on this machine: memory predicted, measured, and by torch's tracker."
        ),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Recommend how to parallelize a training: memory by part, speed, the best choice and why, what does not fit.

    Searched are data, sharded (fsdp), tensor, pipeline and context parallelism (cp), recomputation, offloading and the
    micro batch; --mesh and the options after it price what you name.
    """
    from dtctl.advise.gather import AdviseOptions, task

    path = _path(spec, write=write)
    loaded = _loaded(path, required=spec is not None or write)
    request = task(
        AdviseOptions(
            config=config, module=model, params=params, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
            ffn=ffn, gated=gated, vocab=vocab, experts=experts, seq=seq, batch=batch, gpus=gpus, per_node=per_node,
            gpu=gpu, gpu_memory=gpu_memory, network=network, host_memory=host_memory,
            precision=precision.value if precision else None, optimizer=optimizer.value if optimizer else None,
            states=states, framework=framework.value if framework else None, compiled=compiled, fp8=fp8, mesh=mesh,
            zero=zero, micro_batch=micro_batch, accumulate=accumulate,
            recompute=recompute.value if recompute else None, chunks=stages, offload=offload, beyond=beyond,
        ),
        loaded,
    )  # fmt: skip
    if measure:
        return _measure(request, model, json_lines=json_)
    return _recommend(request, path, write=write, plot=plot, json_lines=json_)


def _recommend(task: Task, path: Path, *, write: bool, plot: Path | None, json_lines: bool) -> int:
    """Search, show, and write into the spec if that is wanted; the exit code."""
    from dtctl.advise.advice import advise as advised
    from dtctl.advise.advice import as_json, model_json

    advice = advised(task)
    if json_lines:
        output.emit_json(
            {
                "model": model_json(task.model),
                "recommendation": as_json(advice.best, advice.reasons),
                "alternatives": [as_json(choice) for choice in advice.alternatives],
                "written": as_json(advice.written) if advice.written is not None else None,
                "tried": advice.evaluated,
                "basis": COMPUTED,
            }
        )
    else:
        _show(task, advice)
    for doubt in task.model.doubts:
        output.err(f"warning: {doubt}", "yellow")
    if plot is not None:
        _plot(plot, task, advice)
    if write and advice.best.fits:
        _write(path, task, advice)
    return 0 if advice.best.fits else PlanError.exit_code


def _measure(task: Task, module: str | None, *, json_lines: bool) -> int:
    """Train a few steps with ddp and fsdp on 1, 2 and 4 workers, as far as there are GPUs, and show both figures."""
    from dtctl.advise.measure import measure

    rows = []
    for strategy in ("ddp", "fsdp"):
        for workers in (count for count in (1, 2, 4) if count <= task.hardware.gpus):
            output.err(f"{strategy} on {workers} ...", "dim")
            rows.append(measure(task.model, strategy=strategy, workers=workers, module=module))
    if json_lines:
        output.emit_json(
            {
                "measured": [
                    {"strategy": trial.strategy, "workers": trial.workers,
                     "predicted_mib": round(trial.predicted / 2**20, 1),
                     "measured_mib": round(trial.measured / 2**20, 1), "off": round(trial.off, 4),
                     "tracked_mib": None if trial.tracked is None else round(trial.tracked / 2**20, 1),
                     "untracked": trial.untracked}
                    for trial in rows
                ]
            }
        )  # fmt: skip
        return 0
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
    return 0


def _path(spec: Path | None, *, write: bool) -> Path:
    path = spec or Path(names.SPEC_FILE)
    if write and str(path) == "-":
        raise UsageError("a spec read from standard input cannot be written back", hint="name the spec's file")
    return path / names.SPEC_FILE if path.is_dir() else path


def _loaded(path: Path, *, required: bool) -> Spec | None:
    if not required and not path.is_file():
        return None
    from dtctl.spec.load import load_spec

    return load_spec(path)


def _write(path: Path, task: Task, advice: Advice) -> None:
    from dtctl.advise.advice import settings
    from dtctl.advise.write import as_yaml, write

    changed = settings(task, advice.best)
    write(path, changed)
    output.err(f"{path}: train: {', '.join(f'{key}: {as_yaml(value)}' for key, value in changed.items())}")


def _plot(path: Path, task: Task, advice: Advice) -> None:
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
    """Number format and framework: what the figures were computed for."""
    recipe = task.recipe_of(advice.best.layout)
    parts = {"weights": recipe.weight_bytes, "gradients": recipe.gradient_bytes, "fp32 copies": recipe.master_bytes,
             "optimizer": recipe.optimizer_bytes}  # fmt: skip
    bytes_each = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
    said = f"in {task.precision}{' and fp8' if task.fp8 else ''}; bytes of a parameter: {bytes_each}"
    if task.parallel is None:
        return said
    return (
        f"{said}; as FSDP holds a model, or Megatron-LM with tp or pp (a spec, or --framework runtime: dtctl.runtime)"
    )


def _verdict(advice: Advice) -> str:
    from dtctl.advise.advice import described

    return f"{'use' if advice.best.fits else 'nearest'} {advice.best.strategy}: {described(advice.best.layout)}"


def _show(task: Task, advice: Advice) -> None:
    output.out(_title(task))
    if task.model.assumed:
        output.out(f"  computed with {task.model.assumed}")
    output.out(f"  {_how(task, advice)}")
    output.out(_verdict(advice), "bold")
    output.out(f"  {COMPUTED}", "dim")
    for reason in advice.reasons:
        output.out(f"  {reason}")
    output.out("")
    choices = [advice.best, *advice.alternatives[:SHOWN]]
    output.table(
        [_row(choice) for choice in choices],
        header=["", "GiB", "states", "activ.", "logits", "temp.", "over", "tok/s/GPU", "memory"],
    )
    output.out("memory: S states, A activations, L logits, T temporary, O overhead; | marks the usable memory", "dim")


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
