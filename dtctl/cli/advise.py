"""`dtctl advise`: how to parallelize a training run, judged by memory and speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common import advise_options as options
from dtctl.cli.common import advise_view as view
from dtctl.errors import PlanError, UsageError

if TYPE_CHECKING:
    from dtctl.advise.advice import Advice
    from dtctl.advise.search import PlanningTask
    from dtctl.spec.model import Spec


def advise(
    spec: options.SpecPath = None,
    config: options.ConfigFile = None,
    model: options.ModelFactory = None,
    params: options.Params = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    kv_heads: options.KvHeads = None,
    ffn: options.Ffn = None,
    gated: options.Gated = False,
    vocab: options.Vocab = None,
    experts: options.Experts = None,
    seq: options.Seq = None,
    batch: options.Batch = None,
    gpus: options.Gpus = None,
    per_node: options.PerNode = None,
    gpu: options.GpuName = None,
    gpu_memory: options.GpuMemory = None,
    network: options.Network = None,
    host_memory: options.HostMemory = None,
    precision: options.Precision = None,
    optimizer: options.Optimizer = None,
    states: options.States = None,
    framework: options.Framework = None,
    compiled: options.Compiled = False,
    fp8: options.Fp8 = False,
    mesh: options.Mesh = None,
    zero: options.Zero = None,
    micro_batch: options.MicroBatch = None,
    accumulate: options.Accumulate = None,
    recompute: options.Recompute = None,
    stages: options.Stages = None,
    offload: options.Offload = None,
    beyond: options.Beyond = False,
    write: options.Write = False,
    plot: options.Plot = None,
    measure: options.Measure = False,
    json_: options.Json = False,
) -> int:
    """Recommend how to parallelize a training: memory by part, speed, the best choice and why, what does not fit.

    Searched are data, sharded (fsdp), tensor, pipeline, context (cp) and expert parallelism (ep), recomputation,
    offloading and the micro batch; --mesh and the options after it price what you name.
    """
    from dtctl.advise.gather import AdviseOptions, build_advise_task

    path = _resolve_spec_path(spec, write=write)
    loaded = _load_optional_spec(path, required=spec is not None or write)
    request = build_advise_task(
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
        return _measure_strategies(request, model, json_lines=json_)
    origin = _describe_spec_hardware(path, request, gpus=gpus, per_node=per_node) if loaded is not None else ""
    if gpu is None:
        origin += f"{'; ' if origin else ''}no GPU type is given, so {request.hardware.gpu.name} is assumed (--gpu)"
    return _search_and_recommend(request, path, origin=origin, write=write, plot=plot, json_lines=json_)


def _describe_spec_hardware(path: Path, task: PlanningTask, *, gpus: int | None, per_node: int | None) -> str:
    """Return the figures of the machines that come from the spec, and the options that override them."""
    parts = []
    if per_node is None:
        parts.append(
            f"{task.hardware.per_node} GPU{'s' if task.hardware.per_node > 1 else ''} a node (--gpus-per-node)"
        )
    if gpus is None:
        parts.append(f"{task.hardware.gpus} of all nodes (--gpus)")
    return f"from {path}: {', '.join(parts)}" if parts else ""


def _search_and_recommend(
    task: PlanningTask, path: Path, *, origin: str, write: bool, plot: Path | None, json_lines: bool
) -> int:
    """Search for layouts, print the result, and write it into the spec if requested; return the exit code."""
    from dtctl.advise.advice import build_choice_json, build_model_json
    from dtctl.advise.advice import choose_best_layouts as advised

    advice = advised(task)
    if json_lines:
        output.emit_json(
            {
                "model": build_model_json(task.model),
                "recommendation": build_choice_json(advice.best, advice.reasons),
                "alternatives": [build_choice_json(choice) for choice in advice.alternatives],
                "written": build_choice_json(advice.written) if advice.written is not None else None,
                "tried": advice.evaluated,
                "basis": view.COMPUTED,
            }
        )
    else:
        view.print_recommendation(task, advice, origin=origin)
    for doubt in task.model.doubts:
        output.print_stderr(f"warning: {doubt}", "yellow")
    if plot is not None:
        view.write_page(plot, task, advice)
    if write and advice.best.fits:
        _write_recommendation(path, task, advice)
    return 0 if advice.best.fits else PlanError.exit_code


def _measure_strategies(task: PlanningTask, module: str | None, *, json_lines: bool) -> int:
    """Train a few steps with ddp and fsdp on 1, 2 and 4 workers, up to the number of GPUs; print both figures."""
    from dtctl.advise.measure import measure_training_memory

    rows = []
    for strategy in ("ddp", "fsdp"):
        for workers in (count for count in (1, 2, 4) if count <= task.hardware.gpus):
            output.print_stderr(f"{strategy} on {workers} ...", "dim")
            rows.append(measure_training_memory(task.model, strategy=strategy, workers=workers, module=module))
    if json_lines:
        output.emit_json(
            {
                "measured": [
                    {"strategy": trial.strategy, "workers": trial.workers,
                     "predicted_mib": round(trial.predicted / 2**20, 1),
                     "measured_mib": round(trial.measured / 2**20, 1), "off": round(trial.relative_error, 4),
                     "tracked_mib": None if trial.tracked is None else round(trial.tracked / 2**20, 1),
                     "untracked": trial.untracked}
                    for trial in rows
                ]
            }
        )  # fmt: skip
        return 0
    view.show_measured(rows)
    return 0


def _resolve_spec_path(spec: Path | None, *, write: bool) -> Path:
    path = spec or Path(names.SPEC_FILE)
    if write and str(path) == "-":
        raise UsageError("a spec read from standard input cannot be written back", hint="name the spec's file")
    return path / names.SPEC_FILE if path.is_dir() else path


def _load_optional_spec(path: Path, *, required: bool) -> Spec | None:
    if not required and not path.is_file():
        return None
    from dtctl.spec.load import load_spec

    return load_spec(path)


def _write_recommendation(path: Path, task: PlanningTask, advice: Advice) -> None:
    from dtctl.advise.advice import build_train_settings
    from dtctl.advise.spec_editor import format_yaml_value, write_spec_settings

    changed = build_train_settings(task, advice.best)
    write_spec_settings(path, changed)
    output.print_stderr(
        f"{path}: train: {', '.join(f'{key}: {format_yaml_value(value)}' for key, value in changed.items())}"
    )
