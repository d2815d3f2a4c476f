"""Choice of a strategy for a model: the simplest one whose memory fits. Pure arithmetic.

ddp exchanges least; zero1 divides the optimizer's state, hsdp everything inside a node, fsdp everything over all of
them. These need no change of the model, so they can be chosen without asking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from dtctl.estimate.memory import GIB, RUNTIME, Layout, MemoryEstimate, Precision, Recipe, Recompute, memory
from dtctl.estimate.model import Model

SMALL: Final = 0.2
"""Share of the memory up to which the states of a model need no further look: sharding could save no more."""
UNSEEN: Final = 0.6
"""Share of what may be used that may be filled where activations are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetting:
    """Model, hardware and options for which a strategy is chosen."""

    workers: int
    per_node: int
    """Workers of each node; 0 if nodes differ."""
    budget: float
    """Bytes of each worker that may be planned for."""
    unit: str = "GPU"
    """Name of the thing that has the memory."""
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
    recipe: Recipe = RUNTIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy and what it needs."""

    strategy: str
    layout: Layout
    memory: MemoryEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyVerdict:
    """Chosen strategy, with its reason."""

    candidate: Candidate
    """Fits, or is the nearest to it."""
    fits: bool
    reason: str
    """Reason in figures: a phrase that follows the name of the strategy, or names what is missing."""
    hint: str | None = None


def small(model: Model, setting: TrainingSetting) -> StrategyVerdict | None:
    """ddp, if what can be divided is little beside the memory; a look at activations would change nothing."""
    ddp = candidates(model, setting)[0]
    need = ddp.memory.states + ddp.memory.temporary
    if need > SMALL * setting.budget:
        return None
    return StrategyVerdict(
        candidate=ddp,
        fits=True,
        reason=f"whose states need {_gib(ddp.memory.states)} GiB of {_of(setting)}",
    )


def choose(model: Model, setting: TrainingSetting, *, unseen: str | None = None) -> StrategyVerdict:
    """Return the first strategy that fits.

    Args:
        model: with its activations, if they are known.
        setting: where it is to be trained.
        unseen: why activations are not known. None: they are.
    """
    options = candidates(model, setting)
    note = f"; activations are not known ({unseen}), so {UNSEEN:.0%} may be filled" if unseen else ""
    limit = setting.budget * (UNSEEN if unseen else 1.0)
    for number, candidate in enumerate(options):
        if candidate.memory.total <= limit:
            return StrategyVerdict(
                candidate=candidate, fits=True, reason=_since(options[:number], candidate, setting) + note
            )
    last = min(options, key=lambda candidate: candidate.memory.total)
    if unseen and last.memory.total <= setting.budget:
        return StrategyVerdict(candidate=last, fits=True, reason=_since(options[:-1], last, setting) + note)
    if (halved := _halved(model, setting)) is not None:
        return halved
    over = last.memory.total - setting.budget
    return StrategyVerdict(
        candidate=last,
        fits=False,
        reason=f"{last.strategy} needs {_needs(last)} of {_of(setting)}, {_gib(over)} too many",
        hint=_what_helps(last, setting, lambda micro: _fits_with(model, setting, micro)),
    )


def candidates(model: Model, setting: TrainingSetting) -> list[Candidate]:
    """Return all strategies that are possible, in the order in which they are preferred."""
    workers, per_node = setting.workers, setting.per_node
    base = Layout(
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
        Candidate(strategy=name, layout=layout, memory=memory(model, layout, setting.recipe))
        for name, layout in layouts.items()
    ]


def _halved(model: Model, setting: TrainingSetting) -> StrategyVerdict | None:
    """Smaller passes with ddp or zero1, where running out of memory leads to them."""
    micro = setting.micro_batch
    while setting.halves and micro > 1:
        micro = _smaller(micro)
        for candidate in candidates(model, _with(setting, micro)):
            if candidate.strategy in ("ddp", "zero1") and candidate.memory.total <= setting.budget:
                reason = f"in passes of {micro} samples, since nothing fits with {setting.micro_batch}: "
                return StrategyVerdict(
                    candidate=candidate, fits=True, reason=f"{reason}{_needs(candidate)} of {_of(setting)}"
                )
    return None


def _with(setting: TrainingSetting, micro: int) -> TrainingSetting:
    return replace(setting, micro_batch=micro, accumulate=setting.accumulate * (setting.micro_batch // micro))


def _smaller(micro: int) -> int:
    """Return the largest part of a number of samples that is less than it."""
    return micro // next(number for number in range(2, micro + 1) if micro % number == 0)


def _fits_with(model: Model, setting: TrainingSetting, micro: int) -> bool:
    return any(candidate.memory.total <= setting.budget for candidate in candidates(model, _with(setting, micro)))


def _since(refused: list[Candidate], chosen: Candidate, setting: TrainingSetting) -> str:
    """Return why the ones before do not do."""
    if not refused:
        return f"which needs {_needs(chosen)} of {_of(setting)}"
    first = f"since {refused[0].strategy} needs {_needs(refused[0])} of {_of(setting)}"
    larger = [f"{candidate.strategy} {_gib(candidate.memory.total)}" for candidate in refused[1:]]
    return ", ".join([first, *larger]) + f"; {chosen.strategy} needs {_gib(chosen.memory.total)}"


def _needs(candidate: Candidate) -> str:
    """`93.1 GiB (states 64.0, activations 29.1)`, of the parts those that are there."""
    need = candidate.memory
    parts = {
        "states": need.states,
        "activations": need.activations + need.logits,
        "temporary": need.temporary,
        "overhead": need.overhead,
    }
    breakdown = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size >= 0.005 * need.total)
    return f"{_gib(need.total)} GiB ({breakdown})"


def _of(setting: TrainingSetting) -> str:
    return f"{_gib(setting.budget)} GiB per {setting.unit}"


def _gib(size: float) -> str:
    """Three figures are enough."""
    if size < 0.005 * GIB:
        return "under 0.01"
    return f"{size / GIB:.1f}" if size >= 10 * GIB else f"{size / GIB:.2f}"


def _what_helps(candidate: Candidate, setting: TrainingSetting, fits_with: Callable[[int], bool]) -> str:
    """Return what would make it fit."""
    need, helps = candidate.memory, []
    micro = setting.micro_batch
    while micro > 1:
        micro = _smaller(micro)
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
