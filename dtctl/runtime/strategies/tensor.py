"""Tensor parallel: matrices split over workers that have the same samples (Megatron-LM, Shoeybi et al. 2019).

The first matrix of a pair is split by columns and the second by rows, so that the layers in between (attention heads,
hidden units) are divided without an exchange. One sum over the workers follows the second matrix.

A plan defines how each module is split, by patterns of names as in the shell (`blocks.*.wide`; a `*` spans dots too):

    colwise         a Linear whose output is divided; the code after it sees its part of the last dim
    colwise-3       a Linear whose output is three things side by side, such as queries, keys and values; the code after
                    it sees its part of each. With other sizes: their proportions, colwise-4:2:2
    rowwise         a Linear whose input is divided; its output is whole again
    colwise-gather  a Linear divided by columns whose output is put together again, such as an output layer
    embedding       an Embedding whose table is divided by rows
    replicate       not split (where a broader pattern would)

A model may be split that way if the code between two matrices leaves the number of heads or of hidden units open, as in
`view(batch, length, -1, width)`. Before training, the outputs and gradients of each divided module are compared with
those of the module in one piece (comparison.py). This also detects fused matrices that the plan calls colwise; the
shape of the next matrix gives the sizes of their parts. And it detects parameters between two divided matrices, such as
norms of queries, whose gradients must be added up over the workers. A module that is not equal with any of these
changes is refused.
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
from dtctl.runtime.explain import explain_error
from dtctl.runtime.strategies import tensor_parts
from dtctl.runtime.strategies.blocks import RepeatedBlocks
from dtctl.runtime.strategies.comparison import (
    ModuleCall,
    ModuleComparison,
    ModuleDifference,
    RecordedCalls,
    describe_module_kind,
)
from dtctl.train.config import TpConfig

STYLES: Final = ("colwise", "rowwise", "colwise-gather", "embedding", "replicate")
"""Styles of a plan; the parts of a fused matrix may follow `colwise`."""
COLWISE: Final = (
    *("qkv", "q", "k", "v", "q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "query", "key", "value"),
    *("wide", "up", "gate", "up_proj", "gate_proj", "w1", "w3", "fc1", "c_fc"),
)
"""Last parts of the names of those Linears in blocks that come first in a pair."""
ROWWISE: Final = ("out", "o_proj", "wo", "out_proj", "narrow", "down", "down_proj", "w2", "fc2", "c_proj")
"""Last parts of the names of those that come second in a pair."""
HEADS: Final = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "n_kv_heads")
"""Attribute names that models use for their number of heads."""
NORMS: Final = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """Plan by which a model is split."""

    styles: Mapping[str, str]
    """Style of each module that is split, by its name."""
    added_up: Collection[str] = ()
    """Names of parameters that are not split, but whose gradients are added up over the workers."""


def split_model_matrices(
    model: nn.Module, found: RepeatedBlocks | None, config: TpConfig, mesh: DeviceMesh, seen: RecordedCalls | None
) -> None:
    """Split a model's matrices in place after a comparison of each divided module; collective over the mesh.

    Args:
        model: the whole model, the same on all workers of the mesh.
        found: blocks of the model.
        config: settings of the plan and of sequence parallelism.
        mesh: mesh with the one axis tp.
        seen: calls of `list_split_modules`. None: no comparison.

    Raises:
        PlanError: the plan does not fit the model, or a module computes another result if it is split.
    """
    chosen = choose_split(model, found, config, mesh.size())
    if seen is not None:
        chosen = compare_split(model, found, config, mesh, chosen, seen)
    apply_matrix_split(model, found, config, mesh, chosen)


def apply_matrix_split(
    model: nn.Module, found: RepeatedBlocks | None, config: TpConfig, mesh: DeviceMesh, split: TensorParallelPlan
) -> None:
    """Split a model's matrices in place.

    Args:
        model: the whole model, the same on all workers of the mesh.
        found: blocks of the model.
        config: settings of sequence parallelism.
        mesh: mesh with the one axis tp.
        split: plan from `choose_split`.
    """
    chosen = [(name, _build_parallel_style(style, config)) for name, style in split.styles.items()]
    if config.sequence_parallel:
        chosen += _along_the_sequence(found)
    draw_alike(mesh)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    tied = _find_tied_parameters(model)
    for name, style in chosen:
        parallelize_module(model, mesh, {name: style})
    for first, *others in tied:
        for name in others:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_parameter(last, model.get_parameter(first))
    for name in frozen:  # torch 2.13: SequenceParallel makes new parameters that require a gradient
        model.get_parameter(name).requires_grad_(False)
    by_module: dict[str, list[str]] = {}
    for name in split.added_up:
        owner, _, last = name.rpartition(".")
        by_module.setdefault(owner, []).append(last)
    for owner, names in by_module.items():
        tensor_parts.add_up_gradients(model.get_submodule(owner), names, mesh.get_group())


def _find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that several modules have; a module with several names counts once."""
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
    return [group for group in names.values() if len(group) > 1]


def list_split_modules(split: TensorParallelPlan) -> list[str]:
    """Return the names of all modules that may be compared: those that are split, and those that contain them."""
    around: dict[str, None] = {}
    for name in split.styles:
        words = name.split(".")
        around |= dict.fromkeys(".".join(words[:end]) for end in range(len(words) + 1))
    return list(around)


def choose_split(model: nn.Module, found: RepeatedBlocks | None, config: TpConfig, degree: int) -> TensorParallelPlan:
    """Return the split by the plan in the configuration, or by the names of modules.

    Args:
        model: the whole model.
        found: blocks of the model.
        config: settings with the plan.
        degree: number of workers.

    Raises:
        PlanError: the plan names a module that does not exist, or that cannot be divided by the degree.
    """
    plan = resolve_split_styles(model, found, config.plan)
    require_divisible_modules(model, plan, degree)
    return TensorParallelPlan(plan)


def compare_split(
    model: nn.Module,
    found: RepeatedBlocks | None,
    config: TpConfig,
    mesh: DeviceMesh,
    split: TensorParallelPlan,
    seen: RecordedCalls,
) -> TensorParallelPlan:
    """Compare one module of each kind that is to be split with itself in one piece; collective over the mesh.

    Args:
        model: the whole model, the same on all workers of the mesh; it stays as it is.
        found: blocks of the model.
        config: settings of the plan and of sequence parallelism.
        mesh: mesh with the one axis tp.
        split: plan from `choose_split`.
        seen: calls of `list_split_modules`.

    Returns:
        The split, with the parts of fused matrices and the parameters whose gradients are added up.

    Raises:
        PlanError: a module computes another result if it is split, or was not compared.
    """
    chosen, added_up = dict(split.styles), set[str]()
    calls = _calls_of_all(model, seen)
    done: dict[object, tuple[list[str], frozenset[str]]] = {}
    for unit, entries in _build_comparison_units(found, config, split, calls).items():
        module, prefix = model.get_submodule(unit), f"{unit}." if unit else ""
        kind = (describe_module_kind(module), *((name.removeprefix(unit), style) for name, style in entries.items()))
        if kind in done:
            ways, sums = done[kind]
            chosen |= zip(entries, ways, strict=True)
            added_up |= {f"{prefix}{name}" for name in sums}
            continue
        comparison = ModuleComparison(module, calls[unit], seen.autocast)
        for name in entries:
            if f"{name}.weight".removeprefix(prefix) in comparison.unused:
                raise _not_compared(name)
        difference: ModuleDifference | None = None
        for attempt in _list_style_attempts(model, entries, mesh.size(), comparison, prefix):

            def divide(twin: nn.Module, attempt: Mapping[str, str] = attempt, unit: str = unit) -> None:
                _divide_copy(twin, unit, found, config, mesh, attempt)

            difference = comparison.compute_difference(divide, mesh.get_group())
            if difference.is_rounding:
                chosen |= attempt
                added_up |= {f"{prefix}{name}" for name in difference.added_up}
                done[kind] = (list(attempt.values()), difference.added_up)
                break
        else:
            assert difference is not None  # noqa: S101  # for the type checker: there is an attempt at least
            known = explain_error(difference.error) if difference.error is not None else None
            raise known or _build_split_error(
                unit or type(model).__name__, entries, difference, mesh.size()
            ) from difference.error
    return TensorParallelPlan(chosen, sorted(added_up))


def _calls_of_all(model: nn.Module, seen: RecordedCalls) -> dict[str, ModuleCall]:
    """Return the calls of modules; one that was not called gets the call of a similar one, such as another expert."""
    calls, like = dict(seen.calls), dict[tuple[object, ...], ModuleCall]()
    kinds = {
        name: (type(module), *((part, value.shape) for part, value in module.named_parameters()))
        for name, module in model.named_modules()
    }
    for name, call in calls.items():
        like.setdefault(kinds[name], call)
    return calls | {name: like[kind] for name, kind in kinds.items() if name not in calls and kind in like}


def _build_comparison_units(
    found: RepeatedBlocks | None, config: TpConfig, split: TensorParallelPlan, calls: Mapping[str, ModuleCall]
) -> dict[str, dict[str, str]]:
    """Return the modules that are compared, each with the modules inside that are split and their styles.

    Raises:
        PlanError: a module that is split was not called, nor was any module that contains both matrices of a pair.
    """
    units: dict[str, dict[str, str]] = {}
    for name, style in split.styles.items():
        block = _block_of(name, found) if config.sequence_parallel and found is not None else ""
        if block:
            candidates = [block]
        else:
            words = name.split(".")
            candidates = [".".join(words[:end]) for end in range(len(words), -1, -1)]
            if style not in ("embedding", "colwise-gather"):
                candidates = [module for module in candidates if _has_pair(module, split.styles)] or [""]
        unit = next((module for module in candidates if module in calls), None)
        if unit is None:
            raise _not_compared(name)
        units.setdefault(unit, {})[name] = style
    # A module inside of another one is compared as a part of it.
    for inner in sorted(units, key=len, reverse=True):
        outer = [unit for unit in units if unit != inner and (not unit or inner.startswith(f"{unit}."))]
        if outer:
            units[outer[0]] |= units.pop(inner)
    return {
        unit: {name: split.styles[name] for name in split.styles if name in entries} for unit, entries in units.items()
    }


def _block_of(name: str, found: RepeatedBlocks) -> str:
    prefix = f"{found.name}." if found.name else ""
    return prefix + name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""


def _has_pair(unit: str, plan: Mapping[str, str]) -> bool:
    inside = [style for name, style in plan.items() if not unit or name.startswith(f"{unit}.")]
    return "rowwise" in inside and any(style.startswith("colwise") for style in inside)


def _list_style_attempts(
    model: nn.Module, entries: Mapping[str, str], degree: int, comparison: ModuleComparison, prefix: str
) -> list[dict[str, str]]:
    """Return plans to try: with parts of fused matrices by their shapes, if these can be divided, and unchanged.

    The first plan is the one that the code between two matrices accepts, according to one pair. Each attempt costs a
    tenth of a second, since torch plans it from the start.
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
            elif outputs > following and (outputs - following) % 2 == 0:  # fewer keys and values than queries
                fused[name] = f"colwise-{following}:{(outputs - following) // 2}:{(outputs - following) // 2}"
            if fused[name] != style:
                pair = name.removeprefix(prefix), second.removeprefix(prefix)
    try:
        require_divisible_modules(model, fused, degree)
    except PlanError:
        return [dict(entries)]
    if pair is None:
        return [dict(entries)]
    return [fused, dict(entries)] if comparison.is_dependent(*pair, degree) else [dict(entries), fused]


def _divide_copy(
    twin: nn.Module,
    unit: str,
    found: RepeatedBlocks | None,
    config: TpConfig,
    mesh: DeviceMesh,
    attempt: Mapping[str, str],
) -> None:
    """Split a copy of a module in the way in which the model would be split."""
    holder = nn.ModuleList([twin])
    inside = {f"0.{name.removeprefix(unit).lstrip('.')}".rstrip("."): style for name, style in attempt.items()}
    alone = config.sequence_parallel and found is not None and bool(unit) and _block_of(unit, found) == unit
    along = config if alone else replace(config, sequence_parallel=False)
    apply_matrix_split(holder, RepeatedBlocks(name="", container=holder), along, mesh, TensorParallelPlan(inside))


def _not_compared(name: str) -> PlanError:
    return PlanError(
        f"{name} is to be split and was not used in the first forward pass, so nothing shows that this is right",
        where=f"train.tp.plan.{name}",
        hint="leave it whole (`replicate`), or call the modules around it as modules",
    )


def _build_split_error(unit: str, entries: Mapping[str, str], difference: ModuleDifference, degree: int) -> PlanError:
    names = ", ".join(f"{name.rpartition('.')[2]} {style}" for name, style in entries.items())
    return PlanError(
        f"{unit} has other results if it is split over {degree} workers ({names}): {difference.describe()}",
        where="train.tp.plan",
        hint="its code must leave the number of heads or units open, as in `view(batch, length, -1, width)`; name the "
        "parts of a fused matrix, as in `colwise-3`, or leave it whole with `replicate`",
    )


def draw_alike(mesh: DeviceMesh) -> None:
    """Set the random state of divided tensors on GPUs to this worker's own.

    The loop gives the workers of a mesh the same state, and replicas different ones. Without this call torch gives all
    workers rank 0's state at the first dropout, and all replicas then drop the same entries.
    """
    if mesh.device_type == "cuda" and random._rng_tracker is None:
        random._rng_tracker = random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def resolve_split_styles(model: nn.Module, found: RepeatedBlocks | None, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each split module by its name; the last matching pattern takes precedence.

    Raises:
        PlanError: a style or a module is unknown; or there is no plan, and the names of the model's blocks are unknown.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    if not plan:
        recognized = dict(_recognize_split_styles(modules, found))
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
        if style not in STYLES and not parse_fused_proportions(style):
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


def parse_fused_proportions(style: str) -> list[int]:
    """Return the proportions of a fused matrix's parts in the name of its style; empty if there are none."""
    kind, _, text = style.partition("-")
    words = text.split(":")
    if kind != "colwise" or not all(word.isdecimal() and int(word) for word in words):
        return []
    return [int(word) for word in words] if len(words) > 1 else [1] * int(text)


def _recognize_split_styles(
    modules: Mapping[str, nn.Module], found: RepeatedBlocks | None
) -> Iterator[tuple[str, str]]:
    for name, module in modules.items():
        last = name.rpartition(".")[2]
        if found is None or not name.startswith(f"{found.name}.") or not isinstance(module, nn.Linear):
            continue
        if last in COLWISE:
            yield name, "colwise"
        elif last in ROWWISE:
            yield name, "rowwise"


def require_divisible_modules(model: nn.Module, plan: Mapping[str, str], degree: int) -> None:
    """Refuse a plan with a module that cannot be divided.

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

    for names in _find_tied_parameters(model):
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
    if not (shares := parse_fused_proportions(style)):
        return
    parts = tensor_parts.compute_part_sizes(shares, size)
    if not parts or any(part % degree for part in parts):
        raise PlanError(
            f"{name} has {size} outputs, which cannot be {style.partition('-')[2]} parts that {degree} workers divide",
            where=f"train.tp.plan.{name}",
        )


def _build_parallel_style(style: str, config: TpConfig) -> ParallelStyle:
    if style == "embedding":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if style == "colwise-gather":
        return ColwiseParallel(output_layouts=Replicate())
    layouts = Shard(1) if config.sequence_parallel else Replicate()
    if style == "colwise":
        return ColwiseParallel(input_layouts=layouts)
    if style != "rowwise":
        return tensor_parts.FusedColwise(parse_fused_proportions(style), input_layouts=layouts)
    if config.sequence_parallel:
        return RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return RowwiseParallel()


def _along_the_sequence(found: RepeatedBlocks | None) -> list[tuple[str, ParallelStyle]]:
    """Return the styles that divide the stream along dim 1 inside the blocks, and gather it after them.

    It stays a DTensor in the blocks, so that code which reads its length gets that of the whole sequence.
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
    # A list, since a model with one block has both styles for it.
    return [*chosen, (f"{prefix}0", entrance), (f"{prefix}{len(found) - 1}", end)]
