"""Models that are too large for one worker: only rank 0 builds them, and sends them to the others block by block.

If the Trainer is given a function that makes the model, instead of the model, the other workers build it on torch's
meta device, without memory. Rank 0 sends each block right before it is sharded. So a worker never has more than its
share and one whole block, and the weights are those that one process would start with. Rank 0 builds the model in the
memory of its host. With tp, cp, ep and pp each worker has the whole model on its device until it is divided, since the
loss of the divided model is compared with that of the whole one.
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
    """Return the model on the worker's device, or on the meta device if a function makes it and it will be sharded.

    Raises:
        PlanError: its code needs values, which the meta device does not have; or a worker needs the whole model, and it
            does not fit.
    """
    if isinstance(model, nn.Module):
        return _move_model_to_device(model, worker, degrees)
    if (
        degrees.fsdp == 1 or degrees.tp * degrees.cp * degrees.ep * degrees.pp > 1
    ):  # these strategies run the whole model first
        return _move_model_to_device(model(), worker, degrees)
    if worker.is_first or worker.is_replacement:
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


def _move_model_to_device(model: nn.Module, worker: Worker, degrees: Degrees) -> nn.Module:
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


def broadcast_module_tensors(part: nn.Module, model: nn.Module, worker: Worker) -> None:
    """Send rank 0's parameters and buffers of a part of the model to every worker, except those that are sharded.

    Args:
        part: a block, or the model itself for everything that is left.
        model: the model; its modules may share parameters with the part.
        worker: this worker. All workers pass the same parts in the same order, except a replacement for a lost worker,
            which receives its shards later.
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
            here = _replace_model_tensor(model, tensor, here)
        if not worker.is_replacement:
            dist.broadcast(here.detach(), src=0)


def _give_back() -> None:
    """Return free memory of earlier blocks to the system, since glibc would keep it between remaining shards."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _replace_model_tensor(model: nn.Module, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Replace a tensor by another one, wherever the model refers to it."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new.detach(), requires_grad=old.requires_grad)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is old:
                    tensors[name] = new  # type: ignore[assignment]
    return new
