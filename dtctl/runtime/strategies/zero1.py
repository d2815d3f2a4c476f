"""ZeRO stage 1: data parallel in which each worker keeps only its share of the optimizer's state.

torch's ZeroRedundancyOptimizer does the same, but builds the optimizer itself from a class. In contrast, this module
reduces an existing optimizer to the worker's share; its state stays keyed by parameters, as snapshots require.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from dtctl.runtime.strategies.ddp import Ddp

MESSAGE_BYTES: Final = 64 << 20
"""Bytes of parameters that are sent together, since each message costs some 20 us, and a copy of its length."""


def assign_parameter_owners(sizes: Sequence[int], workers: int) -> list[int]:
    """Return the owner of each parameter: the largest first, each to the worker with the least so far."""
    loads = [0] * workers
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


def group_message_parameters(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the parameters in groups for one message each, the same on all workers.

    A group has parameters of one kind, and enough of them to make the latency of a message negligible.
    """
    bunches: list[list[torch.Tensor]] = []
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    at: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        kind, size_bytes = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if kind not in at or room[kind] < size_bytes:
            at[kind], room[kind] = [], MESSAGE_BYTES
            bunches.append(at[kind])
        at[kind].append(parameter)
        room[kind] -= size_bytes
    return bunches


def _flatten_sent_parameters(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor to send: one contiguous parameter itself, or else a vector with all of them."""
    if _is_sent_itself(parameters):
        return parameters[0].detach()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def _is_sent_itself(parameters: Sequence[torch.Tensor]) -> bool:
    return len(parameters) == 1 and parameters[0].is_contiguous()


def _copy_received_values(parameters: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    if not _is_sent_itself(parameters):
        parts = torch.split_with_sizes(values, [parameter.numel() for parameter in parameters])
        views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        torch._foreach_copy_([parameter.detach() for parameter in parameters], views)


class Zero1(Ddp):
    """`Ddp` in which each worker makes the optimizer's step for its share, and sends the results to the others."""

    name = "zero1"
    sharded_state = True

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the parameters of other workers from the optimizer, and send new values to all after each step."""
        everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = assign_parameter_owners([parameter.numel() for parameter in everything], dist.get_world_size())
        rank = dist.get_rank()
        mine = {parameter for parameter, owner in zip(everything, owners, strict=True) if owner == rank}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in mine]
        parts = [
            [parameter for parameter, owner in zip(everything, owners, strict=True) if owner == worker]
            for worker in range(dist.get_world_size())
        ]

        bunches = [group_message_parameters(part) for part in parts]

        def spread(*_: Any) -> None:
            for owner, some in enumerate(bunches):  # one owner at a time, since the copies take memory
                flat = [_flatten_sent_parameters(bunch) for bunch in some]
                pending = [dist.broadcast(values, src=owner, async_op=True) for values in flat]
                for work in pending:
                    if work is not None:
                        work.wait()
                if owner != rank:
                    for bunch, values in zip(some, flat, strict=True):
                        _copy_received_values(bunch, values)

        optimizer.register_step_post_hook(spread)
