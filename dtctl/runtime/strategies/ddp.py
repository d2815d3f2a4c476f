"""Data parallel: every worker has the whole model, and gradients are averaged while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtctl.errors import PlanError
from dtctl.runtime.options import DdpConfig
from dtctl.runtime.strategies import gradients, hooks
from dtctl.runtime.worker import Worker


class Ddp:
    """The model in torch's DistributedDataParallel.

    After the first backward pass DDP puts its buckets into the order in which gradients became ready. From three
    workers on, other buckets mean another order of additions, so the first pass after a resume would round otherwise
    than the same step of a run that was never stopped; hence `has_warm_up`.
    """

    name = "ddp"
    has_warm_up = True
    together = False
    pipeline = None
    elsewhere: Collection[str] = ()
    spread = False

    def __init__(self, model: nn.Module, config: DdpConfig, worker: Worker) -> None:
        """Wrap a model.

        Raises:
            PlanError: an option needs another device.
        """
        model = _synchronized(model, worker) if config.sync_batchnorm else model
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=True,  # gradients live in the buckets: one copy less in memory and time
        )
        self._first_must_exchange = config.static_graph
        if config.static_graph:
            self._ddp.register_forward_hook(self._begun)
        self._powersgd = hooks.install(self._ddp, config, worker)
        self._device = worker.device
        self.module: nn.Module = self._ddp
        self.inference = model
        self._wanted = gradients.wanted(model)

    def state(self) -> Mapping[str, Any]:
        """What PowerSGD carries from step to step; nothing otherwise."""
        return hooks.captured(self._powersgd) if self._powersgd is not None else {}

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Put that back."""
        if self._powersgd is None:
            return None
        if not tree:
            return "the snapshot has no state of PowerSGD for this worker"
        hooks.restore(self._powersgd, tree, self._device)
        return None

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to prepare: every worker makes the same step."""

    def accumulating(self) -> AbstractContextManager[None]:
        """Gradients are added up locally and not exchanged."""
        # Under a static graph DDP learns its order in the first pass of all, and asserts if that exchanges nothing
        # (torch 2.13). To exchange once more than needed changes nothing: averages are averaged again.
        return nullcontext() if self._first_must_exchange else self._ddp.no_sync()

    def _begun(self, *_: Any) -> None:
        self._first_must_exchange = False

    def norm(self) -> torch.Tensor:
        """The length of the gradient, which is the same on all workers."""
        return gradients.norm(self._wanted)

    def cut(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient down if it is too long."""
        gradients.cut(self._wanted, max_norm, norm)


def _synchronized(model: nn.Module, worker: Worker) -> nn.Module:
    if worker.device.type != "cuda":
        raise PlanError(
            "torch's SyncBatchNorm runs on GPUs only, and this worker has none",
            where="train.ddp.sync_batchnorm",
            hint="leave it out, or use a norm that does not look at other samples (GroupNorm, LayerNorm)",
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted
