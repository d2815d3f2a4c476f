"""Kernels of a GPU that give the same bits each time (`train.deterministic`).

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

from dtctl.train.config import TrainConfig

VARIABLES: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
"""cuBLAS's memory per stream, as NVIDIA's documentation requires it for the same bits; inductor measures nothing."""


def is_wanted(config: TrainConfig, device_type: str) -> bool:
    """Return whether the configuration asks for deterministic kernels.

    Args:
        config: of the training.
        device_type: cpu or cuda.
    """
    if config.deterministic == "auto":
        return device_type == "cuda" and (config.require_exact or config.exact is not None)
    return config.deterministic


def use_deterministic_kernels() -> None:
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
