"""All sensible layouts for a training run on a cluster, with their memory and speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dtctl.advise.hardware import Hardware
from dtctl.advise.speed import SpeedEstimate, estimate_step_speed
from dtctl.estimate.memory import (
    BUDGET,
    GIB,
    RUNTIME,
    FrameworkMemory,
    MemoryEstimate,
    ParallelLayout,
    Precision,
    build_mesh_layout,
    estimate_layout_memory,
)
from dtctl.estimate.model import ModelProfile
from dtctl.train.mesh import Degrees

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
BETWEEN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Micro batches to try for a given batch, which powers of two might not divide."""
INTERLEAVED = (2, 3, 4, 5, 6, 8, 10)
"""Stages of a worker that are tried in interleaved pipelines."""
SIMPLER = 0.02
"""Gain in speed from which on one more axis, recomputation or offloading is worth it."""

ROOM = 0.9
"""Share of the budget that a larger micro batch may fill if the computed speed does not increase."""

LONG = 8192
"""Tokens of a sample from which on context parallelism is tried; shorter ones only where there are too few samples."""

HOST_BUDGET = 0.8
"""Share of a node's memory that may be planned for; the system, the data and the data loaders need the rest."""

COPIES = 0.2
"""Share of the budget up to which every worker may hold a copy of all states; above it, sharding that is as fast is
the better choice, since it leaves room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTask:
    """Model, data and hardware of a run to plan."""

    model: ModelProfile
    hardware: Hardware
    global_batch: int | None = None
    """Samples of a step; None leaves it open: a micro batch of each worker, and 4 for each stage of a pipeline."""
    precision: Precision = "bf16"
    compiled: bool = False
    fp8: bool = False
    beyond: bool = False
    """True if layouts are tried that dtctl.runtime does not have: ep over copies (dp), and cp in a pipeline."""
    recipe: FrameworkMemory = RUNTIME
    parallel: FrameworkMemory | None = None
    """Recipe of layouts with tp or pp; None: the same as without."""
    mesh: Degrees | None = None
    """Only mesh to evaluate. None: all."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ParallelLayout` that have one value only."""
    written: ParallelLayout | None = None
    """Layout that the spec describes now."""
    settled: frozenset[str] = frozenset()
    """Keys of `train:` that the spec sets."""

    def recipe_of(self, layout: ParallelLayout) -> FrameworkMemory:
        """Return the recipe of a layout."""
        chosen = self.parallel if self.parallel is not None and layout.tp * layout.pp > 1 else self.recipe
        return chosen.adapt_to_layout(layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedLayout:
    """A layout, with its memory and its speed."""

    layout: ParallelLayout
    memory: MemoryEstimate
    speed: SpeedEstimate
    budget: float
    """Bytes of a GPU that may be planned for."""
    host_budget: float
    """Bytes of a node's memory that its workers may have, for each of them."""
    peak_share: float
    """Arithmetic of the model as a share of the GPU's peak."""

    @property
    def fits(self) -> bool:
        """Return whether the layout fits into the fullest GPU, and its offloaded part into the node's memory."""
        return self.memory.total <= self.budget and self.memory.host <= self.host_budget

    @property
    def missing_bytes(self) -> float:
        """Bytes that are missing on the GPU, or else on the host; 0 when it fits."""
        return max(0.0, self.memory.total - self.budget) or max(0.0, self.memory.host - self.host_budget)

    @property
    def strategy(self) -> str:
        """Return its name in a spec; `mesh` if a spec has only its degrees."""
        layout = self.layout
        axes = [name for name, degree in layout.mesh.items() if degree > 1]
        if not axes:
            return "single"
        if axes == ["dp"]:
            return "zero1" if layout.zero else "ddp"
        names = {("fsdp",): "fsdp", ("tp",): "tp", ("pp",): "pipeline", ("dp", "fsdp"): "hsdp"}
        return names.get(tuple(axes), "mesh")

    @property
    def axes(self) -> int:
        """Return the complexity of a choice: axes, recomputation, offloading."""
        layout = self.layout
        degrees = sum(int(degree > 1) for degree in layout.mesh.values())
        extras = (layout.recompute != "none") + 2 * layout.offload + (layout.fsdp > 1) + (layout.zero > 0)
        extras += 2 * (layout.pp > 1) + (layout.chunks > 1)
        crowded = layout.workers == layout.dp > 1 and self.memory.states > COPIES * self.budget
        return degrees + extras + 3 * crowded


def list_runnable_choices(task: PlanningTask) -> list[EvaluatedLayout]:
    """Return all layouts that can run, also those that do not fit; micro batches up to the first that does not fit."""
    return [option for base in _generate_base_layouts(task) for option in _until_full(task, base)]


def evaluate_layout(task: PlanningTask, layout: ParallelLayout) -> EvaluatedLayout:
    """Return one layout with its cost."""
    hardware, model, recipe = task.hardware, task.model, task.recipe_of(layout)
    cost = estimate_step_speed(model, layout, hardware, recipe, compiled=task.compiled, fp8=task.fp8)
    peak = (hardware.gpu.half if layout.precision != "fp32" else hardware.gpu.single) * 1e12
    arithmetic = 6 * model.active_params + 6 * model.layers * model.hidden * model.seq
    return EvaluatedLayout(
        layout=layout,
        memory=estimate_layout_memory(model, layout, recipe, compiled=task.compiled, fp8=task.fp8),
        speed=cost,
        budget=hardware.gpu.memory * GIB * BUDGET,
        host_budget=hardware.host_per_gpu * GIB * HOST_BUDGET,
        peak_share=cost.tokens_per_s_per_gpu * arithmetic / peak,
    )


def _until_full(task: PlanningTask, base: ParallelLayout) -> Iterator[EvaluatedLayout]:
    for layout in _generate_batch_layouts(task, base):
        option = evaluate_layout(task, layout)
        yield option
        if option.memory.total > option.budget:
            return


def _generate_base_layouts(task: PlanningTask) -> Iterator[ParallelLayout]:
    """Yield meshes with all settings that are independent of the batch."""
    for mesh in _generate_mesh_layouts(task):
        for recompute in ("none", "selective", "full"):
            for offload in (False, True) if mesh.fsdp > 1 and mesh.pp == 1 else (False,):
                base = replace(mesh, recompute=recompute, offload=offload, precision=task.precision)
                base = replace(base, **task.pinned)
                if base.recompute == recompute and base.offload == offload:
                    yield from _generate_schedule_layouts(task, base)


def _generate_schedule_layouts(task: PlanningTask, base: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yield a layout with one stage per worker (1F1B), and with each number of stages that divides the blocks."""
    yield base
    if base.pp > 1 and "chunks" not in task.pinned and task.model.layers % base.pp == 0:
        blocks = task.model.layers // base.pp
        yield from (replace(base, chunks=chunks) for chunks in INTERLEAVED if blocks % chunks == 0)


def _generate_batch_layouts(task: PlanningTask, base: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yield a mesh with each micro batch that divides the batch; a pipeline has at least one per stage."""
    sizes = MICRO_BATCHES if task.global_batch is None else BETWEEN
    for micro in (task.pinned["micro_batch"],) if "micro_batch" in task.pinned else sizes:
        accumulate = task.pinned.get("accumulate")
        if task.global_batch is None:
            accumulate = accumulate or (4 * base.pp if base.pp > 1 else 1)
        else:
            step = micro * base.data
            if task.global_batch % step or accumulate not in (None, task.global_batch // step):
                continue
            accumulate = task.global_batch // step
        # Interleaved schedules process micro batches in groups of `pp`.
        if accumulate >= base.pp and (base.chunks == 1 or accumulate % base.pp == 0):
            yield replace(base, micro_batch=micro, accumulate=accumulate)


def _generate_mesh_layouts(task: PlanningTask) -> Iterator[ParallelLayout]:
    """Yield all products of degrees that give the number of GPUs and suit the model, or the one that was asked for."""
    model, hardware = task.model, task.hardware
    if task.mesh is not None:
        yield build_mesh_layout(task.mesh)
        return
    for tp in _list_divisors(min(hardware.gpus, hardware.per_node)):
        if hardware.gpus % tp or model.heads % tp or model.kv_heads % tp:
            continue
        for pp in _list_divisors(hardware.gpus // tp):
            if pp > model.layers:
                continue
            rest = hardware.gpus // tp // pp
            divides_sequences = task.beyond or _can_divide_sequences(task, pp)
            for cp in _list_divisors(rest) if divides_sequences else (1,):
                if cp > 1 and model.seq % (2 * cp):
                    continue
                data = rest // cp
                for fsdp in _list_divisors(data):
                    layout = ParallelLayout(dp=data // fsdp, fsdp=fsdp, tp=tp, pp=pp, cp=cp)
                    yield from _generate_expert_layouts(task, layout)
                    if layout.dp > 1 and layout.shards == 1 and (layout.workers == layout.dp or task.recipe.free):
                        yield from _generate_expert_layouts(task, replace(layout, zero=1))


def _generate_expert_layouts(task: PlanningTask, layout: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yield a layout, and the same with its experts divided: in a node, over all replicas, and one on each GPU.

    dtctl.runtime has ep within fsdp, and divides whole experts over ep x tp. Others have it within dp, too.
    """
    yield layout
    recipe = task.recipe_of(layout)
    together = 1 if recipe.split_experts else layout.tp
    # dtctl.runtime does not support ep if each tensor parallel worker has only a part of a sample.
    apart = layout.tp > 1 and recipe.sequence_parallel and not recipe.free
    if not task.model.experts or task.model.experts % together or apart:
        return
    most = layout.data if task.beyond else layout.fsdp
    near = max(1, task.hardware.per_node // layout.tp)
    degrees = {most, math.gcd(most, near), math.gcd(most, task.model.experts // together)}
    yield from (
        replace(layout, ep=ep) for ep in sorted(degrees) if ep > 1 and task.model.experts % (ep * together) == 0
    )


def _can_divide_sequences(task: PlanningTask, pp: int) -> bool:
    """Return whether dividing sequences pays off and is possible: not in pipelines or compiled blocks."""
    few = task.global_batch is not None and task.global_batch < task.hardware.gpus
    possible = task.recipe.free or (pp == 1 and not task.compiled)
    return possible and (task.model.seq >= LONG or few) and task.model.seq > 1


def _list_divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def rank_choices(options: list[EvaluatedLayout]) -> list[EvaluatedLayout]:
    """Return the choices that fit, the recommended one first and then by speed, and the others by missing memory.

    Of equal choices the one with the larger micro batch comes first, since GPUs gain more from it than the formulas
    compute, as long as memory is left for their error.
    """
    fitting = [choice for choice in options if choice.fits]
    rest = sorted(
        (choice for choice in options if not choice.fits), key=lambda choice: (choice.missing_bytes, choice.axes)
    )
    if not fitting:
        return rest
    fitting.sort(key=lambda choice: (-_round_token_rate(choice), choice.axes, *_build_headroom_key(choice)))
    fastest = fitting[0].speed.tokens_per_s_per_gpu
    contenders = [choice for choice in fitting if choice.speed.tokens_per_s_per_gpu >= fastest * (1 - SIMPLER)]
    best = min(contenders, key=lambda choice: (choice.axes, -_round_token_rate(choice), *_build_headroom_key(choice)))
    return [best, *(choice for choice in fitting if choice is not best), *rest]


def _round_token_rate(choice: EvaluatedLayout) -> float:
    """Return tokens per second to four digits, so that smaller differences do not count."""
    return float(f"{choice.speed.tokens_per_s_per_gpu:.4g}")


def _build_headroom_key(choice: EvaluatedLayout) -> tuple[bool, int, float]:
    """Return the key that orders equally fast choices."""
    return (choice.memory.total > ROOM * choice.budget, -choice.layout.micro_batch, choice.memory.total)


def choose_best_per_family(options: list[EvaluatedLayout]) -> list[EvaluatedLayout]:
    """Return the best choice of each strategy and mesh shape, the best first."""
    first_by_family: dict[tuple[object, ...], EvaluatedLayout] = {}
    for choice in options:
        layout = choice.layout
        shape = tuple(degree > 1 for degree in layout.mesh.values())
        first_by_family.setdefault((shape, layout.zero), choice)
    return list(first_by_family.values())
