"""Writers of a run's snapshots, and the conditions under which they write.

To disk, rank 0 writes everything, or each worker writes its pieces (`train.snapshot.layout`). To memory, every worker
writes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from dtctl import names
from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime import resume
from dtctl.runtime.best import BestScores
from dtctl.runtime.console import write_error_to_stderr
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.memory_snapshots import MemorySnapshots
from dtctl.runtime.snapshot.format.pieces import find_buffers
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.storage.place import Place, RemotePath, parse_place
from dtctl.runtime.snapshot.storage.stores import find_shared_stores
from dtctl.runtime.telemetry.progress import ProgressFile
from dtctl.train.config import DEFAULT_SNAPSHOT_S, SnapshotConfig

if TYPE_CHECKING:
    from dtctl.runtime.training_settings import TrainingSettings
    from dtctl.runtime.training_state import TrainingState


def choose_snapshot_folder(config: SnapshotConfig, environ: Mapping[str, str]) -> Place:
    """Return the place of a run's snapshots.

    Raises:
        SpecError: the URL has an unknown scheme, or contains a password.
        SnapshotError: the package for this kind of URL is missing.
    """
    return parse_place(config.dir or environ.get(names.SNAPSHOT_DIR) or "snapshots")


def is_in_pieces(config: SnapshotConfig, *, sharded_state: bool) -> bool:
    """Return whether there are several workers and each writes its own part of the state."""
    return sharded_state if config.layout == "auto" else config.layout == "sharded"


def build_snapshot_saver(
    config: SnapshotConfig,
    folder: Place,
    worker: Worker,
    model: nn.Module,
    *,
    progress: ProgressFile,
    sharded_state: bool,
) -> Saver:
    """Return the saver of a run's snapshots on disk; collective over all workers.

    Args:
        config: when to write, and where.
        folder: place of the snapshots.
        worker: this worker.
        model: the model as this worker has it.
        progress: file in which this worker reports its progress to the launcher.
        sharded_state: True if workers have state that rank 0 lacks.

    Raises:
        SnapshotError: a worker cannot write or see the URL; raised before the first step.
    """
    in_pieces = is_in_pieces(config, sharded_state=sharded_state)
    replicas = config.replicas
    if isinstance(folder, RemotePath):
        find_shared_stores(folder, worker)
        replicas = 0  # a store is shared, and makes copies by itself
    if worker.backend is None or not (in_pieces or replicas):
        return Saver(
            folder,
            keep=config.keep,
            keep_every_s=config.keep_every_s,
            when_busy=config.when_busy,
            max_failed=config.max_failed_saves,
            complain=write_error_to_stderr,
            committed=resume.make_commit_marker(folder, progress),
        )
    # Its process group costs a few milliseconds, so only those that need it import it.
    from dtctl.runtime.snapshot.distributed_saver import DistributedSaver

    return DistributedSaver(
        folder,
        worker,
        keep=config.keep,
        keep_every_s=config.keep_every_s,
        in_pieces=in_pieces,
        replicas=replicas,
        firsts=find_buffers(model),
        when_busy=config.when_busy,
        max_failed=config.max_failed_saves,
        committed=resume.make_commit_marker(folder, progress) if worker.local_rank == 0 else lambda _: None,
    )


def open_snapshot_folder(saver: Saver, worker: Worker) -> None:
    """Take the lease of the folder for this run; collective over all workers.

    Raises:
        SnapshotError: another run writes there, or no worker can write; raised on every worker.
    """
    error = None
    if saver.collective:
        saver.open()
        return
    if worker.is_first:
        try:
            saver.open()
        except DtctlError as exc:
            error = {"message": exc.message, "where": exc.where, "hint": exc.hint}
    told = gather_json(error, worker)[0]
    if told is not None:
        raise SnapshotError(told["message"], where=told["where"], hint=told["hint"])


class SnapshotWriters:
    """Writers of the snapshots of one run.

    Attributes:
        folder: place of the snapshots on disk.
        saver: writer of the snapshots on disk.
        in_memory: writer of the snapshots in memory; None if there are none.
        best: steps with the best evaluations, whose snapshots are kept; None if none are tracked.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        folder: Place,
        model: nn.Module,
        progress: ProgressFile,
        *,
        sharded_state: bool,
    ) -> None:
        """Make the writers; collective over all workers.

        Args:
            settings: settings of the run.
            folder: place of the snapshots on disk.
            model: the model as this worker has it.
            progress: file in which this worker reports its progress to the launcher.
            sharded_state: True if workers have state that rank 0 lacks.

        Raises:
            SnapshotError: a worker cannot write.
            PlanError: snapshots in memory are requested, and there is no place for them.
        """
        config, worker = settings.config, settings.worker
        self.folder = folder
        self._config, self._worker, self._model, self._progress = config.snapshot, worker, model, progress
        self.best = BestScores(config.best, keep=config.snapshot.keep_best) if config.best else None
        with worker.making_groups():
            self.saver: Saver = self._build_disk_saver(sharded_state=sharded_state)
        memory = config.snapshot.memory
        self.in_memory = MemorySnapshots(memory, worker, model) if memory is not None else None
        self._every_s = config.snapshot.every_s
        if self._every_s is None and config.snapshot.every_steps is None:
            self._every_s = DEFAULT_SNAPSHOT_S
        self._saved_s = time.monotonic()

    def _build_disk_saver(self, *, sharded_state: bool) -> Saver:
        return build_snapshot_saver(
            self._config, self.folder, self._worker, self._model, progress=self._progress, sharded_state=sharded_state
        )

    def open(self) -> None:
        """Take the lease of the folder for this run; collective.

        Raises:
            SnapshotError: another run writes there, or no worker can write; raised on every worker.
        """
        open_snapshot_folder(self.saver, self._worker)

    def close(self) -> None:
        """Wait until the snapshots are written, and release the folders."""
        self.saver.close()
        if self.in_memory is not None:
            self.in_memory.close()

    def wait(self) -> None:
        """Wait for the snapshots that are being written."""
        self.saver.wait()
        if self.in_memory is not None:
            self.in_memory.saver.wait()

    def rejoin(self, *, sharded_state: bool) -> None:
        """Write in a new process group, if all workers write; collective."""
        if not is_in_pieces(self._config, sharded_state=sharded_state):
            return
        with self._worker.making_groups():
            if self.saver.collective:
                self.saver.rejoin()
            else:  # the saver of a new worker does not have a process group yet
                self.saver.close()
                self.saver = self._build_disk_saver(sharded_state=sharded_state)
        self.open()

    def find_newest(self) -> resume.ResumePoint:
        """Return the newest good snapshot, in memory or on disk; collective."""
        memory = self.in_memory.folder if self.in_memory else None
        return resume.find_resume_point(self.folder, self._worker, memory=memory)

    def is_time(self) -> bool:
        """Return whether a snapshot on disk is due by the clock of this worker."""
        return self._every_s is not None and time.monotonic() - self._saved_s >= self._every_s

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot on disk is due after this step."""
        return self._config.every_steps is not None and step % self._config.every_steps == 0

    def save(self, step: int, state: TrainingState, counters: Mapping[str, Any], *, needed: bool) -> None:
        """Begin a snapshot on disk; collective over all workers, which write it while they train.

        Args:
            step: number of optimizer steps done.
            state: state of the run.
            counters: counters of the loop that the snapshot keeps, JSON.
            needed: True if the snapshot must not be skipped, even if another one is still being written.
        """
        parts, facts = state.collect(in_pieces=self.saver.in_pieces)
        if self._worker.is_first or self.saver.collective:
            best = self.best.steps if self.best else ()
            self.saver.save(step, parts, facts={**counters, **facts}, best=best, needed=needed)
        self._saved_s = time.monotonic()
