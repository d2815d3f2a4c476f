"""Snapshots in the memory of the nodes, in addition to those on disk (`train.snapshot.memory`).

They have the usual format: sharded, with digests and a commit over all nodes. Their folder is in a file system in
memory. The supervisor of a node names the folder and removes it when the run has ended, so that it outlives workers;
copies on other nodes outlive the node.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dtctl import folders, names
from dtctl.errors import PlanError, SnapshotError
from dtctl.runtime.console import say
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.distributed_saver import DistributedSaver
from dtctl.runtime.snapshot.format.pieces import find_buffers
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.saver import Saver
from dtctl.train.config import MemorySnapshotConfig

COST: Final = 0.02
"""Largest share of a step's time for snapshots in memory."""
FIRST: Final = 5
"""Steps before the first snapshot, and between snapshots until their cost is known."""
MOST_FAILED: Final = 3
"""Number of consecutive failures after which no more are made."""


def prepare_memory_folder() -> Path:
    """Return the folder of this node's snapshots in memory.

    Raises:
        PlanError: there is no launcher that would remove them, or the node has no file system in memory.
    """
    path = os.environ.get(names.MEMORY_DIR)
    if not path:
        raise PlanError(
            "snapshots in memory need a supervisor, which removes them after the run",
            where="train.snapshot.memory",
            hint="run it with `dtctl launch`, over SSH or on this machine",
        )
    if not Path(path).parent.is_dir():
        raise PlanError(f"{Path(path).parent} is not there", where="train.snapshot.memory", hint="leave it out")
    folders.make_private(path)
    return Path(path) / "snapshots"


def _available_bytes() -> int:
    """Return the bytes of memory that this node can provide without swapping."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


class MemorySnapshots:
    """Schedule and writer of snapshots in memory; the same on all workers."""

    def __init__(self, config: MemorySnapshotConfig, worker: Worker, model: nn.Module) -> None:
        """Prepare to take snapshots in memory; every worker must call it.

        Args:
            config: when to make snapshots, and how many copies.
            worker: this worker.
            model: the model as this worker has it.
        """
        self.folder = prepare_memory_folder()
        self._worker = worker
        self._held = config.most_held
        self._every = FIRST if config.every_steps == "auto" else config.every_steps
        self._measures = config.every_steps == "auto"
        self._last: tuple[int, float] | None = None
        """Step of the last snapshot, and time after it was begun."""
        self._cost_s = 0.0
        self.is_off = False
        self.saver = self._build_memory_saver(config, model)

    def _build_memory_saver(self, config: MemorySnapshotConfig, model: nn.Module) -> Saver:
        worker = self._worker
        if worker.backend is None:
            return Saver(self.folder, keep=2, max_failed=MOST_FAILED + 1, in_memory=True)
        return DistributedSaver(
            self.folder, worker, keep=2, replicas=config.copies, firsts=find_buffers(model), max_failed=MOST_FAILED + 1,
            in_memory=True,
        )  # fmt: skip

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot is due after this step."""
        begun = 0 if self._last is None else self._last[0]
        return not self.is_off and step - begun >= self._every

    def save(self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], *, began_s: float) -> None:
        """Begin a snapshot; collective over all workers.

        Args:
            step: number of optimizer steps done.
            parts: state in pieces, from `TrainingState.collect`.
            facts: JSON for the loop, which a resume returns.
            began_s: time when training paused for the snapshot, by `time.perf_counter`.
        """
        self.saver.wait()
        if self._is_hopeless():
            return
        if self._last is None and not self._has_room(parts):
            return
        if self._measures and self._last is not None:
            self._choose_snapshot_interval(step, began_s)
        try:
            self.saver.save(step, parts, facts=facts, needed=True)
        except SnapshotError as exc:  # raised on every worker
            self._stop_memory_snapshots(exc.message)
            return
        now = time.perf_counter()
        self._cost_s, self._last = now - began_s, (step, now)

    def _has_room(self, parts: Mapping[str, Any]) -> bool:
        """Return whether every node has memory for three snapshots with copies: two kept ones and one being written."""
        share = self.saver.share(parts) if isinstance(self.saver, DistributedSaver) else parts
        tensors = (leaf for leaf in tree_leaves(share) if isinstance(leaf, torch.Tensor))
        own_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        room = os.statvfs(self.folder.parent)
        here = [os.environ.get(names.NODE, ""), own_bytes, min(room.f_bavail * room.f_frsize, _available_bytes())]
        needed: dict[str, int] = {}
        free: dict[str, int] = {}
        for node, size, free_bytes in gather_json(here, self._worker):
            needed[node] = needed.get(node, 0) + self._held * size
            free[node] = min(free.get(node, free_bytes), free_bytes)
        short = [node for node in needed if needed[node] > free[node]]
        if short:
            node = max(short, key=lambda name: needed[name] - free[name])
            has, takes = free[node] >> 20, needed[node] >> 20
            self._stop_memory_snapshots(f"{node or 'this node'} has {has:,} MiB for them, and they take {takes:,} MiB")
        return not short

    def _is_hopeless(self) -> bool:
        failed = max(gather_json(self.saver.failed, self._worker))
        if failed >= MOST_FAILED:
            self._stop_memory_snapshots(f"{failed} failed one after another")
        return self.is_off

    def _stop_memory_snapshots(self, reason: str) -> None:
        self.is_off = True
        if self._worker.is_first:
            say(f"no snapshots in memory from now on: {reason}")

    def _choose_snapshot_interval(self, step: int, now_s: float) -> None:
        """Choose the number of steps between snapshots from the cost of the last one and the time of steps since."""
        assert self._last is not None  # noqa: S101  # for the type checker
        last_step, last_s = self._last
        steps_s = max(1e-9, now_s - last_s)
        # Without a GPU, copies, digests and exchange compete with training, so their cost shows in the steps.
        ratio = self._cost_s / (steps_s / (step - last_step))
        every = math.ceil(max(gather_json(ratio, self._worker)) / COST)
        if every != self._every and self._worker.is_first and self._every == FIRST:
            say(f"snapshots in memory: every {max(1, every)} steps")
        self._every = max(1, every)

    def close(self) -> None:
        """Wait for the save under way, and release the folder."""
        self.saver.wait()
        self.saver.close()
