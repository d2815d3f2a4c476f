"""ZeRO stage 1: data parallel, and each worker keeps the optimizer's state of its share of the parameters only.

torch's ZeroRedundancyOptimizer does the same; it builds the optimizer itself, from a class. Here any optimizer is cut
down after it was made, the user's own too, and its state stays keyed by parameters, as snapshots have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtctl.runtime.strategies.ddp import Ddp


def shares(sizes: Sequence[int], workers: int) -> list[int]:
    """Which worker gets which parameter: the largest first, each to the one that has least so far."""
    loads = [0] * workers
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class Zero1(Ddp):
    """As `Ddp`, with a step that each worker does for its share, and gives to the others."""

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

        def spread(*_: Any) -> None:
            pending = [
                dist.broadcast(parameter.detach(), src=owner, async_op=True)
                for owner, part in enumerate(parts)
                for parameter in part
            ]
            for work in pending:
                if work is not None:
                    work.wait()

        optimizer.register_step_post_hook(spread)
