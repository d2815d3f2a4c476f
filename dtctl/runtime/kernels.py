"""Selection of kernels by torch's back ends, and memory layout of the model, from the configuration."""

from __future__ import annotations

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import determinism
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees


def apply_kernel_settings(config: TrainConfig, device_type: str) -> None:
    """Set torch's switches from `deterministic`, `tf32` and `cudnn_benchmark`.

    Args:
        config: settings of the run.
        device_type: cpu or cuda.

    Raises:
        PlanError: cuDNN is configured both to measure kernels and to use the same ones each time.
    """
    if determinism.is_wanted(config, device_type):  # needed by scripts that call `start` directly
        if config.cudnn_benchmark:
            raise PlanError(
                "cuDNN chooses the fastest kernels by a measurement, which does not give the same ones each time",
                where="train.cudnn_benchmark",
                hint="leave it out, or set `train.deterministic: false` and neither `exact` nor `require_exact`",
            )
        determinism.use_deterministic_kernels()
    if config.tf32:
        torch.set_float32_matmul_precision("high")
    if config.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True


def lay_out(model: nn.Module, config: TrainConfig, degrees: Degrees) -> None:
    """Store the weights of convolutions in the layout of `channels_last`; kernels then keep images in this layout.

    Args:
        model: the model, which is changed in place.
        config: settings of the run.
        degrees: degrees of the mesh.

    Raises:
        PlanError: the model is divided, and its parts cannot have this layout.
    """
    if not config.channels_last:
        return
    if degrees.dp != degrees.workers:
        raise PlanError(
            f"channels_last cannot be combined with {degrees}: torch shards parameters only as they come (torch 2.13)",
            where="train.channels_last",
            hint="leave it out, or use ddp or zero1",
        )
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
