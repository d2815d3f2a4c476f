"""Groups of workers that write into the same folder, for shared folders and for folders of each node."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class _WorkerFacts:
    """Facts that each worker tells the others before they look for each other's files."""

    error: str | None
    leaves_file: bool
    hash: str
    rack: str


def find_shared_stores(folder: Place, worker: Worker, *, in_memory: bool = False) -> SnapshotStores:
    """Find the workers that share a folder: one worker of each node writes a file, and all look for it. Collective.

    Raises:
        SnapshotError: a worker cannot write there; raised on every worker.
    """
    token = str(gather_json(secrets.token_hex(8), worker)[0])
    error = _leave_sign(folder, token, worker)
    own = [error, worker.local_rank == 0, layout.choose_hash(in_memory=in_memory), os.environ.get(names.RACK, "")]
    everyone = [_WorkerFacts(*facts) for facts in gather_json(own, worker)]
    first_seen = None
    if error is None:
        try:
            first_seen = _find_first_sign(folder, token, everyone)
        except DtctlError as exc:
            error = str(exc)
    places = gather_json([error, first_seen], worker)
    if worker.local_rank == 0 and error is None:
        with contextlib.suppress(DtctlError):  # a leftover file is removed with the next pruning
            _build_sign_path(folder, token, worker.rank).unlink(missing_ok=True)
    groups: dict[int, list[int]] = {}
    for rank, (reason, first) in enumerate(places):
        if reason or first is None:
            raise _build_store_error(folder, rank, reason)
        groups.setdefault(first, []).append(rank)
    ranks = tuple(tuple(group) for group in groups.values())
    hashes = {facts.hash for facts in everyone}
    return SnapshotStores(
        ranks=ranks,
        racks=tuple(everyone[group[0]].rack for group in ranks),
        own=next(number for number, group in enumerate(ranks) if worker.rank in group),
        token=token,
        hash=hashes.pop() if len(hashes) == 1 else "sha256",
    )


def _leave_sign(folder: Place, token: str, worker: Worker) -> str | None:
    """Make the folder, and on the first worker of a node a file in it; return the error if there is one."""
    try:
        make_durable_folder(folder)
        if worker.local_rank == 0:
            _build_sign_path(folder, token, worker.rank).touch()
    except (OSError, DtctlError) as exc:
        return str(exc)
    return None


def _find_first_sign(folder: Place, token: str, everyone: Sequence[_WorkerFacts]) -> int | None:
    """Return the first rank whose file this worker sees in the folder; None if it sees none.

    Files are checked by name, since a network file system may return an outdated listing. At a URL all workers must see
    the file of the first one.
    """
    ranks = [rank for rank, facts in enumerate(everyone) if facts.leaves_file]
    if isinstance(folder, RemotePath):
        ranks = ranks[:1]
    return next((rank for rank in ranks if _build_sign_path(folder, token, rank).exists()), None)


def _build_store_error(folder: Place, rank: int, reason: str | None) -> SnapshotError:
    at_url = isinstance(folder, RemotePath)
    blind = "it does not see what rank 0 wrote" if at_url else "its node does not see what it wrote"
    return SnapshotError(
        f"rank {rank} cannot write snapshots: {reason or blind}",
        where=str(folder),
        hint=f"set `train.snapshot.dir` to a {'URL' if at_url else 'folder'} that every node can write",
    )


def _build_sign_path(folder: Place, token: str, rank: int) -> Place:
    return folder / f".here-{token}-{rank}{layout.DRAFT_SUFFIX}"
