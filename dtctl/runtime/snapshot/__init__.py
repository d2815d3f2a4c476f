"""Snapshots of everything that a run needs to resume.

    with Saver(folder, keep=2) as saver:
        found = newest(folder)
        ...
        saver.save(step, {"model": model.state_dict()}, facts={"samples": 1200})

The package contains the format, the writers, the readers with verification, and retention. It can be used without the
Trainer. Each step has a folder, which is written under another name and then renamed, so that it exists completely or
not at all:

    step-00000100/
        model.safetensors, optimizer.safetensors, random.safetensors    one file per part (packing.py),
        model.00000.safetensors, model.00001.safetensors, ...      or one per worker (distributed_saver.py, assembly.py)
        manifest.json                         step, facts of the loop, size and digest of every file
        COMMIT                                written last: the digest of manifest.json

Nothing is pickled, and nothing is used before its digest is verified, since no format of torch detects a flipped byte.
Training pauses only while the state is copied. Nodes need no shared disk (choose.py, reshard.py, copies.py).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtctl.runtime.randomness import load_random_state, random_state
    from dtctl.runtime.snapshot.load import newest
    from dtctl.runtime.snapshot.saver import Saver
    from dtctl.runtime.snapshot.state import load_optimizer, optimizer_tree

__all__ = ["Saver", "load_optimizer", "load_random_state", "newest", "optimizer_tree", "random_state"]

_HOME = {
    "Saver": "snapshot.saver",
    "load_optimizer": "snapshot.state",
    "load_random_state": "randomness",
    "newest": "snapshot.load",
    "optimizer_tree": "snapshot.state",
    "random_state": "randomness",
}


def __getattr__(name: str) -> Any:  # verification of snapshots must not import torch
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dtctl.runtime.{_HOME[name]}"), name)
