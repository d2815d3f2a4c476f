"""Data parallel: every worker has the whole model, and gradients are averaged while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dtctl.errors import PlanError
from dtctl.runtime.options import DdpConfig
from dtctl.runtime.strategies import gradients
from dtctl.runtime.worker import Worker

MIB: Final = 1 << 20
FIRST_BUCKET: Final = MIB
"""Of DDP, in bytes; smaller than the others, so that the exchange begins early."""


class Ddp:
    """The model in torch's DistributedDataParallel.

    After the first backward pass DDP puts its buckets into the order in which gradients became ready. From three
    workers on, other buckets mean another order of additions, so the first pass after a resume would round otherwise
    than the same step of a run that was never stopped; hence `has_warm_up`.
    """

    name = "ddp"
    has_warm_up = True
    together = False
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
        _install(self._ddp, config, worker)
        self.module: nn.Module = self._ddp
        self.inference = model
        self.inexact: str | None = None
        if config.comm_hook == "powersgd":
            self.inexact = "the errors that PowerSGD carries from step to step are not in snapshots"
        self._wanted = gradients.wanted(model)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to prepare: every worker makes the same step."""

    def accumulating(self) -> AbstractContextManager[None]:
        """Gradients are added up locally and not exchanged."""
        if self._first_must_exchange:
            # Under a static graph DDP learns its order from the first pass, and asserts if nothing is exchanged in it
            # (torch 2.13). To exchange once more than needed changes nothing: averages are averaged again.
            self._first_must_exchange = False
            return nullcontext()
        return self._ddp.no_sync()

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """Measure the gradient, which is the same on all workers, and cut it if it is too long."""
        total = gradients.norm(self._wanted)
        gradients.cut(self._wanted, max_norm, total)
        return total


def _synchronized(model: nn.Module, worker: Worker) -> nn.Module:
    if worker.device.type != "cuda":
        raise PlanError(
            "torch's SyncBatchNorm runs on GPUs only, and this worker has none",
            where="train.ddp.sync_batchnorm",
            hint="leave it out, or use a norm that does not look at other samples (GroupNorm, LayerNorm)",
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def _install(ddp: DistributedDataParallel, config: DdpConfig, worker: Worker) -> None:
    """Register the hook that gives gradients another form on the wire."""
    if config.comm_hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.comm_hook == "bf16":
        ddp.register_comm_hook(None, _as_bf16)
    elif config.comm_hook == "powersgd":
        size = sum(parameter.numel() * parameter.element_size() for parameter in gradients.wanted(ddp))
        one_bucket = min(config.bucket_mb * MIB, FIRST_BUCKET)
        # Its collectives follow each other in callbacks, whose order gloo does not keep between buckets: it aborts.
        if worker.device.type == "cpu" and size > one_bucket:
            raise PlanError(
                "PowerSGD with several buckets aborts with gloo, and this model needs more than one",
                where="train.ddp.comm_hook",
                hint="use bf16 on CPUs",
            )
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=config.powersgd_rank, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _as_bf16(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The hook of torch under another name: it refuses gloo by its own name, and works there."""
    return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
