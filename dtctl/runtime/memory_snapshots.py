"""Snapshots in the memory of the nodes, beside those on disk (`train.snapshot.memory`).

They are snapshots like any other, sharded, with digests and a commit over all nodes, in a folder of a file system that
lies in memory. The supervisor of a node gives the folder its name and removes it when the run is over, so that it
outlives workers; copies on other nodes outlive the node.
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
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.snapshot.saver import Saver
from dtctl.train.config import MemorySnapshotConfig

COST: Final = 0.02
"""Share of the time of a step that snapshots in memory may take."""
FIRST: Final = 5
"""Steps before the first of them, and until it is known what they cost."""
MOST_FAILED: Final = 3
"""Failures in a row after which there are none any more."""


def folder() -> Path:
    """Return the folder of this node's snapshots in memory.

    Raises:
        PlanError: no launcher would remove them, or the node has no file system in memory.
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
    """Memory that this node can give without swapping."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


class MemorySnapshots:
    """Schedule and writer of snapshots in memory; the same on all workers."""

    def __init__(self, config: MemorySnapshotConfig, worker: Worker, model: nn.Module) -> None:
        """Nothing is written yet; collective over all workers.

        Args:
            config: when, and how many copies.
            worker: this worker.
            model: as this worker has it.
        """
        self.folder = folder()
        self._worker = worker
        self._held = config.most_held
        self._every = FIRST if config.every_steps == "auto" else config.every_steps
        self._measures = config.every_steps == "auto"
        self._last: tuple[int, float] | None = None
        """Step and time after which the last one was begun."""
        self._cost_s = 0.0
        self.is_off = False
        self.saver = self._saver(config, model)

    def _saver(self, config: MemorySnapshotConfig, model: nn.Module) -> Saver:
        worker = self._worker
        if worker.backend is None:
            return Saver(self.folder, keep=2, max_failed=MOST_FAILED + 1, in_memory=True)
        return DistributedSaver(
            self.folder, worker, keep=2, replicas=config.copies, firsts=find_buffers(model), max_failed=MOST_FAILED + 1,
            in_memory=True,
        )  # fmt: skip

    def is_due(self, step: int) -> bool:
        """Return whether one is to be made after this step."""
        begun = 0 if self._last is None else self._last[0]
        return not self.is_off and step - begun >= self._every

    def save(self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], *, began_s: float) -> None:
        """Begin one; collective over all workers.

        Args:
            step: optimizer steps done.
            parts: the state, as `TrainingState.collect` gives it in pieces.
            facts: JSON for the loop, returned by a resume.
            began_s: when the training stopped for it, by `time.perf_counter`.
        """
        self.saver.wait()
        if self._is_hopeless():
            return
        if self._last is None and not self._has_room(parts):
            return
        if self._measures and self._last is not None:
            self._pace(step, began_s)
        try:
            self.saver.save(step, parts, facts=facts, needed=True)
        except SnapshotError as exc:  # on every worker
            self._end(exc.message)
            return
        now = time.perf_counter()
        self._cost_s, self._last = now - began_s, (step, now)

    def _has_room(self, parts: Mapping[str, Any]) -> bool:
        """Return whether every node has memory for two snapshots that are kept and one being written, with copies."""
        share = self.saver.share(parts) if isinstance(self.saver, DistributedSaver) else parts
        tensors = (leaf for leaf in tree_leaves(share) if isinstance(leaf, torch.Tensor))
        own_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        room = os.statvfs(self.folder.parent)
        here = [os.environ.get(names.NODE, ""), own_bytes, min(room.f_bavail * room.f_frsize, _available_bytes())]
        needed: dict[str, int] = {}
        free: dict[str, int] = {}
        for node, size, free_bytes in gathered_json(here, self._worker):
            needed[node] = needed.get(node, 0) + self._held * size
            free[node] = min(free.get(node, free_bytes), free_bytes)
        short = [node for node in needed if needed[node] > free[node]]
        if short:
            node = max(short, key=lambda name: needed[name] - free[name])
            has, takes = free[node] >> 20, needed[node] >> 20
            self._end(f"{node or 'this node'} has {has:,} MiB for them, and they take {takes:,} MiB")
        return not short

    def _is_hopeless(self) -> bool:
        failed = max(gathered_json(self.saver.failed, self._worker))
        if failed >= MOST_FAILED:
            self._end(f"{failed} failed one after another")
        return self.is_off

    def _end(self, reason: str) -> None:
        self.is_off = True
        if self._worker.is_first:
            say(f"no snapshots in memory from now on: {reason}")

    def _pace(self, step: int, now_s: float) -> None:
        """Choose how many steps lie between two, by what the last one has cost and the steps since have taken."""
        assert self._last is not None  # noqa: S101  # for the type checker
        last_step, last_s = self._last
        steps_s = max(1e-9, now_s - last_s)
        # A processor that trains has the copying, the digests and the exchange to do beside it: they show in the steps.
        ratio = self._cost_s / (steps_s / (step - last_step))
        every = math.ceil(max(gathered_json(ratio, self._worker)) / COST)
        if every != self._every and self._worker.is_first and self._every == FIRST:
            say(f"snapshots in memory: every {max(1, every)} steps")
        self._every = max(1, every)

    def close(self) -> None:
        """Let go of the folder; nothing is being written any more."""
        self.saver.wait()
        self.saver.close()
