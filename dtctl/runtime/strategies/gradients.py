"""Norm of a gradient that is divided over workers, and clipping by this norm.

Some gradients may be plain tensors and some DTensors over different meshes. torch has no operation that mixes them, so
they are processed mesh by mesh. A DTensor is recognized by its attributes, since the import of the class takes half a
second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn


def group_by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors in groups of one mesh each; plain ones form one group."""
    groups: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def compute_gradient_norm(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of the gradients of all parameters, over all shards; collective if there are shards."""
    groups = group_by_mesh(parameter.grad for parameter in parameters if parameter.grad is not None)
    norms = [_gather_plain_tensor(nn.utils.get_total_norm(group)) for group in groups]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def clip_gradients(parameters: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
    """Scale gradients down to `max_norm`, if their norm `total` is larger.

    A norm that is NaN counts as infinite: finite gradients become zero, and only those that are not finite stay so.
    """
    total = torch.nan_to_num(total, nan=math.inf, posinf=math.inf)
    for group in group_by_mesh(parameter for parameter in parameters if parameter.grad is not None):
        nn.utils.clip_grads_with_norm_(group, max_norm, total)


def sum_gradients_over_group(
    parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, *, divide_by: int = 1
) -> None:
    """Add up gradients over a group of workers, in one exchange for each number format.

    If only some workers have a gradient of a parameter, it counts as zero on the others. A parameter without a gradient
    on any worker stays without.
    """
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_type.setdefault(parameter.dtype, []).append(parameter)
    for some in by_type.values():
        for parameter in some:
            _align_gradient_placements(parameter)
        parts = [
            _unwrap_local_tensor(p.grad) if p.grad is not None else torch.zeros_like(_unwrap_local_tensor(p))
            for p in some
        ]
        present = torch.tensor([p.grad is not None for p in some], dtype=parts[0].dtype, device=parts[0].device)
        flat = torch.cat([present, *(part.detach().reshape(-1) for part in parts)])
        dist.all_reduce(flat, group=group)
        present, *sums = torch.split_with_sizes(flat, [len(some), *(part.numel() for part in parts)])
        for parameter, anywhere, part, total in zip(some, present.tolist(), parts, sums, strict=True):
            if anywhere:
                part.copy_(total.view_as(part) / divide_by)
                if parameter.grad is None:
                    parameter.grad = _wrap_like_parameter(parameter, part)


def _align_gradient_placements(parameter: torch.Tensor) -> None:
    """Divide a gradient like its parameter: that of an Embedding is whole on every worker (torch 2.13)."""
    placements = getattr(parameter, "placements", None)
    if parameter.grad is not None and placements != getattr(parameter.grad, "placements", None):
        parameter.grad = parameter.grad.redistribute(placements=placements)  # type: ignore[attr-defined]


def _unwrap_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _wrap_like_parameter(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if not hasattr(parameter, "device_mesh"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)  # noqa: S101  # for the type checker
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False)


def list_trained_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _gather_plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
