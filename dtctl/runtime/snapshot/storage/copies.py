"""Copies of a node's files on other nodes, sent from memory right after they are written.

The copy of a node's files lies in the folder of the next node (the next two, ...), under the same name and manifest:
any set of nodes that has all files can resume, and the loss of one node loses nothing. If racks are known, the next
node is in another rack.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from dtctl.errors import SnapshotError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import write
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.storage.memory_files import MemoryFile
from dtctl.runtime.snapshot.storage.staging import StagedState
from dtctl.runtime.snapshot.storage.stores import SnapshotStores

CHUNK_BYTES: Final = 1 << 22
"""Bytes of one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReplica:
    """File that is copied to another node, with its sender and its receiver."""

    name: str
    source: int
    """Rank of the worker that wrote it."""
    taker: int
    """Rank of the worker that writes the copy."""


def plan_replica_copies(stores: SnapshotStores, files: Sequence[Sequence[str]], replicas: int) -> list[FileReplica]:
    """Return all copies, in an order that is the same on all workers.

    Args:
        stores: folders of all workers.
        files: names of the files, by rank.
        replicas: number of copies of each file; if there are fewer other stores, one copy in each of them.
    """
    count = len(stores.ranks)
    # Nodes are ordered by rack, and the shift moves each copy into another rack, so that each node keeps one copy.
    order = sorted(range(count), key=lambda number: stores.racks[number])
    largest = max(Counter(stores.racks).values())
    nearest = largest if 2 * largest <= count else 1
    aways = [away % count for away in range(nearest, nearest + count) if away % count][:replicas]
    copies = []
    for place, number in enumerate(order):
        for index, rank in enumerate(stores.ranks[number]):
            for away in aways:
                others = stores.ranks[order[(place + away) % count]]
                copies += [
                    FileReplica(name=name, source=rank, taker=others[index % len(others)]) for name in files[rank]
                ]
    return copies


def exchange_copies(
    copies: Sequence[FileReplica],
    draft: Path,
    staged: StagedState,
    entries: Mapping[str, layout.SnapshotFile],
    hash_name: str,
    worker: Worker,
    group: dist.ProcessGroup,
) -> None:
    """Send this worker's files to other workers, and write the files that they send.

    A thread sends while this one receives, both in the order of `copies`: the first unfinished transfer can always
    continue, so that there is no deadlock.

    Raises:
        SnapshotError: a copy could not be written or did not arrive completely. The other copies are complete
            nevertheless.
    """
    files = {write.build_part_file_name(file): file for file in staged.files}
    failed: list[BaseException] = []

    def send() -> None:
        try:
            for copy in copies:
                if copy.source == worker.rank:
                    file = files[copy.name]
                    header = torch.frombuffer(bytearray(file.outline.header()), dtype=torch.uint8)
                    for chunk in _iter_file_chunks(header, file.data):
                        dist.send(chunk, dst=copy.taker, group=group)
        except Exception as exc:  # noqa: BLE001  # raised again where it is waited for
            failed.append(exc)

    sender = threading.Thread(target=send, name="snapshot copies")
    sender.start()
    wrong = [
        _receive_copy(copy, draft, entries[copy.name], hash_name, group) for copy in copies if copy.taker == worker.rank
    ]
    sender.join()
    phrases = [phrase for phrase in wrong if phrase] + [str(exc) for exc in failed]
    if phrases:
        raise SnapshotError(f"copies for other nodes: {'; '.join(phrases)}")


def _receive_copy(
    copy: FileReplica, draft: Path, entry: layout.SnapshotFile, hash_name: str, group: dist.ProcessGroup
) -> str | None:
    """Write one file as its chunks arrive; return the reason of a failure, else None."""
    state, reason = layout.build_hasher(hash_name), None
    buffer = torch.empty(min(CHUNK_BYTES, entry.size_bytes), dtype=torch.uint8)
    file = out = None
    try:
        file = (draft / copy.name).open("w+b", buffering=0)
        out = MemoryFile(file, entry.size_bytes) if hash_name == layout.HASH_IN_MEMORY else file
    except OSError as exc:
        reason = str(exc)
    for size in _iter_chunk_sizes(entry.size_bytes):
        chunk = buffer[:size]
        dist.recv(chunk, src=copy.source, group=group)
        if out is None or reason is not None:
            continue  # the chunks must be received all the same
        try:
            state.update(chunk.numpy().data)
            write.write_whole_chunk(out, chunk.numpy().data)
        except OSError as exc:
            reason = str(exc)
    if file is not None:
        try:
            with file:
                os.fsync(file.fileno())
        except OSError as exc:
            reason = reason or str(exc)
    if reason is None and state.hexdigest() != entry.digest:
        reason = "it did not arrive unchanged"
    return reason and f"{copy.name}: {reason}"


def _iter_chunk_sizes(size_bytes: int) -> Iterator[int]:
    while size_bytes > 0:
        yield min(CHUNK_BYTES, size_bytes)
        size_bytes -= CHUNK_BYTES


def _iter_file_chunks(header: torch.Tensor, data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a file in chunks of `CHUNK_BYTES`; only the chunk with the end of the header is copied."""
    first = CHUNK_BYTES - len(header) % CHUNK_BYTES
    joined = torch.cat([header, data[:first]])
    yield from torch.split(joined, CHUNK_BYTES)
    if len(data) > first:
        yield from torch.split(data[first:], CHUNK_BYTES)
