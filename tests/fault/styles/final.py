"""Final weights of a program, by which runs are compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


def save_weights(weights: Mapping[str, Any]) -> None:
    """Write the whole weights, which rank 0 has."""
    if os.environ.get("RANK", "0") == "0":
        torch.save(dict(weights), Path(os.environ.get("STYLES_FINAL", "final.pt")))


def gather_weights(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the weights of the models of a session, whole on every worker."""
    named = {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in named.items()}
    return {name.replace("module.", "").replace("_orig_mod.", ""): value.clone() for name, value in whole.items()}
