"""Division of a model over the workers of a session."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def begin() -> tuple[int, int]:
    """Make the process group, and return rank and number of workers."""
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def spread(model: nn.Module) -> nn.Module:
    """Divide a model over the workers (`--fsdp`), or copy it to all of them."""
    if "--fsdp" in sys.argv:
        fully_shard(model)
        return model
    return DistributedDataParallel(model)
