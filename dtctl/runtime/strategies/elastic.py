"""Replicas whose gradients are added up in the order of shards; `dtctl/runtime/elastic.py` has the how."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from dtctl.runtime.strategies.single import Single
from dtctl.runtime.worker import Worker


class Elastic(Single):
    """The model as it is, and the same on all workers."""

    name = "ddp, elastic"

    def __init__(self, model: nn.Module, worker: Worker) -> None:
        super().__init__(model)
        if worker.backend is not None:
            for value in [*model.parameters(), *model.buffers()]:
                dist.broadcast(value.detach(), src=0)
