"""Choice of the snapshot that a run resumes from, and the errors that explain why none can be used.

Nodes need no shared folder: a node gets the files that it lacks from other nodes (snapshot/choose.py, reshard.py).
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
from dtctl.runtime.exactness.program_fingerprint import EVERYONE
from dtctl.runtime.snapshot.assembly import TensorEntry
from dtctl.runtime.snapshot.choose import ChosenSnapshot, choose_newest_snapshot
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.reshard import Wanted, reshard_snapshot_parts
from dtctl.runtime.snapshot.storage.place import Place
from dtctl.runtime.telemetry.progress import ProgressFile
from dtctl.train.batch import BatchSizes
from dtctl.train.config import TrainConfig

MARKER: Final = "last-snapshot.json"
"""File in the run's folder on a node."""
TRAINER: Final = "Trainer"
SESSION: Final = "session"
"""Loops that make snapshots, as the fact `loop` of a manifest names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Newest good snapshot in the snapshots' folders; the same on all workers."""

    path: str | None
    """Path of the newest good snapshot; None if there is none."""
    step: int
    facts: Mapping[str, Any]
    rejected: tuple[str, ...]
    """Newer snapshots that were passed over, each with the reason."""
    chosen: ChosenSnapshot
    """The choice among all snapshots, with the files that this worker has read."""
    is_in_memory: bool = False
    """True if the snapshot lies in the memory of the nodes."""

    def parts(self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker) -> dict[str, Any]:
        """Return the parts of the snapshot that this worker needs; call it once. Collective over all workers.

        Args:
            model: the model as this worker has it.
            optimizer: optimizer of this worker's parameters.
            worker: this worker.
        """
        return reshard_snapshot_parts(
            self.chosen, _make_wanted_filter(model, optimizer, worker, self.facts.get("late", ())), worker
        )


def find_resume_point(folder: Place, worker: Worker, *, memory: Path | None = None, loop: str = TRAINER) -> ResumePoint:
    """Return the newest snapshot that all workers together can read and verify.

    Snapshots on disk are not read if one in memory is as new as the newest that was committed to disk.

    Args:
        folder: folder of the snapshots on disk.
        worker: this worker.
        memory: folder of the snapshots in memory; None if there are none.
        loop: the loop that resumes, TRAINER or SESSION.

    Raises:
        SnapshotError: the folder cannot be read, all of its snapshots are damaged, or the other loop made them; raised
            on every worker.
    """
    point = _find_newest_point(folder, worker, memory)
    made_by = point.facts.get("loop", TRAINER)
    if point.path is not None and made_by != loop:
        raise SnapshotError(
            f"this snapshot was made by a {made_by}, and a {loop} cannot continue from it: they order "
            "the samples differently",
            where=point.path,
            hint="give the snapshots of this program another folder (`train.snapshot.dir`), or take the weights alone "
            "with `dtctl snapshot export`",
        )
    return point


def _find_newest_point(folder: Place, worker: Worker, memory: Path | None) -> ResumePoint:
    near = (
        _build_resume_point(choose_newest_snapshot(memory, worker), is_in_memory=True) if memory is not None else None
    )
    if near is not None and near.path is not None and near.step >= _read_committed_step(folder, worker):
        return near
    rejected = () if near is None else near.rejected
    try:
        point = _build_resume_point(choose_newest_snapshot(folder, worker))
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


def _build_resume_point(chosen: ChosenSnapshot, *, is_in_memory: bool = False) -> ResumePoint:
    step, facts = (chosen.manifest.step, chosen.manifest.facts) if chosen.manifest is not None else (0, {})
    return ResumePoint(
        path=chosen.path, step=step, facts=facts, rejected=chosen.rejected, chosen=chosen, is_in_memory=is_in_memory
    )


def make_commit_marker(folder: Place, progress: ProgressFile) -> Callable[[int], None]:
    """Return a function that records a committed snapshot in the run's folder on this node, and for the launcher.

    The launcher passes the step on to the next attempt, in case this node and its folder are lost.
    """
    run_dir = os.environ.get(names.RUN_DIR)

    def note(step: int) -> None:
        progress.committed(step)
        if run_dir:
            draft = Path(run_dir) / f"{MARKER}.part"
            with contextlib.suppress(OSError):  # the snapshot is committed; the marker only records that
                draft.write_text(json.dumps({"dir": str(folder), "step": step}))
                draft.replace(draft.with_name(MARKER))

    return note


def _read_committed_step(folder: Place, worker: Worker) -> int:
    """Return the newest step of this run that a worker has recorded as committed, or 0; collective over all workers."""
    mine = int(os.environ.get(names.COMMITTED_STEP, "0"))
    with contextlib.suppress(OSError, ValueError, KeyError):
        kept = json.loads((Path(os.environ[names.RUN_DIR]) / MARKER).read_text())
        mine = int(kept["step"]) if kept["dir"] == str(folder) else mine
    known: list[int] = gather_json(mine, worker)
    return max(known)


def _require_beginning(folder: Place, worker: Worker) -> None:
    """Refuse to begin without a snapshot if an earlier attempt has committed one; collective over all workers.

    Raises:
        SnapshotError: an earlier attempt of this run has committed one.
    """
    step = _read_committed_step(folder, worker)
    if step:
        raise SnapshotError(
            f"this run has written a snapshot of step {step}, but it is missing now",
            where=str(folder),
            hint="bring it back (a disk that is not mounted, a node that is gone?), or launch a new run to start over; "
            "`train.snapshot.replicas: 1` keeps a copy on another node",
        )


def _make_wanted_filter(
    model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker, late: Collection[str]
) -> Wanted:
    """Return a filter for the tensors of a worker: its own part of model and optimizer, and all of the other parts."""
    own, parameters = model.state_dict(), dict(model.named_parameters())
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}

    def wanted(part: str, leaf: TensorEntry) -> torch.Tensor | bool:
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


def build_batch_facts(asked: BatchSizes, used: BatchSizes) -> dict[str, list[int]]:
    """Return the batch sizes that a snapshot keeps, JSON: the configured ones and those that memory allowed."""
    return {name: [of.micro, of.accumulate, of.parts] for name, of in (("asked", asked), ("used", used))}


def resolve_resumed_batch(config: TrainConfig, asked: BatchSizes, facts: Mapping[str, Any]) -> tuple[BatchSizes, float]:
    """Return the batch sizes to continue with, and the factor of the learning rate.

    If the configuration has the same sizes as before, return the sizes that fitted into memory then. If only the number
    of
    workers has changed, follow `on_resize`. Otherwise return the configured sizes.

    Raises:
        PlanError: the global batch cannot be kept with this number of workers.
    """
    then, factor = facts.get("batch"), float(facts.get("rate_factor", 1.0))
    if then is None:
        return asked, factor
    now = build_batch_facts(asked, asked)["asked"]
    micro, accumulate, parts = then["used"]
    if then["asked"] == now:
        return replace(asked, micro=micro, accumulate=accumulate), factor
    if asked.parts == parts or config.global_batch is not None or then["asked"][:2] != now[:2]:
        return asked, factor
    total = micro * accumulate * parts
    if config.on_resize == "keep":
        return _keep_global_batch(total, asked), factor
    ratio = asked.total / total
    return asked, factor * (ratio if config.on_resize == "linear" else math.sqrt(ratio))


def _keep_global_batch(total: int, asked: BatchSizes) -> BatchSizes:
    """Return sizes that make this global batch, in passes no larger than the configured ones."""
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
