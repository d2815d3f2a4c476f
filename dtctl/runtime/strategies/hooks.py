"""Communication hooks: the form of gradients on the wire between data parallel workers.

bf16 and fp16 halve the bytes and round each gradient. PowerSGD sends a low-rank approximation, and each worker adds the
remainder to its next gradient (Vogels et al. 2019). These remainders are state, so snapshots must keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker
from dtctl.train.config import DdpConfig

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

MIB: Final = 1 << 20
FIRST_BUCKET: Final = MIB
"""Bytes of DDP's first bucket; smaller than the others, so that the exchange begins early."""
EXACT_STEPS: Final = 2
"""Steps before PowerSGD begins, after which DDP must have sorted its buckets."""
TABLES: Final = ("error_dict", "p_memory_dict", "q_memory_dict")


def register_communication_hook(
    ddp: DistributedDataParallel, config: DdpConfig, worker: Worker
) -> powerSGD_hook.PowerSGDState | None:
    """Register the hook that the configuration names.

    Returns:
        PowerSGD's state; None with any other hook.

    Raises:
        PlanError: the hook does not work with this backend and model.
    """
    if config.comm_hook == "none":
        return None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if config.comm_hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.comm_hook == "bf16":
        # The hook gets another name, since torch refuses it with gloo because of its name, although it works.
        ddp.register_comm_hook(None, lambda _, bucket: default_hooks.bf16_compress_hook(None, bucket))  # type: ignore[arg-type]
    elif config.comm_hook == "powersgd":
        size = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
        # Its exchanges follow each other in callbacks, whose order gloo does not keep between buckets, so that it
        # aborts.
        if worker.device.type == "cpu" and size > min(config.bucket_mb * MIB, FIRST_BUCKET):
            raise PlanError(
                "PowerSGD with several buckets aborts with gloo, and this model needs more than one",
                where="train.ddp.comm_hook",
                hint="use bf16 on CPUs",
            )
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.powersgd_rank,
            start_powerSGD_iter=EXACT_STEPS,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return state
    return None


def clear_powersgd_tables(state: powerSGD_hook.PowerSGDState) -> None:
    """Forget the remainders after gradients that are not finite, since they would make all later ones invalid.

    All workers do this at the same step. The iteration counter continues.
    """
    for name in TABLES:
        getattr(state, name).clear()


def capture_powersgd_state(state: powerSGD_hook.PowerSGDState) -> dict[str, Any]:
    """Return this worker's state of PowerSGD as a tree of tensors."""
    numpy = state.rng.get_state(legacy=False)["state"]
    tree: dict[str, Any] = {
        name: {str(bucket): tensor for bucket, tensor in getattr(state, name).items()} for name in TABLES
    }
    return {**tree, "iter": state.iter, "rng": torch.tensor([*numpy["key"].tolist(), numpy["pos"]], dtype=torch.int64)}


def restore_powersgd_state(state: powerSGD_hook.PowerSGDState, tree: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `capture_powersgd_state` returned."""
    for name in TABLES:
        # Copied, since loaded tensors may have any alignment, on which the rounding of matrix products depends.
        setattr(state, name, {int(bucket): tensor.to(device, copy=True) for bucket, tensor in tree[name].items()})
    state.iter = tree["iter"]
    *keys, position = tree["rng"].tolist()
    state.rng.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
