"""Resume from the newest good snapshot; and the reasons, where that is not possible.

Nodes need no folder in common: what one lacks it gets from those that have it (snapshot/choose.py, reshard.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dtctl import names
from dtctl.errors import PlanError, SnapshotError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness.account import EVERYONE
from dtctl.runtime.snapshot.assembly import TreeEntry
from dtctl.runtime.snapshot.choose import Chosen, choose
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.snapshot.reshard import Wanted, deliver
from dtctl.runtime.snapshot.storage.place import Place
from dtctl.runtime.telemetry.progress import Progress
from dtctl.train.batch import Batch
from dtctl.train.config import TrainConfig

MARKER: Final = "last-snapshot.json"
"""File in the run's folder on a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Newest good snapshot in the snapshots' folders; the same on all workers."""

    path: str | None
    """Path of the newest good snapshot; None if there is none."""
    step: int
    facts: Mapping[str, Any]
    rejected: tuple[str, ...]
    """Newer snapshots that were passed over, each with the reason."""
    chosen: Chosen
    """Parts of it that have been read, and by which ranks."""
    is_in_memory: bool = False
    """True if it lies in the memory of the nodes."""

    def parts(self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker) -> dict[str, Any]:
        """Return its parts, once, as far as this worker needs them; collective over all workers.

        Args:
            model: as this worker has it.
            optimizer: of this worker's parameters.
            worker: this worker.
        """
        return deliver(self.chosen, _wanted(model, optimizer, worker, self.facts.get("late", ())), worker)


def find(folder: Place, worker: Worker, *, memory: Path | None = None) -> ResumePoint:
    """Return the newest snapshot that all workers together can read and verify.

    Those on disk are not read if one in memory is as new as the newest that was committed there.

    Args:
        folder: of those on disk.
        worker: this worker.
        memory: of those in memory, if there are any.

    Raises:
        SnapshotError: the folder cannot be read, or what it has is damaged, all of it; on every worker.
    """
    near = _point(choose(memory, worker), is_in_memory=True) if memory is not None else None
    if near is not None and near.path is not None and near.step >= _committed(folder, worker):
        return near
    rejected = () if near is None else near.rejected
    try:
        point = _point(choose(folder, worker))
        if point.path is None and point.rejected:
            raise SnapshotError(
                "this run has trained before, and none of its snapshots is good: " + "; ".join(point.rejected),
                where=str(folder),
                hint="bring back what is missing, or start over with another `train.snapshot.dir`",
            )
        if point.path is None:
            _require_beginning(folder, worker)
    except SnapshotError:
        if near is None or near.path is None:
            raise
        return near
    if near is not None and near.path is not None and near.step >= point.step:
        return near
    return replace(point, rejected=(*rejected, *point.rejected))


def _point(chosen: Chosen, *, is_in_memory: bool = False) -> ResumePoint:
    step, facts = (chosen.manifest.step, chosen.manifest.facts) if chosen.manifest is not None else (0, {})
    return ResumePoint(
        path=chosen.path, step=step, facts=facts, rejected=chosen.rejected, chosen=chosen, is_in_memory=is_in_memory
    )


def marker(folder: Place, progress: Progress) -> Callable[[int], None]:
    """Return a function that notes committed snapshots: in the run's own folder on this node, and for the launcher.

    The launcher passes the step on to the next attempt, in case this node and its folder are lost.
    """
    run_dir = os.environ.get(names.RUN_DIR)

    def note(step: int) -> None:
        progress.committed(step)
        if run_dir:
            draft = Path(run_dir) / f"{MARKER}.part"
            with contextlib.suppress(OSError):  # the snapshot is there; this is only what is known of it
                draft.write_text(json.dumps({"dir": str(folder), "step": step}))
                draft.replace(draft.with_name(MARKER))

    return note


def _committed(folder: Place, worker: Worker) -> int:
    """Return the newest step of this run that a worker has recorded as committed, or 0; collective over all workers."""
    mine = int(os.environ.get(names.COMMITTED_STEP, "0"))
    with contextlib.suppress(OSError, ValueError, KeyError):
        kept = json.loads((Path(os.environ[names.RUN_DIR]) / MARKER).read_text())
        mine = int(kept["step"]) if kept["dir"] == str(folder) else mine
    known: list[int] = gathered_json(mine, worker)
    return max(known)


def _require_beginning(folder: Place, worker: Worker) -> None:
    """See that a run without snapshots has none to miss; collective over all workers.

    Raises:
        SnapshotError: an earlier attempt of this run has committed one.
    """
    step = _committed(folder, worker)
    if step:
        raise SnapshotError(
            f"this run has written a snapshot of step {step}, and there is none now",
            where=str(folder),
            hint="bring it back (a disk that is not mounted, a node that is gone?), or launch a new run to start over; "
            "`train.snapshot.replicas: 1` keeps a copy on another node",
        )


def _wanted(model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker, late: Collection[str]) -> Wanted:
    """Return what a worker needs: its own stretch of what it has of model and optimizer, and of other parts all."""
    own, parameters = model.state_dict(), dict(model.named_parameters())
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}

    def wanted(part: str, leaf: TreeEntry) -> torch.Tensor | bool:
        if part == "model":
            held_here: torch.Tensor | bool = own.get(leaf.path[0], leaf.path[0] in late)
            return held_here
        if part == "ema":
            return parameters.get(leaf.path[0], False)
        if part == "optimizer" and leaf.path[0] == "state":
            parameter = parameters.get(leaf.path[1])
            return parameter if parameter is not None and parameter in held else False
        if part == "strategy":
            return leaf.path[0] == str(worker.rank)
        if part == "local":
            return leaf.path[0] in (EVERYONE, str(worker.rank))
        return True

    return wanted


def sizes(asked: Batch, used: Batch) -> dict[str, list[int]]:
    """Return what a snapshot keeps of the sizes of a batch: those asked for, and those that memory allowed; JSON."""
    return {name: [of.micro, of.accumulate, of.parts] for name, of in (("asked", asked), ("used", used))}


def batch(config: TrainConfig, asked: Batch, facts: Mapping[str, Any]) -> tuple[Batch, float]:
    """Return the batch sizes to continue with, and the factor of the learning rate.

    If the configuration asks for the same sizes as before, return those that memory allowed then. If only the number of
    workers has changed, follow `on_resize`. Else return the configured sizes.

    Raises:
        PlanError: the global batch cannot be kept with this number of workers.
    """
    then, factor = facts.get("batch"), float(facts.get("rate_factor", 1.0))
    if then is None:
        return asked, factor
    now = sizes(asked, asked)["asked"]
    micro, accumulate, parts = then["used"]
    if then["asked"] == now:
        return replace(asked, micro=micro, accumulate=accumulate), factor
    if asked.parts == parts or config.global_batch is not None or then["asked"][:2] != now[:2]:
        return asked, factor
    total = micro * accumulate * parts
    if config.on_resize == "keep":
        return _keeping(total, asked), factor
    ratio = asked.total / total
    return asked, factor * (ratio if config.on_resize == "linear" else math.sqrt(ratio))


def _keeping(total: int, asked: Batch) -> Batch:
    """Return the sizes that make this global batch, in passes no larger than asked for."""
    parts = asked.parts
    if total % parts:
        workers = f"{parts} workers" if not asked.shares else f"shares of {parts}"
        raise PlanError(
            f"the run's global batch of {total} cannot be kept with {workers}",
            where="train.on_resize",
            hint="use a number of workers that divides it, or `on_resize: linear` or `sqrt`",
        )
    share = total // parts
    micro = next(size for size in range(min(asked.micro, share), 0, -1) if share % size == 0)
    return replace(asked, micro=micro, accumulate=share // micro)
