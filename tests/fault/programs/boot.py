"""Runs a program as `python train.py` does, and has it wait to be killed at a step. Not a module of any program's own.

    boot.py STEP train.py [ARGS...]        0: it is not killed

After so many steps of its optimizers, and once a snapshot is there, it says so in the file `ready` and stands still:
whoever kills it then does so at the same step each time.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def note_steps() -> None:
    """Write down a line for each step of an optimizer: checksums of the losses, the gradients and the parameters."""
    file = open(f"steps.{os.environ.get('RANK', '0')}", "w", buffering=1)  # noqa: SIM115 - for as long as this runs
    losses: list[torch.Tensor] = []
    go_backward = torch.autograd.backward
    gradients = 0

    def backward(tensors: Any, *args: Any, **named: Any) -> None:
        losses.extend([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        go_backward(tensors, *args, **named)

    def note_gradients(optimizer: Optimizer, *_: object) -> None:
        nonlocal gradients
        gradients = checksum(parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None)

    def note(optimizer: Optimizer, *_: object) -> None:
        file.write(f"{checksum(losses)} {gradients} {checksum(parameters_of(optimizer))}\n")
        losses.clear()

    torch.autograd.backward = backward
    register_optimizer_step_pre_hook(note_gradients)
    register_optimizer_step_post_hook(note)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All that it has, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """One number for the bytes of this worker's parts of some tensors."""
    crc = 0
    for tensor in tensors:
        value: Any = tensor.detach()
        value = value.to_local() if hasattr(value, "to_local") else value
        value = value.to_dense() if value.layout is not torch.strided else value
        crc = zlib.crc32(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def wait_at(step: int) -> None:
    """Stand still after some steps, as soon as a snapshot can be gone on from."""
    done = 0

    def stand(*_: object) -> None:
        nonlocal done
        done += 1
        if done < step or os.environ.get("RANK", "0") != "0":
            return
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            if any(name.startswith("step-") for name in os.listdir("snapshots")):  # noqa: PTH208 - as little as possible
                with open("ready", "wb", buffering=0) as file:
                    file.write(b".")
                time.sleep(600)
            time.sleep(0.001)

    register_optimizer_step_post_hook(stand)


if __name__ == "__main__":
    note_steps()
    if int(sys.argv[1]):
        wait_at(int(sys.argv[1]))
    sys.argv, sys.path[0] = sys.argv[2:], os.getcwd()  # noqa: PTH109
    runpy.run_path(sys.argv[0], run_name="__main__")
