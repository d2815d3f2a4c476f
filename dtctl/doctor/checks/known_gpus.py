"""Data of a kind of GPU, by the name that its driver gives it; such facts have one home, in the advisor."""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any


@functools.cache
def _known() -> dict[str, dict[str, Any]]:
    import yaml

    # Facts about GPUs are in one file for all their users.
    text = resources.files("dtctl.advise").joinpath("hardware.yaml").read_text(encoding="utf-8")
    gpus: dict[str, dict[str, Any]] = yaml.safe_load(text)["gpus"]
    return gpus


def normal(name: str) -> dict[str, Any] | None:
    """Return what a GPU of this name can do (dtctl/advise/hardware.yaml); None where that is not known, and with MIG.

    Args:
        name: as the driver gives it, such as NVIDIA A100-SXM4-40GB.
    """
    words = [word.upper() for word in re.split(r"[ /-]", name)]
    if "MIG" in words:
        return None
    best: tuple[int, dict[str, Any]] | None = None
    for entry, facts in _known().items():
        # Up to three digits are its memory (A100-40), more of them its name (RTX-4090).
        wanted = [f"{word}GB" if word.isdigit() and len(word) < 4 else word.upper() for word in entry.split("-")]
        if all(word in words for word in wanted) and (best is None or len(wanted) > best[0]):
            best = (len(wanted), facts)
    return best[1] if best else None
