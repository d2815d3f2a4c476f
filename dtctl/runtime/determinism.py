"""Kernels of a GPU that give the same bits each time (`train.deterministic`).

Some kernels add up in the order in which their threads arrive: the backward pass of attention, scatter_add, index_add,
embedding_bag, interpolate and others. cuBLAS may divide its work differently while other streams are active, and cuDNN
and inductor choose kernels by measured speed. torch has another, slower form of most of these kernels, and refuses the
rest. On CPUs the same number of threads gives the same bits, except for a few operations.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import torch

from dtctl.train.config import TrainConfig

VARIABLES: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
"""Memory per stream with which cuBLAS gives the same bits, by NVIDIA's documentation; inductor measures nothing."""


def is_wanted(config: TrainConfig, device_type: str) -> bool:
    """Return whether the configuration requires deterministic kernels.

    Args:
        config: settings of the run.
        device_type: cpu or cuda.
    """
    if config.deterministic == "auto":
        return device_type == "cuda" and (config.require_exact or config.exact is not None)
    return config.deterministic


def use_deterministic_kernels() -> None:
    """Make torch, cuBLAS, cuDNN and inductor choose kernels that give the same bits each time.

    Call it before the first operation on a GPU, since cuBLAS reads its variable once. After that an operation without
    such a kernel raises an error, and attention uses a back end that has one.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, finds bugs
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None:  # inductor read the variable when it was imported
        inductor.deterministic = True  # type: ignore[attr-defined]
