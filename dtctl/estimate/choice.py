"""Choice of a strategy for a model: the simplest one whose memory fits. Pure arithmetic.

ddp exchanges least; zero1 divides the optimizer's state, hsdp everything inside a node, fsdp everything over all of
them. These need no change of the model, so dtctl may choose them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from dtctl.estimate.memory import (
    GIB,
    RUNTIME,
    FrameworkMemory,
    MemoryEstimate,
    ParallelLayout,
    Precision,
    Recompute,
    estimate_layout_memory,
)
from dtctl.estimate.model import ModelProfile

SMALL: Final = 0.2
"""Share of the memory up to which a model's states need no further computation: sharding could save no more."""
UNSEEN: Final = 0.6
"""Share of the usable memory that may be filled if the activations are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyInputs:
    """Model, hardware and options for which a strategy is chosen."""

    workers: int
    per_node: int
    """Workers of each node; 0 if nodes differ."""
    budget: float
    """Bytes of each worker that may be planned for."""
    unit: str = "GPU"
    """Name of the device with this memory, for messages."""
    micro_batch: int = 1
    accumulate: int = 1
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    offload: bool = False
    """Shards lie in the host's memory."""
    divisible: bool = True
    """True if the model can be sharded."""
    halves: bool = False
    """True if steps that run out of memory are repeated in smaller passes, with ddp and zero1."""
    recipe: FrameworkMemory = RUNTIME


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCandidate:
    """A strategy and the memory that it needs."""

    strategy: str
    layout: ParallelLayout
    memory: MemoryEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyVerdict:
    """Chosen strategy, with its reason."""

    candidate: StrategyCandidate
    """Strategy that fits, or the nearest one."""
    fits: bool
    reason: str
    """Reason in figures: a phrase that follows the name of the strategy, or names what is missing."""
    hint: str | None = None


def choose_ddp_if_small(model: ModelProfile, setting: StrategyInputs) -> StrategyVerdict | None:
    """Return ddp if the states are small compared with the memory, so that activations would not change the choice."""
    ddp = list_strategy_candidates(model, setting)[0]
    need = ddp.memory.states + ddp.memory.temporary
    if need > SMALL * setting.budget:
        return None
    return StrategyVerdict(
        candidate=ddp,
        fits=True,
        reason=f"whose states need {_format_gibibytes(ddp.memory.states)} GiB of {_format_memory_budget(setting)}",
    )


def choose_fitting_strategy(
    model: ModelProfile, setting: StrategyInputs, *, unseen: str | None = None
) -> StrategyVerdict:
    """Return the first strategy that fits.

    Args:
        model: with its activations, if they are known.
        setting: where it is to be trained.
        unseen: reason why activations are not known. None: they are known.
    """
    options = list_strategy_candidates(model, setting)
    note = f"; activations are not known ({unseen}), so {UNSEEN:.0%} may be filled" if unseen else ""
    limit = setting.budget * (UNSEEN if unseen else 1.0)
    for number, candidate in enumerate(options):
        if candidate.memory.total <= limit:
            return StrategyVerdict(
                candidate=candidate,
                fits=True,
                reason=_describe_refused_strategies(options[:number], candidate, setting) + note,
            )
    last = min(options, key=lambda candidate: candidate.memory.total)
    if unseen and last.memory.total <= setting.budget:
        return StrategyVerdict(
            candidate=last, fits=True, reason=_describe_refused_strategies(options[:-1], last, setting) + note
        )
    if (halved := _choose_smaller_passes(model, setting)) is not None:
        return halved
    over = last.memory.total - setting.budget
    return StrategyVerdict(
        candidate=last,
        fits=False,
        reason=f"{last.strategy} needs {_format_memory_need(last)} of {_format_memory_budget(setting)}, "
        f"{_format_gibibytes(over)} too many",
        hint=_suggest_memory_settings(last, setting, lambda micro: _fits_with(model, setting, micro)),
    )


def list_strategy_candidates(model: ModelProfile, setting: StrategyInputs) -> list[StrategyCandidate]:
    """Return all strategies that are possible, in the order in which they are preferred."""
    workers, per_node = setting.workers, setting.per_node
    base = ParallelLayout(
        micro_batch=setting.micro_batch,
        accumulate=setting.accumulate,
        precision=setting.precision,
        recompute=setting.recompute,
    )
    layouts = {"ddp" if workers > 1 else "single": replace(base, dp=workers)}
    if workers > 1:
        layouts["zero1"] = replace(base, dp=workers, zero=1)
    if workers > 1 and setting.divisible:
        sharded = replace(base, offload=setting.offload)
        if 1 < per_node < workers and workers % per_node == 0:
            layouts["hsdp"] = replace(sharded, dp=workers // per_node, fsdp=per_node)
        layouts["fsdp"] = replace(sharded, fsdp=workers)
    return [
        StrategyCandidate(strategy=name, layout=layout, memory=estimate_layout_memory(model, layout, setting.recipe))
        for name, layout in layouts.items()
    ]


def _choose_smaller_passes(model: ModelProfile, setting: StrategyInputs) -> StrategyVerdict | None:
    """Return ddp or zero1 with smaller passes, if the run repeats a step in smaller passes when memory runs out."""
    micro = setting.micro_batch
    while setting.halves and micro > 1:
        micro = _find_smaller_micro_batch(micro)
        for candidate in list_strategy_candidates(model, _replace_micro_batch(setting, micro)):
            if candidate.strategy in ("ddp", "zero1") and candidate.memory.total <= setting.budget:
                reason = f"in passes of {micro} samples, since nothing fits with {setting.micro_batch}: "
                return StrategyVerdict(
                    candidate=candidate,
                    fits=True,
                    reason=f"{reason}{_format_memory_need(candidate)} of {_format_memory_budget(setting)}",
                )
    return None


def _replace_micro_batch(setting: StrategyInputs, micro: int) -> StrategyInputs:
    return replace(setting, micro_batch=micro, accumulate=setting.accumulate * (setting.micro_batch // micro))


def _find_smaller_micro_batch(micro: int) -> int:
    """Return the largest proper divisor of a number of samples."""
    return micro // next(number for number in range(2, micro + 1) if micro % number == 0)


def _fits_with(model: ModelProfile, setting: StrategyInputs, micro: int) -> bool:
    return any(
        candidate.memory.total <= setting.budget
        for candidate in list_strategy_candidates(model, _replace_micro_batch(setting, micro))
    )


def _describe_refused_strategies(
    refused: list[StrategyCandidate], chosen: StrategyCandidate, setting: StrategyInputs
) -> str:
    """Return the reason why the preferred strategies do not fit."""
    if not refused:
        return f"which needs {_format_memory_need(chosen)} of {_format_memory_budget(setting)}"
    first = f"since {refused[0].strategy} needs {_format_memory_need(refused[0])} of {_format_memory_budget(setting)}"
    larger = [f"{candidate.strategy} {_format_gibibytes(candidate.memory.total)}" for candidate in refused[1:]]
    return ", ".join([first, *larger]) + f"; {chosen.strategy} needs {_format_gibibytes(chosen.memory.total)}"


def _format_memory_need(candidate: StrategyCandidate) -> str:
    """Return `93.1 GiB (states 64.0, activations 29.1)`, without parts below half a percent."""
    need = candidate.memory
    parts = {
        "states": need.states,
        "activations": need.activations + need.logits,
        "temporary": need.temporary,
        "overhead": need.overhead,
    }
    breakdown = ", ".join(
        f"{name} {_format_gibibytes(size)}" for name, size in parts.items() if size >= 0.005 * need.total
    )
    return f"{_format_gibibytes(need.total)} GiB ({breakdown})"


def _format_memory_budget(setting: StrategyInputs) -> str:
    return f"{_format_gibibytes(setting.budget)} GiB per {setting.unit}"


def _format_gibibytes(size: float) -> str:
    """Return a figure rounded to three digits."""
    if size < 0.005 * GIB:
        return "under 0.01"
    return f"{size / GIB:.1f}" if size >= 10 * GIB else f"{size / GIB:.2f}"


def _suggest_memory_settings(
    candidate: StrategyCandidate, setting: StrategyInputs, fits_with: Callable[[int], bool]
) -> str:
    """Return the changes that would make it fit."""
    need, helps = candidate.memory, []
    micro = setting.micro_batch
    while micro > 1:
        micro = _find_smaller_micro_batch(micro)
        if fits_with(micro):
            helps.append(f"`train.micro_batch: {micro}` with {setting.micro_batch // micro} times the `accumulate`")
            break
    if need.activations + need.logits > need.states and setting.recompute == "none":
        helps.append("`train.checkpointing: full`")
    if need.states + need.temporary > need.activations + need.logits:
        helps.append(
            "more workers, if it can be sharded" if candidate.layout.fsdp == 1 else "more workers, or a mesh with tp"
        )
    advice = " or ".join(helps) or "shorter samples, or a smaller model"
    return f"{advice}; or name a `train.strategy`, which is used without this check"
