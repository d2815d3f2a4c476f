"""All sensible layouts of a training on a cluster, with their memory and speed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtctl.advise.hardware import Hardware
from dtctl.advise.speed import Speed, speed
from dtctl.estimate.memory import BUDGET, GIB, RUNTIME, Layout, MemoryEstimate, Precision, Recipe, memory
from dtctl.estimate.model import Model

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SIMPLER = 0.03
"""A choice that is this much faster is worth an axis more, recomputation or offloading."""

ROOM = 0.9
"""Share of the budget that a larger micro batch may fill when it gains nothing that is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be trained, and how."""

    model: Model
    hardware: Hardware
    global_batch: int | None = None
    """Samples of a step; None leaves it open: a micro batch of each worker, and 4 for each stage of a pipeline."""
    precision: Precision = "bf16"
    compiled: bool = False
    beyond: bool = False
    """Whether axes are tried that dtctl.runtime does not have: cp and ep."""
    recipe: Recipe = RUNTIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One layout, with its cost."""

    layout: Layout
    memory: MemoryEstimate
    speed: Speed
    budget: float
    """Bytes of a GPU that may be planned for."""

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU has room for it."""
        return self.memory.total <= self.budget

    @property
    def short(self) -> float:
        """Bytes that are missing; 0 when it fits."""
        return max(0.0, self.memory.total - self.budget)

    @property
    def strategy(self) -> str:
        """Its name in a spec; `mesh` when only degrees say it."""
        layout = self.layout
        axes = [name for name in ("dp", "fsdp", "tp", "pp", "cp", "ep") if getattr(layout, name) > 1]
        if not axes:
            return "single"
        if axes == ["dp"]:
            return "zero1" if layout.zero else "ddp"
        names = {("fsdp",): "fsdp", ("tp",): "tp", ("pp",): "pipeline", ("dp", "fsdp"): "hsdp"}
        return names.get(tuple(axes), "mesh")

    @property
    def axes(self) -> int:
        """The complexity of a choice: axes, recomputation, offloading."""
        layout = self.layout
        degrees = sum(int(getattr(layout, name) > 1) for name in ("dp", "fsdp", "tp", "pp", "cp", "ep"))
        again = {"none": 0, "selective": 1, "full": 1}[layout.recompute]
        return degrees + again + 2 * layout.offload + (layout.fsdp > 1) + layout.zero + 2 * (layout.pp > 1)


def choices(task: Task) -> list[Choice]:
    """Every way that can run, whether it fits or not."""
    budget = task.hardware.gpu.memory * GIB * BUDGET
    results = []
    for layout in _layouts(task):
        need = memory(task.model, layout, task.recipe)
        cost = speed(task.model, layout, task.hardware, task.recipe, compiled=task.compiled)
        results.append(Choice(layout=layout, memory=need, speed=cost, budget=budget))
    return results


def _layouts(task: Task) -> Iterator[Layout]:
    """Meshes, then what can be chosen on each; micro batches only up to the first that does not fit."""
    budget = task.hardware.gpu.memory * GIB * BUDGET
    for mesh in _meshes(task):
        for recompute in ("none", "selective", "full"):
            for offload in (False, True) if mesh.fsdp > 1 and mesh.pp == 1 else (False,):
                base = replace(mesh, recompute=recompute, offload=offload, precision=task.precision)
                for layout in _batches(task, base):
                    yield layout
                    if memory(task.model, layout, task.recipe).total > budget:
                        break


def _batches(task: Task, base: Layout) -> Iterator[Layout]:
    """The same mesh with all micro batches that divide the batch."""
    for micro in MICRO_BATCHES:
        if task.global_batch is None:
            yield replace(base, micro_batch=micro, accumulate=4 * base.pp if base.pp > 1 else 1)
            continue
        step = micro * base.data
        if step <= task.global_batch and task.global_batch % step == 0:
            yield replace(base, micro_batch=micro, accumulate=task.global_batch // step)


def _meshes(task: Task) -> Iterator[Layout]:
    """All products of degrees that give the number of GPUs and suit the model."""
    model, hardware = task.model, task.hardware
    for tp in _divisors(min(hardware.gpus, hardware.per_node)):
        if hardware.gpus % tp or model.heads % tp or model.kv_heads % tp:
            continue
        for pp in _divisors(hardware.gpus // tp):
            if pp > model.layers:
                continue
            for cp in _divisors(hardware.gpus // tp // pp) if task.beyond else (1,):
                if model.seq % (2 * cp) and cp > 1:
                    continue
                rest = hardware.gpus // tp // pp // cp
                for fsdp in _divisors(rest):
                    layout = Layout(dp=rest // fsdp, fsdp=fsdp, tp=tp, pp=pp, cp=cp)
                    yield layout
                    if layout.dp > 1 and layout.workers == layout.dp:
                        yield replace(layout, zero=1)
                    if task.beyond and model.expert_params and fsdp > 1:
                        yield replace(layout, ep=min(fsdp, hardware.per_node))


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def ranked(options: list[Choice]) -> list[Choice]:
    """The best first: what fits before what does not; then fast, or of those about as fast the simplest; then near.

    Of equals the one with the larger micro batch, which GPUs do better with than the formulas know, as long as memory
    is left for their error.
    """
    fitting = [choice for choice in options if choice.fits]
    rest = sorted((choice for choice in options if not choice.fits), key=lambda choice: (choice.short, choice.axes))
    if not fitting:
        return rest
    fitting.sort(key=lambda choice: (-_pace(choice), choice.axes, *_roomy(choice)))
    fastest = fitting[0].speed.tokens_per_s_per_gpu
    contenders = [choice for choice in fitting if choice.speed.tokens_per_s_per_gpu >= fastest * (1 - SIMPLER)]
    best = min(contenders, key=lambda choice: (choice.axes, -_pace(choice), *_roomy(choice)))
    return [best, *(choice for choice in fitting if choice is not best), *rest]


def _pace(choice: Choice) -> float:
    """Tokens per second to four digits: what differs less is the same."""
    return float(f"{choice.speed.tokens_per_s_per_gpu:.4g}")


def _roomy(choice: Choice) -> tuple[bool, int, float]:
    """Orders what is equally fast."""
    return (choice.memory.total > ROOM * choice.budget, -choice.layout.micro_batch, choice.memory.total)


def families(options: list[Choice]) -> list[Choice]:
    """Of ranked choices the best of each strategy and mesh shape, the best first."""
    first_by_family: dict[tuple[object, ...], Choice] = {}
    for choice in options:
        layout = choice.layout
        shape = tuple(getattr(layout, name) > 1 for name in ("dp", "fsdp", "tp", "pp", "cp", "ep"))
        first_by_family.setdefault((shape, layout.zero), choice)
    return list(first_by_family.values())
