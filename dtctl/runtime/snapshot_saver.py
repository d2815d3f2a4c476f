"""Writer of a run's snapshots: rank 0, the whole, or every worker, in pieces (`train.snapshot.layout`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dtctl import names
from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime import resume
from dtctl.runtime.console import complain
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.format.pieces import find_buffers
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.storage.place import Place, Remote, place
from dtctl.runtime.snapshot.storage.stores import stores
from dtctl.runtime.telemetry.progress import Progress
from dtctl.train.config import SnapshotConfig


def folder(config: SnapshotConfig, environ: Mapping[str, str]) -> Place:
    """Return where the snapshots of a run lie.

    Raises:
        SpecError: at a URL of a kind that is not known, or with a password in it.
        SnapshotError: at a URL for which a package is missing.
    """
    return place(config.dir or environ.get(names.SNAPSHOT_DIR) or "snapshots")


def is_in_pieces(config: SnapshotConfig, *, sharded_state: bool) -> bool:
    """Return whether each of several workers writes what it has."""
    return sharded_state if config.layout == "auto" else config.layout == "sharded"


def saver(
    config: SnapshotConfig, folder: Place, worker: Worker, model: nn.Module, *, progress: Progress, sharded_state: bool
) -> Saver:
    """Return the saver of a training's snapshots; collective over all workers.

    Args:
        config: when and where.
        folder: of the snapshots.
        worker: this worker.
        model: as this worker has it.
        progress: what the launcher reads of this worker.
        sharded_state: whether workers have state that rank 0 lacks.

    Raises:
        SnapshotError: a worker cannot write or see the URL; raised before the first step.
    """
    in_pieces = is_in_pieces(config, sharded_state=sharded_state)
    replicas = config.replicas
    if isinstance(folder, Remote):
        stores(folder, worker)
        replicas = 0  # the store is shared, and keeps its own copies
    if worker.backend is None or not (in_pieces or replicas):
        return Saver(
            folder,
            keep=config.keep,
            keep_every_s=config.keep_every_s,
            when_busy=config.when_busy,
            max_failed=config.max_failed_saves,
            complain=complain,
            committed=resume.marker(folder, progress),
        )
    # Its process group costs a few milliseconds, which others should not pay.
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
        committed=resume.marker(folder, progress) if worker.local_rank == 0 else lambda _: None,
    )


def begin(saver: Saver, worker: Worker) -> None:
    """Take the folder for this run; collective over all workers.

    Raises:
        SnapshotError: another run writes there, or no worker can; raised on every worker.
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
    told = gathered_json(error, worker)[0]
    if told is not None:
        raise SnapshotError(told["message"], where=told["where"], hint=told["hint"])
