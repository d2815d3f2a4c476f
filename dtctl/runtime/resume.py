"""From the newest good snapshot to a worker that goes on as if nothing had happened; and why not, where that cannot be.

Only rank 0 reads: nodes need no folder in common. Everyone else gets the state from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from dtctl.errors import DtctlError, PlanError, SnapshotError
from dtctl.runtime.config import Batch, TrainConfig
from dtctl.runtime.snapshot import read
from dtctl.runtime.snapshot.share import share
from dtctl.runtime.worker import Worker

BITS_DO_NOT_DEPEND_ON: Final = (
    "best",
    "checkpointing",
    "data_prefetch",
    "data_workers",
    "epochs",
    "eval_every",
    "global_batch",
    "log_every",
    "mlflow",
    "on_nan",
    "on_oom",
    "on_resize",
    "profile",
    "require_exact",
    "snapshot",
    "strategy",
    "timeout_s",
    "wandb",
)
"""Keys of the configuration: what they come to is a circumstance of its own, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the snapshots' folder had to offer; the same on all workers."""

    path: str | None
    """Of the newest good snapshot; None if there is none."""
    step: int
    facts: Mapping[str, Any]
    parts: Mapping[str, Any]
    rejected: tuple[str, ...]
    """Newer snapshots that were passed over, each with the reason."""


def find(folder: Path, worker: Worker) -> Found:
    """The newest snapshot that verifies, on every worker.

    Raises:
        SnapshotError: the folder cannot be read; on every worker.
    """
    found = share(_look(folder) if worker.is_first else None, worker)
    if found["error"]:
        raise SnapshotError(found["error"], where=found["where"], hint=found["hint"])
    del found["error"], found["where"], found["hint"]
    return Found(**{**found, "rejected": tuple(found["rejected"])})


def _look(folder: Path) -> dict[str, Any]:
    """Rank 0's part of `find`; errors are values here, so that the others hear of them instead of waiting."""
    answer: dict[str, Any] = {"error": None, "where": str(folder), "hint": None}
    answer |= {"path": None, "step": 0, "facts": {}, "parts": {}, "rejected": []}
    contents: dict[str, memoryview] = {}
    try:
        good, bad = read.newest_good(folder, contents)
        answer["rejected"] = [f"{verdict.path.name} is {verdict.status}: {'; '.join(verdict.bad)}" for verdict in bad]
        if good is not None and good.manifest is not None:
            answer |= {"path": str(good.path), "step": good.step, "facts": dict(good.manifest.facts)}
            answer["parts"] = read.parts(contents)
    except DtctlError as exc:
        answer |= {"error": exc.message, "where": exc.where, "hint": exc.hint}
    except OSError as exc:
        answer["error"] = f"the snapshots cannot be read: {exc}"
    return answer


def circumstances(config: TrainConfig, worker: Worker, batch: Batch, *, samples: int, steps: int) -> dict[str, Any]:
    """All that the bits of a training depend on, beside the state itself; JSON."""
    chosen = dataclasses.asdict(config)
    for key in BITS_DO_NOT_DEPEND_ON:
        del chosen[key]
    spread: dict[str, Any] = {"accumulate": batch.accumulate, "workers": worker.world_size}
    if config.exact == "elastic":
        spread = {"shards": batch.accumulate * batch.world_size}
    return chosen | {
        "micro_batch": batch.micro,
        **spread,
        "steps": steps,
        "samples": samples,
        "device": torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def sizes(asked: Batch, used: Batch) -> dict[str, list[int]]:
    """What a snapshot keeps of the sizes of a batch: those asked for, and those that memory allowed; JSON."""
    return {name: [of.micro, of.accumulate, of.world_size] for name, of in (("asked", asked), ("used", used))}


def batch(config: TrainConfig, asked: Batch, facts: Mapping[str, Any]) -> tuple[Batch, float]:
    """The sizes of a batch to go on with, and what to multiply the learning rate with.

    If the same is asked for as before: what memory allowed then. If only the number of workers is another: what
    `on_resize` says. Else what is asked for.

    Raises:
        PlanError: the global batch cannot be kept with this number of workers.
    """
    then, factor = facts.get("batch"), float(facts.get("rate_factor", 1.0))
    if then is None:
        return asked, factor
    now = sizes(asked, asked)["asked"]
    micro, accumulate, workers = then["used"]
    if then["asked"] == now:
        return Batch(micro=micro, accumulate=accumulate, world_size=workers), factor
    if asked.world_size == workers or config.global_batch is not None or then["asked"][:2] != now[:2]:
        return asked, factor
    total = micro * accumulate * workers
    if config.on_resize == "keep":
        return _keeping(total, asked), factor
    ratio = asked.total / total
    return asked, factor * (ratio if config.on_resize == "linear" else math.sqrt(ratio))


def _keeping(total: int, asked: Batch) -> Batch:
    """The sizes that make this global batch, in passes no larger than asked for."""
    workers = asked.world_size
    if total % workers:
        raise PlanError(
            f"the run's global batch of {total} cannot be kept with {workers} workers",
            where="train.on_resize",
            hint="use a number of workers that divides it, or `on_resize: linear` or `sqrt`",
        )
    share = total // workers
    micro = next(size for size in range(min(asked.micro, share), 0, -1) if share % size == 0)
    return Batch(micro=micro, accumulate=share // micro, world_size=workers)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What makes going on not exact, one phrase each."""
    return [f"{key} was {then.get(key)} and is {value}" for key, value in now.items() if then.get(key) != value]
