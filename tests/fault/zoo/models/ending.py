"""What a training leaves: its progress, by which it is killed, and digests of all that it ends with."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.fault.zoo.models.parts import OUT


def tick(rank: int) -> None:
    """Say that a pass begins, and take a moment: a training of 30 ms is hard to kill in the middle."""
    if rank == 0:
        with (OUT / "progress").open("ab", buffering=0) as file:
            file.write(b".")
    time.sleep(0.003)


def leave(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> None:
    """Write the digests of all that a training ends with, as far as this worker has it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = {
        "parameters": {name: local(value) for name, value in model.named_parameters()},
        "buffers": {name: local(value) for name, value in model.named_buffers()},
        "attributes": {
            f"{name}.{key}": value
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if not key.startswith("_") and isinstance(value, int | float | list | tuple)
        },
        "optimizer state": {
            names.get(id(key), "?"): {name: local(value) for name, value in values.items()}
            for key, values in optimizer.state.items()
        },
        "optimizer groups": [
            {key: local(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ],
        "random": [torch.get_rng_state(), random.getstate(), str(np.random.get_state())],
        **{name: _state(value) for name, value in kept.items()},
    }
    (OUT / f"final.{rank}.json").write_text(json.dumps({name: digest(part) for name, part in parts.items()}))


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    return value.state_dict() if hasattr(value, "state_dict") else value


def digest(tree: Any) -> str:
    """Of values, names and bytes."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = local(value).detach().cpu().contiguous()
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            found.update(b"[")
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(tree)
    return found.hexdigest()[:16]
