"""Facts that must be the same on all workers, compared before training, since different code would make them hang."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees


def require_equal_facts(facts: Mapping[str, int], worker: Worker) -> None:
    """Compare numbers over all workers.

    Args:
        facts: description -> value on this worker, with the same keys everywhere.
        worker: this worker.

    Raises:
        PlanError: a value differs; raised on every worker.
    """
    if worker.backend is None:
        return
    mine = torch.tensor(list(facts.values()), dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(worker.world_size)]
    dist.all_gather(everyone, mine, group=worker.group)
    for index, what in enumerate(facts):
        ranks: dict[int, list[int]] = {}
        for rank, values in enumerate(everyone):
            ranks.setdefault(int(values[index]), []).append(rank)
        if len(ranks) > 1:
            differences = "; ".join(f"{value} on rank {', '.join(map(str, who))}" for value, who in ranks.items())
            raise PlanError(
                f"the workers do not agree on {what}: {differences}",
                where="start of the training",
                hint="nodes may have other code, data or versions; `dtctl launch` brings the same code to all",
            )


def compute_settings_checksum(config: TrainConfig) -> dict[str, int]:
    """Return a checksum of the settings that must agree on all workers, since later exchanges depend on them."""
    exchanges = (config.strategy, config.ddp, config.fsdp, config.tp, config.pipeline, config.blocks, config.precision)
    sizes = (
        config.micro_batch, tuple(config.shares.items()), config.global_batch, config.accumulate, config.clip_norm,
        config.seed,
    )  # fmt: skip
    return {"the settings (checksum)": zlib.crc32(repr((exchanges, sizes)).encode())}


def build_training_fingerprint(model: nn.Module, degrees: Degrees, *, samples: int, steps: int) -> dict[str, int]:
    """Return the facts that all workers of a run must have in common."""
    shapes = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in model.named_parameters()]
    return {
        "the length of the data": samples,
        "the number of steps": steps,
        "the mesh (checksum)": zlib.crc32(repr(degrees).encode()),
        "the model's parameters (checksum)": zlib.crc32(repr(shapes).encode()),
    }
