"""What a node imports beforehand, going by the script."""

from __future__ import annotations

import pytest

from dtctl import runtime
from dtctl.plan.preload import TRAINING, WITH_TORCH, find_preload_modules


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import torch", ("torch", WITH_TORCH)),
        ("import torch.distributed as dist, numpy as np", ("torch.distributed", "numpy", WITH_TORCH)),
        ("from torch.distributed.fsdp import fully_shard", ("torch.distributed.fsdp", WITH_TORCH)),
        ("from dtctl.runtime import Worker", ("dtctl.runtime", WITH_TORCH)),
        ("from dtctl.runtime import Trainer, run", (*TRAINING.values(), WITH_TORCH)),
        ("from dtctl import runtime, errors", ("dtctl.runtime", WITH_TORCH)),
        ("try:\n    import numpy\nexcept ImportError:\n    numpy = None", ("numpy",)),
        ("import torchvision, numpylike, os", ()),
        ("def f():\n    import torch", ()),
        ("from . import torch", ()),
        ("this is no Python", ()),
        ("import torch\n\0", ()),
        ("import torch\nx = 1" + " + 1" * 5000, ("torch", WITH_TORCH)),
        ("import torch\nx = " + "not " * 50_000 + "1", ()),
        ("", ()),
    ],
)
def test_slow_modules_that_the_script_imports_at_its_top(source: str, wanted: tuple[str, ...]) -> None:
    assert find_preload_modules(source) == wanted


def test_the_modules_of_a_training_are_those_that_its_names_come_from() -> None:
    assert {name: runtime._HOME[name] for name in TRAINING} == TRAINING
