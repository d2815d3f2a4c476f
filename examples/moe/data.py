"""Text that every machine has: the sources of Python's standard library, as a file of byte tokens."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np

TRAIN_BYTES = 3 << 20
VALIDATION_BYTES = 1 << 16


def folder() -> Path:
    """Where this node keeps the tokens: the run's folder, or the working folder without dtctl."""
    return Path(os.environ.get("DTCTL_RUN_DIR", ".")) / "data"


def prepare(target: Path) -> None:
    """Write `train.bin` and `validation.bin` (uint16, as nanoGPT lays them out) unless they are there."""
    if (target / "train.bin").exists() and (target / "validation.bin").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))  # the same order everywhere
    text = b"\n".join(module.read_bytes() for module in modules)
    text = text.replace(b"    ", b"\t")[: TRAIN_BYTES + VALIDATION_BYTES]  # one token per level, not four
    tokens = np.frombuffer(text, dtype=np.uint8).astype("<u2")
    for name, part in (("validation", tokens[:VALIDATION_BYTES]), ("train", tokens[VALIDATION_BYTES:])):
        draft = target / f".{name}.{os.getpid()}"
        part.tofile(draft)
        draft.replace(target / f"{name}.bin")  # whole or not at all, should this be killed
