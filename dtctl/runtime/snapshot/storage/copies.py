"""Copies of a node's files on other nodes, sent from memory while they are still there.

The copy of a node's files lies in the folder of the next node (the next two, ...), under the same name and manifest:
any nodes with enough files can resume, and the loss of any one node loses nothing. Where racks are known, the next node
is in another rack.
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
from dtctl.runtime.snapshot.storage.staging import Staged
from dtctl.runtime.snapshot.storage.stores import Stores

CHUNK_BYTES: Final = 1 << 22
"""Bytes that are sent at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One file's way to another node."""

    name: str
    source: int
    """Rank of the worker that wrote it."""
    taker: int
    """And of the one that writes the copy."""


def plan(stores: Stores, files: Sequence[Sequence[str]], replicas: int) -> list[Copy]:
    """Return all copies, in an order that is the same on all workers.

    Args:
        stores: folders of all workers.
        files: names by rank.
        replicas: how many copies of each; with fewer other stores, one in each of them.
    """
    count = len(stores.ranks)
    # Rack by rack, with a shift that takes each copy out of its own rack; each node then has one copy to keep.
    order = sorted(range(count), key=lambda number: stores.racks[number])
    largest = max(Counter(stores.racks).values())
    nearest = largest if 2 * largest <= count else 1
    aways = [away % count for away in range(nearest, nearest + count) if away % count][:replicas]
    copies = []
    for place, number in enumerate(order):
        for index, rank in enumerate(stores.ranks[number]):
            for away in aways:
                others = stores.ranks[order[(place + away) % count]]
                copies += [Copy(name=name, source=rank, taker=others[index % len(others)]) for name in files[rank]]
    return copies


def exchange(
    copies: Sequence[Copy],
    draft: Path,
    staged: Staged,
    entries: Mapping[str, layout.SnapshotFile],
    hash_name: str,
    worker: Worker,
    group: dist.ProcessGroup,
) -> None:
    """Send this worker's files to others, and write those that come from others.

    A thread sends while this one receives, both in the order of `copies`: the first unfinished transfer can always
    continue, so that there is no deadlock.

    Raises:
        SnapshotError: a copy could not be written or did not arrive whole. The other copies are complete all the same.
    """
    files = {write.file_name(file): file for file in staged.files}
    failed: list[BaseException] = []

    def send() -> None:
        try:
            for copy in copies:
                if copy.source == worker.rank:
                    file = files[copy.name]
                    header = torch.frombuffer(bytearray(file.outline.header()), dtype=torch.uint8)
                    for chunk in _chunks(header, file.data):
                        dist.send(chunk, dst=copy.taker, group=group)
        except Exception as exc:  # noqa: BLE001  # raised again where it is waited for
            failed.append(exc)

    sender = threading.Thread(target=send, name="snapshot copies")
    sender.start()
    wrong = [
        _received(copy, draft, entries[copy.name], hash_name, group) for copy in copies if copy.taker == worker.rank
    ]
    sender.join()
    phrases = [phrase for phrase in wrong if phrase] + [str(exc) for exc in failed]
    if phrases:
        raise SnapshotError(f"copies for other nodes: {'; '.join(phrases)}")


def _received(
    copy: Copy, draft: Path, entry: layout.SnapshotFile, hash_name: str, group: dist.ProcessGroup
) -> str | None:
    """Write one file as it comes. Returns what went wrong."""
    state, reason = layout.hasher(hash_name), None
    buffer = torch.empty(min(CHUNK_BYTES, entry.size_bytes), dtype=torch.uint8)
    try:
        out = (draft / copy.name).open("wb", buffering=0)
    except OSError as exc:
        out, reason = None, str(exc)
    for size in _sizes(entry.size_bytes):
        chunk = buffer[:size]
        dist.recv(chunk, src=copy.source, group=group)
        if out is None or reason is not None:
            continue  # what is sent must be taken all the same
        try:
            state.update(chunk.numpy().data)
            write.write_all(out, chunk.numpy().data)
        except OSError as exc:
            reason = str(exc)
    if out is not None:
        try:
            with out:
                os.fsync(out.fileno())
        except OSError as exc:
            reason = reason or str(exc)
    if reason is None and state.hexdigest() != entry.digest:
        reason = "it did not arrive as it was sent"
    return reason and f"{copy.name}: {reason}"


def _sizes(size_bytes: int) -> Iterator[int]:
    while size_bytes > 0:
        yield min(CHUNK_BYTES, size_bytes)
        size_bytes -= CHUNK_BYTES


def _chunks(header: torch.Tensor, data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a file in stretches of `CHUNK_BYTES`; only that with the end of the header is put together."""
    first = CHUNK_BYTES - len(header) % CHUNK_BYTES
    joined = torch.cat([header, data[:first]])
    yield from torch.split(joined, CHUNK_BYTES)
    if len(data) > first:
        yield from torch.split(data[first:], CHUNK_BYTES)
