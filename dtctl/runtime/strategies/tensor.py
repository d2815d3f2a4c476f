"""Tensor parallel: matrices split over workers that have the same samples (Megatron-LM, Shoeybi et al. 2019).

The first matrix of a pair is split by columns and the second by rows, so that what lies between (attention heads, the
hidden layer) is divided and needs no exchange; one sum over the workers follows the second.

A plan says which module is split how, by patterns of names as in the shell (`blocks.*.wide`; a `*` spans dots too):

    colwise         a Linear whose output is divided; the code after it sees its part of the last dim
    rowwise         a Linear whose input is divided; its output is whole again
    colwise-gather  a Linear divided by columns whose output is put together again, such as an output layer
    embedding       an Embedding whose table is divided by rows
    replicate       not split (where a broader pattern would)

A model may be split that way if the code between two matrices leaves the number of heads or of hidden units open, as in
`view(batch, length, -1, width)`, and if a matrix that makes queries, keys and values together has them head by head.
Whether the split model computes what the whole one does is tried out before training; see trial.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
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
from dtctl.runtime.strategies.blocks import Blocks
from dtctl.train.config import TpConfig

STYLES: Final = ("colwise", "rowwise", "colwise-gather", "embedding", "replicate")
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


def parallelize(model: nn.Module, found: Blocks | None, config: TpConfig, mesh: DeviceMesh) -> None:
    """Split a model's matrices in place.

    Args:
        model: whole, the same on all workers of the mesh.
        found: its blocks.
        config: plan and sequence parallelism.
        mesh: of one axis, tp.

    Raises:
        PlanError: the plan names what is not there, or what cannot be divided by the size of the mesh.
    """
    plan = styles(model, found, config.plan)
    check(model, plan, mesh.size())
    chosen = {name: _style(style, config) for name, style in plan.items()}
    if config.sequence_parallel:
        chosen |= _along_the_sequence(found)
    draw_alike(mesh)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    for name, style in chosen.items():
        parallelize_module(model, mesh, {name: style})
    for name in frozen:  # torch 2.13: SequenceParallel makes new parameters that want a gradient
        model.get_parameter(name).requires_grad_(False)


def draw_alike(mesh: DeviceMesh) -> None:
    """See that random numbers of divided tensors on GPUs begin with this worker's own random state.

    The loop gives the workers of a mesh the same, and replicas different ones. Left alone, torch gives all workers rank
    0's at the first dropout, and from then on all replicas drop the same entries.
    """
    if mesh.device_type == "cuda" and random._rng_tracker is None:
        random._rng_tracker = random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def styles(model: nn.Module, found: Blocks | None, plan: Mapping[str, str]) -> dict[str, str]:
    """The style of each module that is split, by its name; the last pattern that matches counts.

    Raises:
        PlanError: a style or a module is unknown; or there is no plan, and the names of the model's blocks say nothing.
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
        if style not in STYLES:
            raise PlanError(
                f"{style} is not a way to split a matrix", where=f"train.tp.plan.{pattern}", hint=", ".join(STYLES)
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


def _style(style: str, config: TpConfig) -> ParallelStyle:
    if style == "embedding":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if style == "colwise-gather":
        return ColwiseParallel(output_layouts=Replicate())
    if style == "colwise":
        return ColwiseParallel(input_layouts=Shard(1) if config.sequence_parallel else Replicate())
    if config.sequence_parallel:
        return RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return RowwiseParallel()


def _along_the_sequence(found: Blocks | None) -> dict[str, ParallelStyle]:
    """What makes the stream through the blocks a tensor that is divided along dim 1, and whole again behind them.

    It stays a DTensor in between, so that code which asks for its length is told that of the whole sequence.
    """
    if found is None:
        raise PlanError("sequence parallelism needs a model with a list of blocks", where="train.tp.sequence_parallel")
    prefix = f"{found.name}." if found.name else ""
    chosen: dict[str, ParallelStyle] = {}
    for index, block in enumerate(found.modules):
        for name, module in block.named_modules():
            if isinstance(module, NORMS):
                chosen[f"{prefix}{index}.{name}"] = SequenceParallel()
    chosen[f"{prefix}0"] = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
    )
    chosen[f"{prefix}{len(found) - 1}"] = PrepareModuleOutput(
        output_layouts=Shard(1), desired_output_layouts=Replicate()
    )
    return chosen
