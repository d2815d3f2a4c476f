"""Repeated blocks of a model, by which it is sharded, compiled and cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dtctl.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBlocks:
    """The repeated part of a model."""

    name: str
    """Name of the list in the model; empty if the model itself is the list."""
    container: nn.ModuleList | nn.Sequential

    def __len__(self) -> int:
        return len(self.container)

    @property
    def names(self) -> list[str]:
        """Return the names of the blocks in the model, in order."""
        return [f"{self.name}.{index}" if self.name else str(index) for index in range(len(self))]

    @property
    def modules(self) -> list[nn.Module]:
        """Return the blocks in order."""
        return list(self.container)


def find_repeated_blocks(model: nn.Module, name: str | None = None) -> RepeatedBlocks | None:
    """Return the repeated blocks of a model.

    Args:
        model: any module.
        name: name of a ModuleList or Sequential in the model (`train.blocks`). None: the ModuleList with the most
            parameters among those of two or more modules, else such a Sequential.

    Returns:
        The blocks; None if no name was given and nothing repeats.

    Raises:
        PlanError: the named module does not exist, or is not a list of modules.
    """
    if name is not None:
        found = dict(model.named_modules()).get(name)
        if isinstance(found, nn.ModuleList | nn.Sequential):
            return RepeatedBlocks(name=name, container=found)
        lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        raise PlanError(
            f"the model has no list of modules named {name}",
            where="train.blocks",
            hint=f"it has {', '.join(path or '(itself)' for path in lists)}" if lists else "it has none",
        )
    for kind in (nn.ModuleList, nn.Sequential):
        several = [
            RepeatedBlocks(name=path, container=module)
            for path, module in model.named_modules()
            if isinstance(module, kind) and len(module) > 1
        ]
        if several:
            return max(several, key=lambda blocks: sum(p.numel() for p in blocks.container.parameters()))
    return None


def require_apart(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Refuse blocks that share a parameter with each other, or with modules outside of blocks.

    Raises:
        PlanError: a block shares a parameter.
    """
    inside = {id(part) for block in modules for part in block.modules()}
    groups = [list(block.parameters()) for block in modules]
    groups.append([p for part in model.modules() if id(part) not in inside for p in part.parameters(recurse=False)])
    seen: set[torch.Tensor] = set()
    for group in map(set, groups):
        if not seen.isdisjoint(group):
            shared = seen & group
            names = [name for name, value in model.named_parameters(remove_duplicate=False) if value in shared]
            raise PlanError(
                f"{' and '.join(names[:2])} are one parameter in several blocks, which fully_shard cannot divide",
                where="train.strategy",
                hint="use ddp or zero1, or name other blocks with `train.blocks`",
            )
        seen |= group
