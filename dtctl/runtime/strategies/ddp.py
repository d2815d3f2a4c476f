"""Data parallel: every worker has the whole model, and gradients are averaged while the backward pass still runs."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtctl.runtime.worker import Worker


class Ddp:
    """The model in torch's DistributedDataParallel.

    After the first backward pass DDP puts its buckets into the order in which gradients became ready. From three
    workers on, other buckets mean another order of additions, so the first pass after a resume would round otherwise
    than the same step of a run that was never stopped; hence `has_warm_up`.
    """

    name = "ddp"
    has_warm_up = True

    def __init__(self, model: nn.Module, worker: Worker) -> None:
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # gradients live in the buckets: one copy less in memory and time
        )
        self.module: nn.Module = self._ddp

    def accumulating(self) -> AbstractContextManager[None]:
        """Gradients are added up locally and not exchanged."""
        return self._ddp.no_sync()
