"""Styles of tensor parallelism that torch lacks: fused matrices, and parameters between two divided matrices.

A fused matrix computes several results at once, such as queries, keys and values, with their rows one below the other.
Its parameters are divided like those of any other matrix, so snapshots do not differ. Its outputs are then exchanged
between the workers, so that each worker has its share of each part. This moves the outputs of one worker once, a small
part of what the sum after the second matrix moves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel

from dtctl.runtime.moe.dispatch import send_rows


class FusedColwise(ColwiseParallel):
    """A Linear whose output is divided part by part."""

    def __init__(self, proportions: Sequence[int], **options: Any) -> None:
        """Store the sizes of the parts.

        Args:
            proportions: sizes of the parts, in any unit.
            options: options of ColwiseParallel.
        """
        super().__init__(**options)
        self._proportions = proportions

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        outputs = len(module.get_parameter("weight"))
        divided = super()._apply(module, device_mesh)
        exchange = _OutputExchange(compute_part_sizes(self._proportions, outputs), device_mesh)
        divided.register_forward_hook(exchange)
        return divided


def compute_part_sizes(proportions: Sequence[int], outputs: int) -> list[int]:
    """Return the number of outputs in each part of a fused matrix; empty if they cannot be divided so."""
    unit, rest = divmod(outputs, sum(proportions))
    return [] if rest else [unit * share for share in proportions]


class _OutputExchange:
    """Forward hook that exchanges outputs between workers."""

    def __init__(self, sizes: Sequence[int], mesh: DeviceMesh) -> None:
        workers, rank = mesh.size(), mesh.get_local_rank()
        self._group = mesh.get_group()
        # The worker that needs each output, in the order of the outputs of all workers.
        owners = torch.cat([torch.arange(size) // (size // workers) for size in sizes]).view(workers, -1)
        own = owners[rank]
        self._order = own.argsort(stable=True)
        self._leaving = own.bincount(minlength=workers).tolist()
        self._arriving = (owners == rank).sum(1).tolist()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, _: nn.Module, __: Any, outputs: torch.Tensor) -> torch.Tensor:
        rows = outputs.movedim(-1, 0).index_select(0, self._order.to(outputs.device))
        return send_rows(rows, self._arriving, self._leaving, self._group).movedim(0, -1).contiguous()


def add_up_gradients(module: nn.Module, names: Collection[str], group: dist.ProcessGroup) -> None:
    """Add up, over a group, the gradients of some parameters that each worker computes from its share of the data.

    Args:
        module: module that gets a class of its own, since a copy of the model would share a function on the instance.
        names: names of the parameters.
        group: the workers.
    """
    kind = type(module)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = {name: own._parameters[name] for name in names}
        try:
            for name, value in held.items():
                own._parameters[name] = _SumGradient.apply(value, group)  # type: ignore[no-untyped-call]
            return kind.forward(own, *args, **kwargs)
        finally:
            own._parameters.update(held)

    members = {"forward": forward, "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), members)


class _SumGradient(torch.autograd.Function):
    """Operation that returns the parameter; its gradient is the sum of the gradients of all workers."""

    @staticmethod
    def forward(node: Any, parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        node.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(node: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=node.group)
        return gradient, None
