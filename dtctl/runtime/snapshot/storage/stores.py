"""Groups of workers that write into the same folder, for shared folders and for folders of each node."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass

from dtctl import names
from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.storage.durable import make_durable_folder
from dtctl.runtime.snapshot.storage.place import Place, RemotePath


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStores:
    """Folders of snapshots that all have the same path, and the workers that see each."""

    ranks: tuple[tuple[int, ...], ...]
    """Ranks of the workers in each store, in the order of their first ranks."""
    racks: tuple[str, ...]
    """Rack of each store, that of its first worker's node; empty if unknown."""
    own: int
    """Index of this worker's store."""
    token: str
    """Name for the joint actions of these workers, the same on all of them."""
    hash: str
    """Hash function that all workers support."""

    @property
    def committing_worker(self) -> int:
        """Return the rank of the worker that commits the snapshots in this worker's store."""
        return self.ranks[self.own][0]


def find_shared_stores(folder: Place, worker: Worker, *, in_memory: bool = False) -> SnapshotStores:
    """Find the workers that share a folder: one worker of each node writes a file, and all look for it. Collective.

    Raises:
        SnapshotError: a worker cannot write there; raised on every worker.
    """
    at_url = isinstance(folder, RemotePath)
    token = str(gather_json(secrets.token_hex(8), worker)[0])
    error, visible_ranks = None, []
    try:
        make_durable_folder(folder)
        if worker.local_rank == 0:
            _build_sign_path(folder, token, worker.rank).touch()
    except (OSError, DtctlError) as exc:
        error = str(exc)
    rack = os.environ.get(names.RACK, "")
    reports = gather_json([error, worker.local_rank == 0, layout.choose_hash(in_memory=in_memory), rack], worker)
    left = [rank for rank, (_, has_left, *_) in enumerate(reports) if has_left]
    if error is None:
        try:
            # Files are checked by name, since a network file system may return an outdated listing. At a URL all
            # workers must see the file of the first one.
            visible_ranks = [
                rank for rank in left[: 1 if at_url else None] if _build_sign_path(folder, token, rank).exists()
            ]
        except DtctlError as exc:
            error = str(exc)
    places = gather_json([error, visible_ranks[:1]], worker)
    if worker.local_rank == 0 and error is None:
        with contextlib.suppress(DtctlError):  # a leftover file is removed with the next pruning
            _build_sign_path(folder, token, worker.rank).unlink(missing_ok=True)
    blind = "it does not see what rank 0 wrote" if at_url else "its node does not see what it wrote"
    groups: dict[int, list[int]] = {}
    for rank, (reason, first) in enumerate(places):
        if reason or not first:
            raise SnapshotError(
                f"rank {rank} cannot write snapshots: {reason or blind}",
                where=str(folder),
                hint=f"set `train.snapshot.dir` to a {'URL' if at_url else 'folder'} that every node can write",
            )
        groups.setdefault(first[0], []).append(rank)
    ranks = tuple(tuple(group) for group in groups.values())
    own = next(number for number, group in enumerate(ranks) if worker.rank in group)
    hashes = {report[2] for report in reports}
    return SnapshotStores(
        ranks=ranks,
        racks=tuple(reports[group[0]][3] for group in ranks),
        own=own,
        token=token,
        hash=hashes.pop() if len(hashes) == 1 else "sha256",
    )


def _build_sign_path(folder: Place, token: str, rank: int) -> Place:
    return folder / f".here-{token}-{rank}{layout.DRAFT_SUFFIX}"
