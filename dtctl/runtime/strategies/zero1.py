"""ZeRO stage 1: data parallel, and each worker keeps the optimizer's state of its share of the parameters only.

torch's ZeroRedundancyOptimizer does the same; it builds the optimizer itself, from a class. Here any optimizer is cut
down after it was made, the user's own too, and its state stays keyed by parameters, as snapshots have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from dtctl.runtime.strategies.ddp import Ddp

MESSAGE_BYTES: Final = 64 << 20
"""Bytes of parameters that are sent together: each message costs some 20 us of its own, and a copy of its length."""


def shares(sizes: Sequence[int], workers: int) -> list[int]:
    """Return which worker gets which parameter: the largest first, each to the one that has least so far."""
    loads = [0] * workers
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


def bunched(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Parameters of one kind together, as many as make a message that is worth its start; the same on all workers."""
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


def _flat(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what is sent: one parameter itself, several, or one that lies otherwise in memory, in a vector."""
    if _is_sent_itself(parameters):
        return parameters[0].detach()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def _is_sent_itself(parameters: Sequence[torch.Tensor]) -> bool:
    return len(parameters) == 1 and parameters[0].is_contiguous()


def _put(parameters: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    if not _is_sent_itself(parameters):
        parts = torch.split_with_sizes(values, [parameter.numel() for parameter in parameters])
        views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        torch._foreach_copy_([parameter.detach() for parameter in parameters], views)


class Zero1(Ddp):
    """`Ddp` with a step that each worker makes for its share, and sends to the others."""

    name = "zero1"
    sharded_state = True

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the parameters of other workers out of the optimizer, and bring their new values after each step."""
        everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = shares([parameter.numel() for parameter in everything], dist.get_world_size())
        rank = dist.get_rank()
        mine = {parameter for parameter, owner in zip(everything, owners, strict=True) if owner == rank}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in mine]
        parts = [
            [parameter for parameter, owner in zip(everything, owners, strict=True) if owner == worker]
            for worker in range(dist.get_world_size())
        ]

        bunches = [bunched(part) for part in parts]

        def spread(*_: Any) -> None:
            for owner, some in enumerate(bunches):  # one owner's at a time: the copies take memory
                flat = [_flat(bunch) for bunch in some]
                pending = [dist.broadcast(values, src=owner, async_op=True) for values in flat]
                for work in pending:
                    if work is not None:
                        work.wait()
                if owner != rank:
                    for bunch, values in zip(some, flat, strict=True):
                        _put(bunch, values)

        optimizer.register_step_post_hook(spread)
