"""Runs a program as `python train.py` does, and has it wait to be killed at a step. Not a module of any program's own.

    boot.py STEP train.py [ARGS...]        0: it is not killed

With BOOT_EXEC in the environment, this process is replaced by a new one: what Python and torch read from the
environment when they start has its effect.

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
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def note_steps() -> None:
    """Write down checksums of the losses, the gradients, the parameters and the state of each step of an optimizer.

    Those of the parameters and the optimizer's state before the first step are in a file of their own.
    """
    loaded = Path(f"loaded.{os.environ.get('RANK', '0')}")
    loaded.unlink(missing_ok=True)
    file = open(f"steps.{os.environ.get('RANK', '0')}", "w", buffering=1)  # noqa: SIM115 - for as long as this runs
    losses: list[torch.Tensor] = []
    go_backward = torch.autograd.backward
    gradients = 0

    def backward(tensors: Any, *args: Any, **named: Any) -> None:
        losses.extend([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        go_backward(tensors, *args, **named)

    def note_gradients(optimizer: Optimizer, *_: object) -> None:
        nonlocal gradients
        if not loaded.exists():
            loaded.write_text(f"{checksum(parameters_of(optimizer))} {checksum(state_of(optimizer))}")
        gradients = checksum(parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None)

    def note(optimizer: Optimizer, *_: object) -> None:
        each = ",".join(str(checksum([loss])) for loss in losses)
        file.write(f"{each} {gradients} {checksum(parameters_of(optimizer))} {checksum(state_of(optimizer))}\n")
        losses.clear()

    torch.autograd.backward = backward
    register_optimizer_step_pre_hook(note_gradients)
    register_optimizer_step_post_hook(note)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All that it has, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors that it keeps of its parameters, in their order."""
    states = [optimizer.state.get(parameter, {}) for parameter in parameters_of(optimizer)]
    values = [state[key] for state in states for key in sorted(state, key=str)]
    return [value for value in values if isinstance(value, torch.Tensor)]


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
    if os.environ.pop("BOOT_EXEC", ""):
        os.execv(sys.executable, [sys.executable, *sys.argv])
    note_steps()
    if int(sys.argv[1]):
        wait_at(int(sys.argv[1]))
    sys.argv, sys.path[0] = sys.argv[2:], os.getcwd()  # noqa: PTH109
    runpy.run_path(sys.argv[0], run_name="__main__")
