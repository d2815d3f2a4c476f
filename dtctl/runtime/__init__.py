"""The package that runs in the workers: training loop, data order, snapshots. Imports nothing of the control plane.

Read `loop.py` first, or `own_loop/session.py` for your own training loop. Names are imported when they are first used,
so that reading a manifest does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtctl.runtime import diagnose
    from dtctl.runtime.data_loading.datasets import TensorData, TokenFile
    from dtctl.runtime.distributed.process_group import start
    from dtctl.runtime.distributed.worker import Worker
    from dtctl.runtime.evaluation import evaluate
    from dtctl.runtime.hooks import Hook
    from dtctl.runtime.loop import Trainer
    from dtctl.runtime.main import run
    from dtctl.runtime.moe.layer import MoE
    from dtctl.runtime.own_loop.session import session
    from dtctl.runtime.stop import Outcome
    from dtctl.train.config import SnapshotConfig, TrainConfig, load
    from dtctl.train.settings import build

__all__ = [
    "Hook",
    "MoE",
    "Outcome",
    "SnapshotConfig",
    "TensorData",
    "TokenFile",
    "TrainConfig",
    "Trainer",
    "Worker",
    "build",
    "diagnose",
    "evaluate",
    "load",
    "run",
    "session",
    "start",
]

_HOME = {
    "Hook": "dtctl.runtime.hooks",
    "MoE": "dtctl.runtime.moe.layer",
    "Outcome": "dtctl.runtime.stop",
    "SnapshotConfig": "dtctl.train.config",
    "TensorData": "dtctl.runtime.data_loading.datasets",
    "TokenFile": "dtctl.runtime.data_loading.datasets",
    "TrainConfig": "dtctl.train.config",
    "Trainer": "dtctl.runtime.loop",
    "Worker": "dtctl.runtime.distributed.worker",
    "build": "dtctl.train.settings",
    "evaluate": "dtctl.runtime.evaluation",
    "load": "dtctl.train.config",
    "run": "dtctl.runtime.main",
    "session": "dtctl.runtime.own_loop.session",
    "start": "dtctl.runtime.distributed.process_group",
}


def __getattr__(name: str) -> Any:
    if name == "diagnose":
        return import_module(f"{__name__}.diagnose")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
