"""Choice of kernels by torch's back ends, and memory layout of the model, by the configuration."""

from __future__ import annotations

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import determinism
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees


def choose(config: TrainConfig, device_type: str) -> None:
    """Set torch's switches to `deterministic`, `tf32` and `cudnn_benchmark`.

    Args:
        config: of the training.
        device_type: cpu or cuda.

    Raises:
        PlanError: cuDNN is to measure kernels, and to take the same ones each time.
    """
    if determinism.is_wanted(config, device_type):  # for scripts that call `start` themselves
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
    """Lay out the weights of convolutions as `channels_last` sets; kernels then pass images on in that form.

    Args:
        model: changed in place.
        config: of the training.
        degrees: of the mesh.

    Raises:
        PlanError: the model is divided, and its parts have no such form.
    """
    if not config.channels_last:
        return
    if degrees.dp != degrees.workers:
        raise PlanError(
            f"channels_last does not go with {degrees}: torch shards parameters only as they come (torch 2.13)",
            where="train.channels_last",
            hint="leave it out, or use ddp or zero1",
        )
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
