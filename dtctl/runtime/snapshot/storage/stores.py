"""Workers that write into the same folder, and nodes that have one of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass

from dtctl import names
from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.snapshot.storage.durable import make_folder
from dtctl.runtime.snapshot.storage.place import Place, Remote


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Folders of snapshots that all have the same path, and the workers that see each."""

    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each store, in the order of their first ranks."""
    racks: tuple[str, ...]
    """Rack of each store, that of its first worker's node; empty: not known."""
    own: int
    """Index of this worker's store."""
    token: str
    """A name for what these workers do together, the same on all of them."""
    hash: str
    """Hash function that all of them have."""

    @property
    def leader(self) -> int:
        """The worker that commits what is in this worker's store."""
        return self.ranks[self.own][0]


def stores(folder: Place, worker: Worker, *, in_memory: bool = False) -> Stores:
    """Find the workers that share a folder: one of each node leaves a sign there, and all look for it. Collective.

    Raises:
        SnapshotError: a worker cannot write there; on every worker.
    """
    at_url = isinstance(folder, Remote)
    token = str(gathered_json(secrets.token_hex(8), worker)[0])
    error, visible_ranks = None, []
    try:
        make_folder(folder)
        if worker.local_rank == 0:
            _sign(folder, token, worker.rank).touch()
    except (OSError, DtctlError) as exc:
        error = str(exc)
    rack = os.environ.get(names.RACK, "")
    reports = gathered_json([error, worker.local_rank == 0, layout.default_hash(in_memory=in_memory), rack], worker)
    left = [rank for rank, (_, has_left, *_) in enumerate(reports) if has_left]
    if error is None:
        try:
            # Asked for by name: a list of the folder may be an older one, where it comes over a network.
            # What is at a URL all see, or it is of no use.
            visible_ranks = [rank for rank in left[: 1 if at_url else None] if _sign(folder, token, rank).exists()]
        except DtctlError as exc:
            error = str(exc)
    places = gathered_json([error, visible_ranks[:1]], worker)
    if worker.local_rank == 0 and error is None:
        with contextlib.suppress(DtctlError):  # pruning removes it
            _sign(folder, token, worker.rank).unlink(missing_ok=True)
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
    return Stores(
        ranks=ranks,
        racks=tuple(reports[group[0]][3] for group in ranks),
        own=own,
        token=token,
        hash=hashes.pop() if len(hashes) == 1 else "sha256",
    )


def _sign(folder: Place, token: str, rank: int) -> Place:
    return folder / f".here-{token}-{rank}{layout.DRAFT_SUFFIX}"
