"""What a training of the zoo is made of, and the options and settings that it has unless they are changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

OUT = Path(os.environ.get("ZOO_FOLDER", "."))
WIDTH = 12
OPTIONS: dict[str, Any] = {
    "dropout": 0.1, "activation": "GELU", "data_seed": 5, "samples": 60, "optimizer": "AdamW", "decay": 0.1,
    "declared": True,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "steps": 12, "micro_batch": 4, "lr": 0.01, "log_every": 5, "timeout_s": 20, "seed": 3, "clip_norm": 1.0,
    "snapshot": {"every_steps": 2, "keep": 3, "dir": "snapshots"},
}  # fmt: skip
Altered = Callable[[torch.Tensor], torch.Tensor]
"""The script's own code, which the loss goes through."""


@dataclass(slots=True)
class Parts:
    """What a Trainer is made of."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    data: Any
    more: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Trainer."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What else belongs to the state, for the digest."""
