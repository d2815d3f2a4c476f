"""Which workers write into the same folder, and which nodes have one of their own."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import layout
from dtctl.runtime.snapshot.share import gathered_json
from dtctl.runtime.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The folders of snapshots that all have the same path, and who sees which."""

    ranks: tuple[tuple[int, ...], ...]
    """Of each store, in the order of their first ranks."""
    own: int
    """That of this worker."""
    token: str
    """A name for what these workers do together, the same on all of them."""
    hash: str
    """That all of them have."""

    @property
    def leader(self) -> int:
        """The worker that commits what is in this worker's store."""
        return self.ranks[self.own][0]


def stores(folder: Path, worker: Worker) -> Stores:
    """Find out who shares a folder: one worker of each node leaves a sign there, and all look for them. Collective.

    Raises:
        SnapshotError: a worker cannot write there; on every worker.
    """
    token = str(gathered_json(secrets.token_hex(8), worker)[0])
    error = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if worker.local_rank == 0:
            _sign(folder, token, worker.rank).touch()
    except OSError as exc:
        error = str(exc)
    told = gathered_json([error, worker.local_rank == 0, layout.default_hash()], worker)
    # Asked for by name: a list of the folder may be an older one, where it comes over a network.
    seen = [rank for rank, (_, left, _) in enumerate(told) if left and _sign(folder, token, rank).exists()]
    places = gathered_json(seen[:1], worker)
    if worker.local_rank == 0:
        _sign(folder, token, worker.rank).unlink(missing_ok=True)
    for rank, (reason, _, _) in enumerate(told):
        if reason or not places[rank]:
            raise SnapshotError(
                f"rank {rank} cannot write snapshots: {reason or 'its node does not see what it wrote'}",
                where=str(folder),
                hint="set `train.snapshot.dir` to a folder that every node can write",
            )
    groups: dict[int, list[int]] = {}
    for rank, (first,) in enumerate(places):
        groups.setdefault(first, []).append(rank)
    ranks = tuple(tuple(group) for group in groups.values())
    own = next(number for number, group in enumerate(ranks) if worker.rank in group)
    hashes = {name for _, _, name in told}
    return Stores(ranks=ranks, own=own, token=token, hash=hashes.pop() if len(hashes) == 1 else "sha256")


def _sign(folder: Path, token: str, rank: int) -> Path:
    return folder / f".here-{token}-{rank}{layout.DRAFT_SUFFIX}"
