"""Tensor parallel: matrices split over workers that have the same samples (Megatron-LM, Shoeybi et al. 2019).

The first matrix of a pair is split by columns and the second by rows, so that what lies between (attention heads, the
hidden layer) is divided and needs no exchange; one sum over the workers follows the second.

A plan defines how each module is split, by patterns of names as in the shell (`blocks.*.wide`; a `*` spans dots too):

    colwise         a Linear whose output is divided; the code after it sees its part of the last dim
    colwise-3       a Linear whose output is three things side by side, such as queries, keys and values; the code after
                    it sees its part of each. With other sizes: their proportions, colwise-4:2:2
    rowwise         a Linear whose input is divided; its output is whole again
    colwise-gather  a Linear divided by columns whose output is put together again, such as an output layer
    embedding       an Embedding whose table is divided by rows
    replicate       not split (where a broader pattern would)

A model may be split that way if the code between two matrices leaves the number of heads or of hidden units open, as in
`view(batch, length, -1, width)`. Each module that is divided is compared with itself in one piece before training, its
outputs and its gradients (comparison.py). The comparison also finds a fused matrix that the plan calls colwise, whose
parts follow from the shape of the matrix after it, and parameters between two divided matrices, such as norms of
queries, whose gradients are added up over the workers. What is not equal in any of these ways is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import _random as random
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dtctl.errors import PlanError
from dtctl.runtime.explain import explained
from dtctl.runtime.strategies import tensor_parts
from dtctl.runtime.strategies.blocks import Blocks
from dtctl.runtime.strategies.comparison import Call, Comparison, Difference, Seen, kind_of
from dtctl.train.config import TpConfig

STYLES: Final = ("colwise", "rowwise", "colwise-gather", "embedding", "replicate")
"""Styles of a plan; colwise may be followed by the parts of a fused matrix."""
COLWISE: Final = (
    *("qkv", "q", "k", "v", "q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "query", "key", "value"),
    *("wide", "up", "gate", "up_proj", "gate_proj", "w1", "w3", "fc1", "c_fc"),
)
"""Last words of the names of Linears in blocks that come first in a pair."""
ROWWISE: Final = ("out", "o_proj", "wo", "out_proj", "narrow", "down", "down_proj", "w2", "fc2", "c_proj")
"""And of those that come second."""
HEADS: Final = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "n_kv_heads")
"""Attributes by which models call their number of heads."""
NORMS: Final = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class Split:
    """The way in which a model is split."""

    styles: Mapping[str, str]
    """Style of each module that is split, by its name."""
    added_up: Collection[str] = ()
    """Names of parameters that are not split, and whose gradients are added up over the workers."""


def split(model: nn.Module, found: Blocks | None, config: TpConfig, mesh: DeviceMesh, seen: Seen | None) -> None:
    """Split a model's matrices in place, after each module that is divided was compared; collective over the mesh.

    Args:
        model: whole, the same on all workers of the mesh.
        found: its blocks.
        config: plan and sequence parallelism.
        mesh: of one axis, tp.
        seen: calls of `compared_modules`. None: nothing is compared.

    Raises:
        PlanError: the plan does not fit the model, or a module computes something else if it is split.
    """
    chosen = choose_split(model, found, config, mesh.size())
    if seen is not None:
        chosen = compare_split(model, found, config, mesh, chosen, seen)
    parallelize(model, found, config, mesh, chosen)


def parallelize(model: nn.Module, found: Blocks | None, config: TpConfig, mesh: DeviceMesh, split: Split) -> None:
    """Split a model's matrices in place.

    Args:
        model: whole, the same on all workers of the mesh.
        found: its blocks.
        config: sequence parallelism.
        mesh: of one axis, tp.
        split: by `choose_split`.
    """
    chosen = [(name, _style(style, config)) for name, style in split.styles.items()]
    if config.sequence_parallel:
        chosen += _along_the_sequence(found)
    draw_alike(mesh)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    tied = _tied(model)
    for name, style in chosen:
        parallelize_module(model, mesh, {name: style})
    for first, *others in tied:
        for name in others:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_parameter(last, model.get_parameter(first))
    for name in frozen:  # torch 2.13: SequenceParallel makes new parameters that want a gradient
        model.get_parameter(name).requires_grad_(False)
    by_module: dict[str, list[str]] = {}
    for name in split.added_up:
        owner, _, last = name.rpartition(".")
        by_module.setdefault(owner, []).append(last)
    for owner, names in by_module.items():
        tensor_parts.add_up_gradients(model.get_submodule(owner), names, mesh.get_group())


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that several modules have; a module with several names counts once."""
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
    return [group for group in names.values() if len(group) > 1]


def compared_modules(split: Split) -> list[str]:
    """Return the names of all modules that may be compared: those that are split, and those around them."""
    around: dict[str, None] = {}
    for name in split.styles:
        words = name.split(".")
        around |= dict.fromkeys(".".join(words[:end]) for end in range(len(words) + 1))
    return list(around)


def choose_split(model: nn.Module, found: Blocks | None, config: TpConfig, degree: int) -> Split:
    """Return the split that the plan names, or that names of modules suggest.

    Args:
        model: whole.
        found: its blocks.
        config: the plan.
        degree: number of workers.

    Raises:
        PlanError: the plan names what is not there, or what cannot be divided by the degree.
    """
    plan = styles(model, found, config.plan)
    check(model, plan, degree)
    return Split(plan)


def compare_split(
    model: nn.Module,
    found: Blocks | None,
    config: TpConfig,
    mesh: DeviceMesh,
    split: Split,
    seen: Seen,
) -> Split:
    """Compare each module that is to be split, one of each kind, with itself in one piece; collective over the mesh.

    Args:
        model: whole, the same on all workers of the mesh; stays as it is.
        found: its blocks.
        config: plan and sequence parallelism.
        mesh: of one axis, tp.
        split: by `choose_split`.
        seen: calls of `compared_modules`.

    Returns:
        The split, with the parts of fused matrices and the parameters whose gradients are added up.

    Raises:
        PlanError: a module computes something else if it is split, or was not compared.
    """
    chosen, added_up = dict(split.styles), set[str]()
    calls = _calls_of_all(model, seen)
    done: dict[object, tuple[list[str], frozenset[str]]] = {}
    for unit, entries in _units(found, config, split, calls).items():
        module, prefix = model.get_submodule(unit), f"{unit}." if unit else ""
        kind = (kind_of(module), *((name.removeprefix(unit), style) for name, style in entries.items()))
        if kind in done:
            ways, sums = done[kind]
            chosen |= zip(entries, ways, strict=True)
            added_up |= {f"{prefix}{name}" for name in sums}
            continue
        comparison = Comparison(module, calls[unit], seen.autocast)
        for name in entries:
            if f"{name}.weight".removeprefix(prefix) in comparison.unused:
                raise _not_compared(name)
        difference: Difference | None = None
        for attempt in _attempts(model, entries, mesh.size(), comparison, prefix):

            def divide(twin: nn.Module, attempt: Mapping[str, str] = attempt, unit: str = unit) -> None:
                _divide_copy(twin, unit, found, config, mesh, attempt)

            difference = comparison.difference(divide, mesh.get_group())
            if difference.is_rounding:
                chosen |= attempt
                added_up |= {f"{prefix}{name}" for name in difference.added_up}
                done[kind] = (list(attempt.values()), difference.added_up)
                break
        else:
            assert difference is not None  # noqa: S101  # for the type checker: there is an attempt at least
            known = explained(difference.error) if difference.error is not None else None
            raise known or _differs(
                unit or type(model).__name__, entries, difference, mesh.size()
            ) from difference.error
    return Split(chosen, sorted(added_up))


def _calls_of_all(model: nn.Module, seen: Seen) -> dict[str, Call]:
    """Return the calls of modules, and of such that were not called that of a like one, such as another expert."""
    calls, like = dict(seen.calls), dict[tuple[object, ...], Call]()
    kinds = {
        name: (type(module), *((part, value.shape) for part, value in module.named_parameters()))
        for name, module in model.named_modules()
    }
    for name, call in calls.items():
        like.setdefault(kinds[name], call)
    return calls | {name: like[kind] for name, kind in kinds.items() if name not in calls and kind in like}


def _units(
    found: Blocks | None, config: TpConfig, split: Split, calls: Mapping[str, Call]
) -> dict[str, dict[str, str]]:
    """Return the modules that are compared, and what is split in each.

    Raises:
        PlanError: a module that is split was not called, nor any around it that has both matrices of a pair.
    """
    units: dict[str, dict[str, str]] = {}
    for name, style in split.styles.items():
        words = name.split(".")
        around = [".".join(words[:end]) for end in range(len(words), -1, -1)]
        if config.sequence_parallel and found is not None and _block_of(name, found):
            around = [_block_of(name, found)]
        elif style not in ("embedding", "colwise-gather"):
            around = [one for one in around if _has_pair(one, split.styles)] or [""]
        unit = next((one for one in around if one in calls), None)
        if unit is None:
            raise _not_compared(name)
        units.setdefault(unit, {})[name] = style
    # A module inside of another one is compared with it.
    for inner in sorted(units, key=len, reverse=True):
        outer = [unit for unit in units if unit != inner and (not unit or inner.startswith(f"{unit}."))]
        if outer:
            units[outer[0]] |= units.pop(inner)
    return {
        unit: {name: split.styles[name] for name in split.styles if name in entries} for unit, entries in units.items()
    }


def _block_of(name: str, found: Blocks) -> str:
    prefix = f"{found.name}." if found.name else ""
    return prefix + name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""


def _has_pair(unit: str, plan: Mapping[str, str]) -> bool:
    inside = [style for name, style in plan.items() if not unit or name.startswith(f"{unit}.")]
    return "rowwise" in inside and any(style.startswith("colwise") for style in inside)


def _attempts(
    model: nn.Module, entries: Mapping[str, str], degree: int, comparison: Comparison, prefix: str
) -> list[dict[str, str]]:
    """Return the styles with parts of fused matrices that shapes suggest, if these can be divided, and as they are.

    The first entry is what the code between two matrices accepts, as far as one pair shows: torch plans each attempt
    again, which takes a tenth of a second.
    """
    fused = dict(entries)
    following, second, pair = None, "", None
    for name, style in reversed(list(entries.items())):
        weight = model.get_submodule(name).get_parameter("weight")
        if style == "rowwise":
            following, second = weight.shape[1], name
        elif style == "colwise" and following:
            outputs = weight.shape[0]
            if outputs > following and outputs % following == 0:
                fused[name] = f"colwise-{outputs // following}"
            elif outputs > following and (outputs - following) % 2 == 0:  # queries, and fewer keys and values
                fused[name] = f"colwise-{following}:{(outputs - following) // 2}:{(outputs - following) // 2}"
            if fused[name] != style:
                pair = name.removeprefix(prefix), second.removeprefix(prefix)
    try:
        check(model, fused, degree)
    except PlanError:
        return [dict(entries)]
    if pair is None:
        return [dict(entries)]
    return [fused, dict(entries)] if comparison.crosses(*pair, degree) else [dict(entries), fused]


def _divide_copy(
    twin: nn.Module, unit: str, found: Blocks | None, config: TpConfig, mesh: DeviceMesh, attempt: Mapping[str, str]
) -> None:
    """Split the copy of a module as it would be split in the model."""
    holder = nn.ModuleList([twin])
    inside = {f"0.{name.removeprefix(unit).lstrip('.')}".rstrip("."): style for name, style in attempt.items()}
    alone = config.sequence_parallel and found is not None and bool(unit) and _block_of(unit, found) == unit
    along = config if alone else replace(config, sequence_parallel=False)
    parallelize(holder, Blocks(name="", container=holder), along, mesh, Split(inside))


def _not_compared(name: str) -> PlanError:
    return PlanError(
        f"{name} is to be split and was not used in the first forward pass, so nothing shows that this is right",
        where=f"train.tp.plan.{name}",
        hint="leave it whole (`replicate`), or call the modules around it as modules",
    )


def _differs(unit: str, entries: Mapping[str, str], difference: Difference, degree: int) -> PlanError:
    names = ", ".join(f"{name.rpartition('.')[2]} {style}" for name, style in entries.items())
    return PlanError(
        f"{unit} computes something else if it is split over {degree} workers ({names}): {difference.describe()}",
        where="train.tp.plan",
        hint="its code must leave the number of heads or units open, as in `view(batch, length, -1, width)`; name the "
        "parts of a fused matrix, as in `colwise-3`, or leave it whole with `replicate`",
    )


def draw_alike(mesh: DeviceMesh) -> None:
    """See that random numbers of divided tensors on GPUs begin with this worker's own random state.

    The loop gives the workers of a mesh the same, and replicas different ones. Left alone, torch gives all workers rank
    0's at the first dropout, and from then on all replicas drop the same entries.
    """
    if mesh.device_type == "cuda" and random._rng_tracker is None:
        random._rng_tracker = random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def styles(model: nn.Module, found: Blocks | None, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module that is split, by its name; the last pattern that matches counts.

    Raises:
        PlanError: a style or a module is unknown; or there is no plan, and the names of the model's blocks are unknown.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    if not plan:
        recognized = dict(_recognized(modules, found))
        if recognized:
            return recognized
        raise PlanError(
            "the model's matrices have no names by which a way to split them is recognized",
            where="train.tp.plan",
            hint=f"give a plan, such as {{'blocks.*.first': colwise, 'blocks.*.second': rowwise}}; "
            f"the model has {', '.join(list(modules)[:8]) or 'no Linear and no Embedding'}",
        )
    named: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES and not proportions(style):
            raise PlanError(
                f"{style} is not a way to split a matrix",
                where=f"train.tp.plan.{pattern}",
                hint=f"{', '.join(STYLES)}; a matrix that makes three things at once is colwise-3",
            )
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, modules, n=1, cutoff=0.3)
            raise PlanError(
                f"no Linear or Embedding of the model is named {pattern}",
                where="train.tp.plan",
                hint=f"the nearest is {near[0]}" if near else f"there are {', '.join(list(modules)[:8])}",
            )
        named |= dict.fromkeys(matching, style)
    return {name: style for name, style in named.items() if style != "replicate"}


def proportions(style: str) -> list[int]:
    """Return the proportions of the parts of a fused matrix, as its style names them; empty if it names none."""
    kind, _, text = style.partition("-")
    words = text.split(":")
    if kind != "colwise" or not all(word.isdecimal() and int(word) for word in words):
        return []
    return [int(word) for word in words] if len(words) > 1 else [1] * int(text)


def _recognized(modules: Mapping[str, nn.Module], found: Blocks | None) -> Iterator[tuple[str, str]]:
    for name, module in modules.items():
        last = name.rpartition(".")[2]
        if found is None or not name.startswith(f"{found.name}.") or not isinstance(module, nn.Linear):
            continue
        if last in COLWISE:
            yield name, "colwise"
        elif last in ROWWISE:
            yield name, "rowwise"


def check(model: nn.Module, plan: Mapping[str, str], degree: int) -> None:
    """See that everything that is divided can be.

    Raises:
        PlanError: a matrix or a number of heads cannot be divided by the degree, or a style does not fit its module.
    """
    for name, style in plan.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding) != (style == "embedding"):
            raise PlanError(
                f"{name} is {'an' if style != 'embedding' else 'no'} Embedding and cannot be split {style}",
                where=f"train.tp.plan.{name}",
            )
        weight = module.get_parameter("weight")  # [outputs, inputs], or [entries, width] of an Embedding
        size = weight.shape[1 if style == "rowwise" else 0]
        what = {"rowwise": "inputs", "embedding": "entries"}.get(style, "outputs")
        if size % degree:
            raise PlanError(
                f"{name} has {size} {what}, which {degree} workers cannot divide", where="train.strategy.tp"
            )
        _check_parts(name, style, size, degree)
        parent = model.get_submodule(name.rpartition(".")[0])
        for attribute in HEADS:
            heads = getattr(parent, attribute, None)
            if style != "embedding" and isinstance(heads, int) and heads % degree:
                raise PlanError(
                    f"the model has {heads} heads ({type(parent).__name__}.{attribute}), which {degree} workers cannot "
                    f"divide",
                    where="train.strategy.tp",
                    hint="choose a degree of tp that divides the number of heads",
                )

    for names in _tied(model):
        owners = [name.rpartition(".")[0] for name in names]
        # The dim along which each of them would be split.
        ways = {plan[owner] == "rowwise" if owner in plan else None for owner in owners}
        if len(ways) > 1:
            raise PlanError(
                f"{' and '.join(names)} are one parameter, which the plan splits in different ways",
                where=f"train.tp.plan.{next(owner for owner in owners if owner in plan)}",
                hint="split a tied output layer `colwise-gather` and its table `embedding`, or leave both whole",
            )


def _check_parts(name: str, style: str, size: int, degree: int) -> None:
    if not (shares := proportions(style)):
        return
    parts = tensor_parts.part_sizes(shares, size)
    if not parts or any(part % degree for part in parts):
        raise PlanError(
            f"{name} has {size} outputs, which cannot be {style.partition('-')[2]} parts that {degree} workers divide",
            where=f"train.tp.plan.{name}",
        )


def _style(style: str, config: TpConfig) -> ParallelStyle:
    if style == "embedding":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if style == "colwise-gather":
        return ColwiseParallel(output_layouts=Replicate())
    layouts = Shard(1) if config.sequence_parallel else Replicate()
    if style == "colwise":
        return ColwiseParallel(input_layouts=layouts)
    if style != "rowwise":
        return tensor_parts.FusedColwise(proportions(style), input_layouts=layouts)
    if config.sequence_parallel:
        return RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return RowwiseParallel()


def _along_the_sequence(found: Blocks | None) -> list[tuple[str, ParallelStyle]]:
    """Return the styles that divide the stream through the blocks along dim 1, and make it whole behind them.

    It stays a DTensor in between, so that code which reads its length gets that of the whole sequence.
    """
    if found is None:
        raise PlanError("sequence parallelism needs a model with a list of blocks", where="train.tp.sequence_parallel")
    prefix = f"{found.name}." if found.name else ""
    chosen: list[tuple[str, ParallelStyle]] = []
    for index, block in enumerate(found.modules):
        for name, module in block.named_modules():
            if isinstance(module, NORMS):
                chosen.append((f"{prefix}{index}.{name}", SequenceParallel()))
    entrance = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
    end = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    # A model of one block has both, which a mapping would not hold.
    return [*chosen, (f"{prefix}0", entrance), (f"{prefix}{len(found) - 1}", end)]
