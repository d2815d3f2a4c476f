"""Short pieces of code for the linter, with the imports that all of them share."""

from __future__ import annotations

from pathlib import Path

from dtctl.lint.engine import lint_text
from dtctl.lint.model import ClusterFacts, Problem

PRELUDE = """import contextlib, os, random
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""


def problems(code: str, *, name: str = "train.py", nodes: int | None = None, bare: bool = False) -> list[Problem]:
    """What the linter says about a piece of code."""
    text = code if bare or not name.endswith(".py") else PRELUDE + code
    return lint_text(Path(name), text, cluster=ClusterFacts(nodes=nodes))


def found(code: str, **how: object) -> set[str]:
    """The rules that a piece of code breaks."""
    return {problem.rule for problem in problems(code, **how)}  # type: ignore[arg-type]
