"""The repeated blocks of a model, with activation checkpointing and compilation of each.

Both change how a block computes and leave the tree of modules as it is, so names of parameters, and thus snapshots, are
the same with and without them. Apply them before a strategy wraps or shards the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtctl.errors import PlanError
from dtctl.train.config import TrainConfig

KEPT: Final = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
)
"""Operations that cost more to recompute than to keep, for `selective`; from torchtitan's activation_checkpoint.py."""


def find_blocks_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name.

    Blocks are the members of its ModuleLists that have parameters. If there are none, blocks are the children of its
    Sequentials that have at least one sibling of the same class.
    """
    return _find_members(model, nn.ModuleList) or _find_members(model, nn.Sequential)


def _find_members(model: nn.Module, kind: type[nn.ModuleList | nn.Sequential]) -> dict[str, nn.Module]:
    """Return the members of the outermost lists of a kind that count as blocks, by name."""
    blocks: dict[str, nn.Module] = {}
    for path, parent in model.named_modules():
        is_inside = any(path == name or path.startswith(f"{name}.") for name in blocks)
        if not isinstance(parent, kind) or is_inside:
            continue
        children = {name: child for name, child in parent.named_children() if _has_parameters(child)}
        counts = Counter(type(child) for child in children.values())
        for name, child in children.items():
            if kind is nn.ModuleList or counts[type(child)] > 1:
                blocks[f"{path}.{name}" if path else name] = child
    return blocks


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def prepare_blocks(model: nn.Module, config: TrainConfig) -> None:
    """Checkpoint and compile the blocks as the configuration requires.

    Raises:
        PlanError: the model has no blocks, or has one that cannot be recomputed.
    """
    every = {"none": None, "full": 1, "selective": 1}.get(str(config.checkpointing), config.checkpointing)
    if every is None and not config.compile:
        return
    blocks = find_blocks_by_name(model)
    if not blocks:
        raise PlanError(
            "the model has no repeated blocks to checkpoint or compile",
            where="train.checkpointing" if every else "train.compile",
            hint="keep its blocks in a torch.nn.ModuleList",
        )
    if every is not None:
        for name, block in list(blocks.items())[int(every) - 1 :: int(every)]:
            _checkpoint_block(name, block, selective=config.checkpointing == "selective")
    if config.compile:
        for block in blocks.values():
            block.compile(backend="inductor" if config.compile is True else config.compile)


def _checkpoint_block(name: str, block: nn.Module, *, selective: bool) -> None:
    if any(isinstance(part, _BatchNorm) and part.track_running_stats for part in block.modules()):
        raise PlanError(
            f"block {name} has BatchNorm, which would count every batch twice",
            where="train.checkpointing",
            hint="checkpointing computes a block twice; use GroupNorm or LayerNorm, or `checkpointing: none`",
        )
    again: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
    if selective:
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, _choose_checkpoint_policy))
    kind = type(block)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = partial(kind.forward, self)
        return again(plain, *args, **kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)

    # A class instead of a function on the instance, which a copy of the model would share with the original.
    block.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _choose_checkpoint_policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    packet = getattr(operation, "overloadpacket", operation)
    return CheckpointPolicy.MUST_SAVE if packet in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
