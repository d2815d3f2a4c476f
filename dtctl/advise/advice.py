"""Advice from a list of choices: one recommendation with its reasons, the runner-up, and layouts that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dtctl.advise.search import (
    EvaluatedLayout,
    PlanningTask,
    choose_best_per_family,
    evaluate_layout,
    list_runnable_choices,
    rank_choices,
)
from dtctl.errors import UsageError
from dtctl.estimate.memory import GIB, RESERVE, ParallelLayout
from dtctl.estimate.model import ModelProfile

ABSURD: Final = 0.03
"""Share of a GPU's peak below which a training is not worth starting; published ones reach 0.2 to 0.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Recommendation with its alternatives."""

    best: EvaluatedLayout
    """Choice that fits, or the nearest one when none fits."""
    alternatives: tuple[EvaluatedLayout, ...]
    """Best choice of each other kind, the runner-up first, and those that do not fit last."""
    reasons: tuple[str, ...]
    evaluated: int
    """Number of layouts that were evaluated."""
    written: EvaluatedLayout | None = None
    """Choice that the spec describes now."""


def choose_best_layouts(task: PlanningTask) -> Advice:
    """Return the best way to train.

    Raises:
        UsageError: no layout is possible, for example with a batch that no number of workers divides.
    """
    choices_found = list_runnable_choices(task)
    if not choices_found and task.mesh is not None:
        raise UsageError(_describe_impossible_mesh(task), where="--mesh")
    if not choices_found:
        raise UsageError(
            f"a batch of {task.global_batch} cannot be divided over {task.hardware.gpus} GPUs",
            hint="a multiple of the number of GPUs always can",
        )
    order = choose_best_per_family(rank_choices(choices_found))
    best, alternatives = order[0], tuple(order[1:])
    written = evaluate_layout(task, task.written) if task.written is not None else None
    reasons = _list_choice_reasons(task, best, alternatives)
    if written is not None:
        reasons.append(_as_written(written, best))
    return Advice(
        best=best, alternatives=alternatives, reasons=tuple(reasons), evaluated=len(choices_found), written=written
    )


def _describe_impossible_mesh(task: PlanningTask) -> str:
    """Return why no layout of a mesh that was asked for can run."""
    return (
        f"no batch suits {task.mesh}: a global batch of {task.global_batch or 'any size'} must be micro batches times "
        f"{task.mesh.data if task.mesh else 1} replicas, and a pipeline needs as many micro batches as stages"
    )


def _as_written(written: EvaluatedLayout, best: EvaluatedLayout) -> str:
    """Return a sentence with the memory and the speed of the spec's own layout."""
    need = f"the spec's own {describe_layout(written.layout)} needs {written.memory.total / GIB:.1f} GiB"
    if not written.fits:
        return f"{need}, {written.missing_bytes / GIB:.1f} too many"
    ratio = written.speed.tokens_per_s_per_gpu / best.speed.tokens_per_s_per_gpu - 1
    return f"{need}, and is {abs(ratio):.0%} {'slower' if ratio < 0 else 'faster'}"


def _list_choice_reasons(
    task: PlanningTask, best: EvaluatedLayout, alternatives: tuple[EvaluatedLayout, ...]
) -> list[str]:
    """Return the reasons for a choice: figures, not names."""
    reasons = []
    memory, speed, layout = best.memory, best.speed, best.layout
    budget_gib = best.budget / GIB
    if not best.fits:
        reasons.append(
            f"nothing fits: the nearest needs {memory.total / GIB:.1f} GiB of the usable {budget_gib:.1f}, "
            f"{best.missing_bytes / GIB:.1f} too many"
        )
        reasons.append(_describe_memory_shortage(task, best))
        return reasons
    if best.peak_share < ABSURD:
        reasons.append(_describe_slow_training(task, best))
    reasons.append(
        f"needs {memory.total / GIB:.1f} GiB of the {budget_gib:.1f} that can be used on each GPU; {RESERVE:.0%} are "
        "kept free for memory that the formulas do not cover"
    )
    if memory.host:
        given = "" if task.hardware.host_memory else " if it has twice that of its GPUs (--host-memory)"
        reasons.append(
            f"{memory.host / GIB:.0f} GiB for each GPU ({_in_host(task, layout)}) lie in the host's memory, of "
            f"{best.host_budget / GIB:.0f} that can be used{given}"
        )
    reasons.append(_describe_step_batch(task, layout))
    simple = next((choice for choice in alternatives if choice.strategy == "ddp"), None)
    if simple is not None and best.strategy != "ddp":
        if simple.fits:
            gain = speed.tokens_per_s_per_gpu / simple.speed.tokens_per_s_per_gpu - 1
            reasons.append(f"{gain:.0%} faster than plain ddp, which fits too")
        else:
            reasons.append(
                f"plain ddp is short by {simple.missing_bytes / GIB:.1f} GiB: its states alone are "
                f"{simple.memory.states / GIB:.1f} GiB"
            )
    if speed.exchange_s > 0:
        hidden = 1 - speed.exposed_s / speed.exchange_s
        reasons.append(
            f"exchange takes {speed.exchange_s:.3g} s of a step of {speed.step_s:.3g} s, and {max(0.0, hidden):.0%} of "
            "it overlaps with computation"
        )
    if layout.recompute != "none":
        reasons.append(f"{layout.recompute} recomputation makes room for a micro batch of {layout.micro_batch}")
    if layout.pp > 1:
        reasons.append(f"the pipeline waits {speed.bubble_s / speed.step_s:.0%} of a step")
    second = alternatives[0] if alternatives else None
    if second is not None and second.fits:
        less = 1 - second.speed.tokens_per_s_per_gpu / speed.tokens_per_s_per_gpu
        comparison = f"{less:.0%} slower" if less > 0.005 else "it is as fast, but needs more set-up"
        reasons.append(f"the runner-up is {describe_layout(second.layout)}: {comparison}")
    elif second is not None:
        reasons.append(
            f"nothing else fits; {describe_layout(second.layout)} is short by {second.missing_bytes / GIB:.1f} GiB"
        )
    return reasons


def _describe_slow_training(task: PlanningTask, best: EvaluatedLayout) -> str:
    """Return a sentence that advises against such a slow training, and names the reason."""
    speed, layout = best.speed, best.layout
    parts = {
        "exchange between GPUs (a faster network, fewer nodes, a larger batch)": speed.exposed_s,
        "the pipeline waits (a larger batch)": speed.bubble_s,
        "states that move to the host and back (more GPUs)": speed.update_s if layout.offload else 0.0,
    }
    worst = max(parts, key=lambda name: parts[name])
    return (
        f"absurdly slow: {speed.tokens_per_s_per_gpu:.3g} tokens/s on each GPU is {best.peak_share:.1%} of its peak, "
        f"and a billion tokens take {1e9 / speed.tokens_per_s_per_gpu / task.hardware.gpus / 86400:.3g} days; "
        f"{parts[worst] / speed.step_s:.0%} of a step is {worst}"
    )


def _describe_step_batch(task: PlanningTask, layout: ParallelLayout) -> str:
    """Return the samples of a step, and which layouts they exclude."""
    samples = layout.micro_batch * layout.accumulate * layout.data
    arithmetic = f"micro batch {layout.micro_batch} x {layout.accumulate} accumulated x {layout.data} replicas"
    if task.global_batch is None:
        return f"{samples} samples per step ({arithmetic}), the default; --batch sets another number"
    gpus = task.hardware.gpus
    if task.global_batch % gpus:
        return (
            f"{samples} samples per step ({arithmetic}): not a multiple of {gpus} GPUs, so not every GPU can have "
            f"its own samples; --batch {-(-samples // gpus) * gpus} would also allow ddp and fsdp over all GPUs"
        )
    return f"{samples} samples per step ({arithmetic})"


def _describe_memory_shortage(task: PlanningTask, best: EvaluatedLayout) -> str:
    """Return the changes that would make it fit."""
    memory = best.memory
    if memory.total <= best.budget:
        return (
            f"{_in_host(task, best.layout)} need {memory.host / GIB:.0f} GiB of the host's memory for each GPU, and "
            f"{best.host_budget / GIB:.0f} can be used (--host-memory)"
        )
    parts = {
        "states (more GPUs to share them, or offloading)": memory.states,
        "activations (recomputation, shorter samples)": memory.activations,
        "logits (shorter samples, or a loss in pieces)": memory.logits,
        "weights in use (smaller blocks, tensor parallelism)": memory.temporary,
    }
    largest = max(parts, key=lambda name: parts[name])
    return f"most of it are {largest}: {parts[largest] / GIB:.1f} GiB on {task.hardware.gpu.name}"


def _in_host(task: PlanningTask, layout: ParallelLayout) -> str:
    """Return a phrase with the memory that the host needs."""
    kept = [("offloaded states", layout.offload), ("snapshots", task.recipe_of(layout).snapshots)]
    return " and ".join(name for name, is_there in kept if is_there)


def describe_layout(layout: ParallelLayout) -> str:
    """`fsdp 8 x tp 2, full recomputation, micro batch 4`."""
    axes = " x ".join(f"{name} {degree}" for name, degree in layout.mesh.items() if degree > 1)
    axes = axes.replace("dp", "zero1", 1) if layout.zero else axes
    parts = [axes or "one GPU"]
    if layout.recompute != "none":
        parts.append(f"{layout.recompute} recomputation")
    if layout.chunks > 1:
        parts.append(f"{layout.chunks} stages a worker")
    if layout.offload:
        parts.append("offloading")
    parts.append(f"micro batch {layout.micro_batch}")
    return ", ".join(parts)


def build_choice_json(shown: EvaluatedLayout, reasons: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the object of `--json`."""
    layout, memory = shown.layout, shown.memory
    parts = ("total", "states", "activations", "logits", "temporary", "overhead")
    return {
        "strategy": shown.strategy,
        "mesh": layout.mesh,
        "micro_batch": layout.micro_batch,
        "accumulate": layout.accumulate,
        "global_batch": layout.micro_batch * layout.accumulate * layout.data,
        "recompute": layout.recompute,
        "offload": layout.offload,
        "zero": layout.zero,
        "stages_per_worker": layout.chunks,
        "precision": layout.precision,
        "memory_gib": {name: round(getattr(memory, name) / GIB, 3) for name in parts},
        "host_gib": round(memory.host / GIB, 3),
        "fits": shown.fits,
        "short_gib": round(shown.missing_bytes / GIB, 3),
        "tokens_per_s_per_gpu": round(shown.speed.tokens_per_s_per_gpu, 1),
        "step_s": round(shown.speed.step_s, 4),
        "peak_share": round(shown.peak_share, 4),
        "absurd": shown.peak_share < ABSURD,
        "reasons": list(reasons),
    }


def build_model_json(model: ModelProfile) -> dict[str, Any]:
    """Return the model and the settings of the computation, for `--json`."""
    return {
        "name": model.name,
        "params": model.params,
        "params_used": model.active_params,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "vocab": model.vocab,
        "seq": model.seq,
        "assumed": model.assumed,
        "warnings": list(model.doubts),
    }


def build_train_settings(task: PlanningTask, chosen: EvaluatedLayout) -> dict[str, Any]:
    """Return the keys of a spec's `train:` section for a layout.

    Raises:
        UsageError: the runtime has no such axis.
    """
    layout = chosen.layout
    if layout.fsdp % layout.ep:
        raise UsageError(
            "dtctl.runtime supports ep only together with fsdp, so this cannot be written into the spec",
            hint="leave out --beyond",
        )
    if layout.cp > 1 and layout.pp > 1:
        raise UsageError(
            "dtctl.runtime does not support cp in a pipeline, so this cannot be written into the spec",
            hint="leave out --beyond",
        )
    values: dict[str, Any] = {"strategy": chosen.strategy}
    if chosen.strategy in ("mesh", "hsdp"):
        values["strategy"] = {name: degree for name, degree in layout.mesh.items() if degree > 1}
    # The spec's formats are the user's choice, and the advice was computed with them.
    if "precision" not in task.settled:
        values["precision"] = layout.precision
    values["micro_batch"] = layout.micro_batch
    values["accumulate"] = layout.accumulate
    values["checkpointing"] = layout.recompute
    if task.compiled and "compile" not in task.settled:
        values["compile"] = True
    if layout.offload:
        values["fsdp"] = {"cpu_offload": True}
    if layout.chunks > 1:
        values["pipeline"] = {"schedule": "interleaved", "stages_per_worker": layout.chunks}
    return values
