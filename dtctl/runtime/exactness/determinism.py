"""Whether kernels of a GPU give the same bits each time (`train.deterministic`), and what may be promised if not.

Some add up in the order in which their threads come along: the backward pass of attention, scatter_add, index_add,
embedding_bag, interpolate and others; cuBLAS may share its work out in another way when streams are at work beside it,
cuDNN and inductor choose kernels by how fast they were. torch has another form of most of them, which is slower, and
refuses the rest. On CPUs the same number of threads gives the same bits, but for few operations.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import torch

from dtctl.runtime.distributed.worker import Worker
from dtctl.train.config import TrainConfig

VARIABLES: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
"""cuBLAS's own memory per stream, as NVIDIA's documentation wants it for the same bits; inductor measures nothing."""
EXCHANGE: Final = ("NCCL_ALGO", "NCCL_PROTO")
"""What NCCL chooses by where the workers are, and by which it adds up in another order."""


def is_wanted(config: TrainConfig, device_type: str) -> bool:
    """Whether the configuration asks for deterministic kernels.

    Args:
        config: of the training.
        device_type: cpu or cuda.
    """
    if config.deterministic == "auto":
        return device_type == "cuda" and (config.require_exact or config.exact is not None)
    return config.deterministic


def apply() -> None:
    """Have torch, cuBLAS, cuDNN and inductor choose kernels that give the same bits each time.

    To be called before the first operation on a GPU, as cuBLAS looks at its variable once. From then on an operation
    that has no such kernel raises; attention takes a back end that has one.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, finds bugs
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None:  # it has read the variable already
        inductor.deterministic = True  # type: ignore[attr-defined]


def doubt(worker: Worker, *, elastic: bool) -> str | None:
    """Why the same state may still give other bits on this worker's device; None if it does not.

    Args:
        worker: this worker.
        elastic: whether gradients are added up by this program, in the order of shards, and not by NCCL.
    """
    if worker.device.type != "cuda":
        return None
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        return (
            "kernels of a GPU may add up in another order each time "
            "(`train.deterministic: true` rules that out, and is slower)"
        )
    unset = [name for name in EXCHANGE if not os.environ.get(name)]
    if worker.world_size > worker.local_world_size and not elastic and unset:
        return (
            "NCCL may add up in another order on other nodes "
            f"(set {' and '.join(unset)} in `job.env`, such as Ring and Simple, or `train.exact: elastic`)"
        )
    return None
