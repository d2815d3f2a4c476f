"""The length of a gradient that is spread over workers, and cutting it to a length.

Some gradients may be plain tensors and some DTensors over different meshes; torch mixes them in no operation, so they
are taken mesh by mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors in groups of one mesh each; plain ones are one group."""
    groups: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def norm(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of the gradients of all parameters, over all shards; collective if there are shards."""
    groups = by_mesh(parameter.grad for parameter in parameters if parameter.grad is not None)
    norms = [_plain(nn.utils.get_total_norm(group)) for group in groups]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def cut(parameters: Sequence[torch.Tensor], max_norm: float | None, total: torch.Tensor) -> None:
    """Scale gradients down to `max_norm`, if their norm `total` is larger; None leaves them."""
    if max_norm is None:
        return
    for group in by_mesh(parameter for parameter in parameters if parameter.grad is not None):
        nn.utils.clip_grads_with_norm_(group, max_norm, total)


def wanted(model: nn.Module) -> list[torch.Tensor]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        whole: torch.Tensor = tensor.full_tensor()
        return whole
    return tensor
