"""Shares of a global batch for workers with unequal GPUs."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence

import torch

from dtctl import names
from dtctl.errors import PlanError
from dtctl.runtime.console import say
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Coordinate, Degrees


def gather_shares(config: TrainConfig, worker: Worker) -> list[int]:
    """Return the number of micro batches of each rank in a pass; empty if no shares are configured. Collective.

    Raises:
        PlanError: a worker's name matches several shares, or a share matches no worker; raised on every worker. After a
            restart, which may use other nodes, an unmatched share is only reported in a line of output.
    """
    if not config.shares:
        return []
    gpu = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else ""
    facts: list[list[str]] = gather_json([gpu, os.environ.get(names.NODE, "")], worker)
    matches = [_find_matching_shares(config.shares, *rank_facts) for rank_facts in facts]
    for rank, keys in enumerate(matches):
        if len({config.shares[key] for key in keys}) > 1:
            place = " on ".join(filter(None, facts[rank]))
            raise _build_shares_error(f"{' and '.join(keys)} both mean rank {rank} ({place})")
    matched = {key for keys in matches for key in keys}
    unused = [key for key in config.shares if key not in matched]
    is_restart = os.environ.get(names.ATTEMPT, "0") != "0"
    if unused and not is_restart:
        known = ", ".join(sorted({*itertools.chain(*facts)} - {""}))
        raise _build_shares_error(
            f"{unused[0]} is the name of no GPU and no node", f"they are called {known}" if known else None
        )
    if unused and worker.is_first:
        say(f"warning: train.shares: no GPU and no node is called {', '.join(unused)} any more")
    return [config.shares[keys[0]] if keys else 1 for keys in matches]


def compute_replica_shares(shares: Sequence[int], degrees: Degrees) -> tuple[int, ...]:
    """Return the share of each part of a batch; several workers may process one part together.

    Raises:
        PlanError: workers of one part have different shares.
    """
    if not shares:
        return ()
    parts: list[set[int]] = [set() for _ in range(degrees.data)]
    for rank, share in enumerate(shares):
        parts[Coordinate(degrees=degrees, rank=rank).data].add(share)
    if any(len(part) > 1 for part in parts):
        raise _build_shares_error(f"workers that have the same samples (mesh {degrees}) have different shares")
    return tuple(part.pop() for part in parts)


def _find_matching_shares(shares: Mapping[str, int], gpu: str, node: str) -> list[str]:
    # Only whole words match: a node may be called `a10`, and a GPU A100.
    return [key for key in shares if key == node or re.search(rf"(?<!\w){re.escape(key)}(?!\w)", gpu, re.IGNORECASE)]


def _build_shares_error(reason: str, hint: str | None = None) -> PlanError:
    return PlanError(reason, where="train.shares", hint=hint)
