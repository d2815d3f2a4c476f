"""Models that are too large for one worker: they are built on rank 0 alone, and reach the others block by block.

Who gives the Trainer a function that makes the model, instead of the model, lets the other workers build it on torch's
meta device, without memory. Each block then comes from rank 0 right before it is sharded, so that a worker has its
share and one whole block at most, and the weights are those that one process begins with. Rank 0 builds the model in
its host's memory. With tp, cp, ep and pp each worker has the whole model on its device until it was divided, since its
loss in one piece is what the divided one is held against.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker
from dtctl.train.mesh import Degrees


def build(model: nn.Module | Callable[[], nn.Module], worker: Worker, degrees: Degrees) -> nn.Module:
    """Return the model, on the worker's device; on none yet, if it was given as a function and will be sharded.

    Raises:
        PlanError: its code needs values, which the meta device does not have; or the whole model does not fit, where
            each worker needs it.
    """
    if isinstance(model, nn.Module):
        return _brought(model, worker, degrees)
    if (
        degrees.fsdp == 1 or degrees.tp * degrees.cp * degrees.ep * degrees.pp > 1
    ):  # these try the whole model out first
        return _brought(model(), worker, degrees)
    if worker.is_first or worker.replaces:
        return model()
    try:
        with torch.device("meta"):
            return model()
    except (RuntimeError, NotImplementedError) as exc:
        raise PlanError(
            f"the model cannot be built on the meta device: {exc}",
            where="the function that makes the model",
            hint="give the Trainer the model itself, if one worker has the memory for all of it",
        ) from exc


def _brought(model: nn.Module, worker: Worker, degrees: Degrees) -> nn.Module:
    """Return the whole model on the worker's device."""
    try:
        return model.to(worker.device)
    except torch.OutOfMemoryError as exc:
        gib = sum(value.numel() * value.element_size() for value in model.parameters()) / 2**30
        divided = degrees.tp * degrees.cp * degrees.ep * degrees.pp > 1
        raise PlanError(
            f"the whole model, {gib:.1f} GiB, does not fit on {worker.device}"
            + (f", and with {degrees} each worker has it before it is divided" if divided else ""),
            where="train.strategy",
            hint="fsdp and hsdp never have it whole, if the Trainer is given the function that makes it",
        ) from exc


def bring(part: nn.Module, model: nn.Module, worker: Worker) -> None:
    """Give every worker rank 0's parameters and buffers of a part of the model, except what is sharded already.

    Args:
        part: a block, or the model itself for what is left.
        model: the model; its modules may share parameters with the part.
        worker: this worker. All of them bring the same parts in the same order, but for one that takes the place of a
            lost one, and is given its shards.
    """
    _give_back()
    for tensor in [*part.parameters(), *part.buffers()]:
        if hasattr(tensor, "device_mesh"):
            continue
        here = tensor
        if tensor.device != worker.device:
            here = torch.empty_like(tensor, device=worker.device)
            if not tensor.is_meta:
                here.copy_(tensor.detach())
            here = _replaced(model, tensor, here)
        if not worker.replaces:
            dist.broadcast(here.detach(), src=0)


def _give_back() -> None:
    """Return what earlier blocks have left free to the system: between shards that stay, glibc would keep it all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _replaced(model: nn.Module, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Put a tensor in the place of another, wherever the model has that."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new.detach(), requires_grad=old.requires_grad)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is old:
                    tensors[name] = new  # type: ignore[assignment]
    return new
