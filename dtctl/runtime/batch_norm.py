"""BatchNorm on several workers, the only layer whose result depends on the division of a batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dtctl.errors import PlanError


def require_synchronizable(model: nn.Module, device: torch.device) -> None:
    """Refuse a model whose SyncBatchNorm cannot run.

    Args:
        model: the user's model.
        device: device of a worker that has peers.

    Raises:
        PlanError: the model has a SyncBatchNorm, and the worker has no GPU.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names and device.type == "cpu":
        raise PlanError(
            "the model has SyncBatchNorm, which runs on GPUs only, and this worker has none",
            where=f"torch.nn.SyncBatchNorm ({names[0]} of the model)",
            hint="convert the model only where there are GPUs, or use a norm without statistics over samples "
            "(GroupNorm, LayerNorm)",
        )


def describe_batch_norm(model: nn.Module, replicas: int) -> list[str]:
    """Return a line for the log if statistics of a model's batches differ from those of one process.

    Args:
        model: the model as it is trained.
        replicas: number of parts into which a global batch is divided.
    """
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    if replicas == 1 or not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"note: BatchNorm ({names[0]}{more}) computes means over the samples of one worker, so {replicas} workers do "
        "not train what one process trains with the same global batch: use torch.nn.SyncBatchNorm "
        "(`train.ddp.sync_batchnorm: true`, on GPUs), GroupNorm or LayerNorm"
    ]
