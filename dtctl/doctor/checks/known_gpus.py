"""Data of a kind of GPU, by the name that its driver reports; the advisor's file has these facts."""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any


@functools.cache
def _load_known_gpus() -> dict[str, dict[str, Any]]:
    import yaml

    # One file has the facts about GPUs for all modules.
    text = resources.files("dtctl.advise").joinpath("hardware.yaml").read_text(encoding="utf-8")
    gpus: dict[str, dict[str, Any]] = yaml.safe_load(text)["gpus"]
    return gpus


def find_gpu_datasheet(name: str) -> dict[str, Any] | None:
    """Return the data sheet of a GPU (dtctl/advise/hardware.yaml); None if the GPU is not known, or is in MIG mode.

    Args:
        name: name from the driver, such as NVIDIA A100-SXM4-40GB.
    """
    words = [word.upper() for word in re.split(r"[ /-]", name)]
    if "MIG" in words:
        return None
    best: tuple[int, dict[str, Any]] | None = None
    for entry, facts in _load_known_gpus().items():
        # A number of up to three digits is the memory (A100-40), a longer one is part of the name (RTX-4090).
        wanted = [f"{word}GB" if word.isdigit() and len(word) < 4 else word.upper() for word in entry.split("-")]
        if all(word in words for word in wanted) and (best is None or len(wanted) > best[0]):
            best = (len(wanted), facts)
    return best[1] if best else None
