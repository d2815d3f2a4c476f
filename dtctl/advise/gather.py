"""Sources of a task's figures: options, a config.json, a module, or the spec."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import dtctl
from dtctl import children
from dtctl.advise import hardware
from dtctl.advise.config import parse_model_config, read_config
from dtctl.advise.hardware import Gpu, Hardware
from dtctl.advise.model import build_decoder_model
from dtctl.advise.published_models import build_usual_model
from dtctl.advise.search import PlanningTask
from dtctl.advise.sizes import parse_count, parse_gibibytes
from dtctl.errors import PlanError, UsageError
from dtctl.estimate.frameworks import FRAMEWORKS, apply_recipe_precision
from dtctl.estimate.memory import (
    RUNTIME,
    FrameworkMemory,
    MemoryEstimate,
    ParallelLayout,
    Precision,
    build_mesh_layout,
    estimate_layout_memory,
)
from dtctl.estimate.model import ModelProfile, build_inspected_model
from dtctl.spec.model import Spec
from dtctl.spec.nodes import resolve_nodes
from dtctl.train.batch import DEFAULT_MICRO_BATCH, derive_batch_sizes
from dtctl.train.config import MemorySnapshotConfig
from dtctl.train.mesh import Degrees, resolve_degrees

INSPECT_S = 120.0
"""Seconds that building a model on the meta device may take."""

MOST_GPUS = 1_000_000
USUAL_SEQ = 2048
USUAL_VOCAB = 50257
USUAL_PER_NODE = 8

_COUNTS: Final = (
    "seq", "batch", "gpus", "per_node", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts",
    "micro_batch", "accumulate", "chunks",
)  # fmt: skip
"""Fields of `AdviseOptions` that must be at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions:
    """Options of the command line; None where one is not given."""

    config: Path | None = None
    module: str | None = None
    params: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    gated: bool = False
    experts: int | None = None
    seq: int | None = None
    batch: int | None = None
    gpus: int | None = None
    per_node: int | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    network: str | None = None
    host_memory: str | None = None
    precision: Precision | None = None
    optimizer: str | None = None
    states: str | None = None
    framework: str | None = None
    compiled: bool = False
    fp8: bool = False
    beyond: bool = False
    mesh: str | None = None
    zero: int | None = None
    micro_batch: int | None = None
    accumulate: int | None = None
    recompute: str | None = None
    chunks: int | None = None
    offload: bool | None = None


def build_advise_task(options: AdviseOptions, spec: Spec | None) -> PlanningTask:
    """Return the task that options and spec describe; options win.

    Raises:
        UsageError: something is missing, unknown or not above 0.
    """
    for name in _COUNTS:
        value = getattr(options, name)
        if value is not None and value < 1:
            option = "gpus-per-node" if name == "per_node" else name.replace("_", "-")
            raise UsageError(f"--{option} must be at least 1, and is {value}")
    written = spec.settings if spec is not None else {}
    hardware = _resolve_hardware(options, spec)
    precision = _choose_precision(options, written, hardware.gpu)
    if spec is None and options.framework is None:
        recipe = _build_framework_recipe(options, written, precision, "fsdp")
        # Fused kernels are ignored here: they are the same for all meshes, so they do not favour an axis.
        parallel = replace(_build_framework_recipe(options, written, precision, "megatron"), fused=False)
    else:
        recipe = _build_framework_recipe(options, written, precision, _choose_framework(options, spec))
        parallel = None
    model, mesh = _resolve_advised_model(options, spec), _parse_mesh_option(options, hardware)
    layout = _build_spec_layout(written, hardware)
    if mesh is not None and (reason := _describe_undividable_experts(model, build_mesh_layout(mesh), recipe)):
        raise UsageError(reason, where="--mesh", hint=_OF_EXPERTS)
    if layout is not None and (reason := _describe_undividable_experts(model, layout, recipe)):
        model, layout = replace(model, doubts=(*model.doubts, f"the spec's strategy is not estimated: {reason}")), None
    return PlanningTask(
        model=model,
        hardware=hardware,
        global_batch=options.batch or written.get("global_batch"),
        precision=precision,
        compiled=options.compiled or bool(written.get("compile")),
        fp8=options.fp8,
        beyond=options.beyond,
        recipe=recipe,
        parallel=parallel,
        mesh=mesh,
        pinned=_collect_pinned_fields(options),
        written=layout,
        settled=frozenset(written),
    )


def _choose_precision(options: AdviseOptions, written: Mapping[str, Any], gpu: Gpu) -> Precision:
    """Return the precision of the options, or of the spec, or half precision of the kind that the GPU has."""
    precision: Precision | None = options.precision or written.get("precision")
    if precision == "bf16" and not gpu.bf16:
        where = "--precision" if options.precision else "train.precision"
        raise UsageError(f"{gpu.name} does not compute in bf16", where=where, hint="use fp16, or fp32")
    if options.fp8 and not gpu.fp8:
        raise UsageError(
            f"{gpu.name} does not compute in fp8", where="--fp8", hint="use a GPU since Ada or Hopper, or bf16"
        )
    return precision or ("bf16" if gpu.bf16 else "fp16")


def _choose_framework(options: AdviseOptions, spec: Spec | None) -> str:
    """Return the framework of the options, or of the spec's kind of job, else dtctl.runtime."""
    kind = (spec.job.kind or "") if spec is not None else ""
    return options.framework or (kind if kind in FRAMEWORKS else "runtime")


def _build_framework_recipe(
    options: AdviseOptions, written: Mapping[str, Any], precision: Precision, name: str
) -> FrameworkMemory:
    """Return how a framework holds the model, with the optimizer that the spec or the options name."""
    recipe = apply_recipe_precision(FRAMEWORKS[name], precision)
    optimizer = options.optimizer or written.get("optimizer") or "adamw"
    if options.states == "bf16":
        recipe = replace(recipe, weight_bytes=2, gradient_bytes=2, master_bytes=0, optimizer_bytes=4, autocast=False)
    elif options.states not in (None, "fp32"):
        raise UsageError(f"states are kept in fp32 or bf16, and not in {options.states}", where="--states")
    has_momentum = bool(written.get("momentum", 0.9))
    recipe = recipe.with_optimizer(optimizer, momentum=has_momentum)
    if written.get("kernel") in ("foreach", "loop"):
        recipe = replace(recipe, step_bytes=RUNTIME.with_optimizer(optimizer, momentum=has_momentum).optimizer_bytes)
    snapshot: Mapping[str, Any] = written.get("snapshot") or {}
    in_memory = snapshot.get("memory")
    sharding: Mapping[str, Any] = written.get("fsdp") or {}
    parallel: Mapping[str, Any] = written.get("tp") or {}
    return replace(
        recipe,
        average_bytes=4 if written.get("ema") else 0,
        snapshots=0 if in_memory is None else MemorySnapshotConfig(copies=in_memory.get("copies", 1)).most_held,
        reshard=recipe.reshard and sharding.get("reshard_after_forward", True),
        sequence_parallel=recipe.sequence_parallel or parallel.get("sequence_parallel", False),
    )


def _parse_mesh_option(options: AdviseOptions, hardware: Hardware) -> Degrees | None:
    """Return the mesh that was asked for: `fsdp`, or `dp=2,fsdp=8,tp=4`."""
    if options.mesh is None:
        return None
    text = options.mesh.strip().strip("{}")
    pairs = re.findall(r"(\w+)\s*[=:]\s*(-?\d+)", text)
    rest = re.sub(r"(\w+)\s*[=:]\s*(-?\d+)", "", text).strip(" ,x*")
    strategy: str | dict[str, int] = {axis: int(degree) for axis, degree in pairs} if pairs else text
    if pairs and rest:
        raise UsageError(f"{rest} is not an axis with its degree", where="--mesh", hint="as in fsdp=8,tp=4")
    try:
        return resolve_degrees(strategy, workers=hardware.gpus, per_node=min(hardware.per_node, hardware.gpus))
    except PlanError as exc:
        raise UsageError(exc.message, where="--mesh", hint=exc.hint) from None


_OF_EXPERTS: Final = "give their number with --config or --experts; ep x tp (in Megatron-LM ep) has to divide them"


def _describe_undividable_experts(model: ModelProfile, layout: ParallelLayout, recipe: FrameworkMemory) -> str | None:
    """Return the reason why ep cannot divide the model's experts; None if it can, or if there is no ep."""
    if layout.ep == 1:
        return None
    parts = layout.ep if recipe.split_experts else layout.ep * layout.tp
    if not model.experts:
        return "ep divides experts, and the model has none"
    return f"{model.experts} experts cannot be divided into {parts} parts" if model.experts % parts else None


def estimate_spec_memory(spec: Spec) -> tuple[ParallelLayout, MemoryEstimate] | None:
    """Return the memory of a GPU for the run that a spec describes; None where it leaves model or strategy open.

    Raises:
        UsageError: the spec's figures of the model do not fit together.
    """
    written = spec.settings
    nodes = resolve_nodes(spec)
    counts = [node.slots for node in nodes if isinstance(node.slots, int)]
    if not written.get("model") or len(counts) < len(nodes) or len(set(counts)) != 1:
        return None
    anywhere = Hardware(gpu=hardware.find_gpu_by_name("H100"), gpus=sum(counts), per_node=counts[0], network=1.0)
    layout = _build_spec_layout(written, anywhere)
    if layout is None:
        return None
    recipe = _build_framework_recipe(
        AdviseOptions(), written, layout.precision, _choose_framework(AdviseOptions(), spec)
    )
    return layout, estimate_layout_memory(
        _resolve_advised_model(AdviseOptions(), spec), layout, recipe, compiled=bool(written.get("compile"))
    )


def _build_spec_layout(written: Mapping[str, Any], hardware: Hardware) -> ParallelLayout | None:
    """Return the layout of the spec; None if it has no strategy, or a mesh for another number of workers."""
    strategy = written.get("strategy")
    if strategy in (None, "auto"):
        return None
    try:
        degrees = resolve_degrees(strategy, workers=hardware.gpus, per_node=min(hardware.per_node, hardware.gpus))
        micro, _, accumulate = derive_batch_sizes(
            written.get("micro_batch"), written.get("global_batch"), written.get("accumulate"), workers=degrees.data
        )
    except PlanError:
        return None
    recompute = written.get("checkpointing", "none")
    if isinstance(recompute, int):  # every so many blocks
        recompute = "full" if recompute == 1 else "none"
    return replace(
        build_mesh_layout(degrees),
        zero=1 if strategy == "zero1" else 0,
        micro_batch=micro or DEFAULT_MICRO_BATCH,
        accumulate=accumulate or (2 * degrees.pp if degrees.pp > 1 else 1),
        recompute=recompute,
        offload=bool((written.get("fsdp") or {}).get("cpu_offload")),
        precision=written.get("precision") or "fp32",
    )


def _collect_pinned_fields(options: AdviseOptions) -> dict[str, Any]:
    """Fields of `ParallelLayout` that were asked for."""
    values = {
        "zero": options.zero,
        "micro_batch": options.micro_batch,
        "accumulate": options.accumulate,
        "recompute": options.recompute,
        "chunks": options.chunks,
        # A user who names a mesh expects it to fit on the GPUs without offloading.
        "offload": False if options.offload is None and options.mesh is not None else options.offload,
    }
    return {name: value for name, value in values.items() if value is not None}


def _resolve_hardware(options: AdviseOptions, spec: Spec | None) -> Hardware:
    gpus, per_node = _count_gpus(options, spec)
    if gpus > MOST_GPUS:
        raise UsageError(f"{gpus} GPUs are more than the {MOST_GPUS} that can be searched")
    if gpus % per_node:
        raise UsageError(f"{gpus} GPUs cannot be divided into nodes of {per_node}")
    gpu_memory = parse_gibibytes(options.gpu_memory) if options.gpu_memory else None
    usual_network = "ndr-8" if per_node >= 8 else "ethernet-100"
    return Hardware(
        gpu=hardware.find_gpu_by_name(options.gpu or "H100", gpu_memory),
        gpus=gpus,
        per_node=per_node,
        network=hardware.parse_network_bandwidth(options.network or usual_network),
        host_memory=parse_gibibytes(options.host_memory) if options.host_memory else None,
    )


def _count_gpus(options: AdviseOptions, spec: Spec | None) -> tuple[int, int]:
    """Return the number of GPUs, and that of a node; only the nodes themselves can resolve slots that are `auto`."""
    slots = [node.slots for node in resolve_nodes(spec)] if spec is not None else []
    known_slots = [count for count in slots if isinstance(count, int)]
    per_node = options.per_node or max(known_slots, default=USUAL_PER_NODE)
    if options.gpus is not None:
        return options.gpus, min(per_node, options.gpus)
    if not slots:
        raise UsageError("the number of GPUs is missing", hint="add --gpus 16 --gpus-per-node 8, or name a spec")
    return sum(known_slots) + per_node * (len(slots) - len(known_slots)), per_node


def _resolve_advised_model(options: AdviseOptions, spec: Spec | None) -> ModelProfile:
    """Return the model of the first option that names one, else that of the spec."""
    if options.config is not None:
        return read_config(options.config, seq=options.seq)
    if options.module is not None:
        python = sys.executable
        if spec is not None and spec.cluster.transport in ("local", "sandbox"):
            python = spec.cluster.python or python
        inspection = inspect_model_factory(options.module, seq=options.seq or 1024, python=python)
        return build_inspected_model(inspection, name=options.module)
    if options.layers is not None and options.hidden is not None:
        return _build_model_of_shape(options, options.layers, options.hidden)
    if options.params is not None:
        return _build_model_of_size(options, options.params)
    if spec is not None and (config := spec.settings.get("model")):
        return parse_model_config(config, source="train.model", seq=options.seq, name=spec.job.name)
    raise UsageError(
        "which model?", hint="--config config.json, --model module:factory, --params 7B, --layers and --hidden, or "
        "train.model in the spec",
    )  # fmt: skip


def _build_model_of_shape(options: AdviseOptions, layers: int, hidden: int) -> ModelProfile:
    experts = options.experts or 1
    return build_decoder_model(
        layers=layers,
        hidden=hidden,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn=options.ffn,
        vocab=options.vocab or USUAL_VOCAB,
        seq=options.seq or USUAL_SEQ,
        gated=options.gated,
        experts=experts,
        experts_used=min(2, experts),
        params=parse_count(options.params) if options.params else None,
        name=options.params or "model",
    )


def _build_model_of_size(options: AdviseOptions, params: str) -> ModelProfile:
    if options.experts is not None:
        raise UsageError(
            f"{params} parameters do not determine the width of {options.experts} experts are",
            where="--experts",
            hint="give --layers, --hidden and --ffn (of an expert) too, or --config with a config.json",
        )
    return build_usual_model(
        parse_count(params), seq=options.seq or USUAL_SEQ, name=params, layers=options.layers,
        hidden=options.hidden, heads=options.heads, kv_heads=options.kv_heads, ffn=options.ffn,
        vocab=options.vocab,
    )  # fmt: skip


def inspect_model_factory(name: str, *, seq: int, python: str) -> dict[str, Any]:
    """Return the output of `dtctl.advise.inspect` for a model, in a process of the job's Python.

    Raises:
        UsageError: the model cannot be built; the message has torch's error.
    """
    root = str(Path(dtctl.__file__).resolve().parent.parent)
    path = os.pathsep.join(entry for entry in (root, os.environ.get("PYTHONPATH")) if entry)
    argv = children.build_module_argv(python, "dtctl.advise.inspect", name, str(seq), last="")
    try:
        completed = subprocess.run(
            argv, capture_output=True, text=True, timeout=INSPECT_S, check=False, env={**os.environ, "PYTHONPATH": path}
        )
    except OSError as exc:
        raise UsageError(
            f"{python} cannot be run: {exc.strerror}", hint="cluster.python names the job's Python"
        ) from exc
    except subprocess.TimeoutExpired as exc:
        raise UsageError(f"{name} could not be built within {INSPECT_S:.0f} s") from exc
    lines = completed.stdout.strip().splitlines()
    try:
        figures: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (completed.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UsageError(f"{name} cannot be inspected: {last}", hint=f"{python} needs torch") from None
    if "error" in figures:
        raise UsageError(str(figures["error"]))
    return figures
