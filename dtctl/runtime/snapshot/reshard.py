"""Exchange between the workers that have read a snapshot and those that need it: its own stretch of every tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import assembly
from dtctl.runtime.snapshot.assembly import Box, TreeEntry
from dtctl.runtime.snapshot.choose import Chosen
from dtctl.runtime.snapshot.format import headers, layout
from dtctl.runtime.snapshot.format.packing import DTYPES
from dtctl.runtime.snapshot.format.pieces import box_of, sharded_like
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.snapshot.state import raw

UNDER_WAY_BYTES: Final = 1 << 28
"""Bytes that may wait to be sent at a time."""

Wanted = Callable[[str, TreeEntry], "torch.Tensor | bool"]
"""Part and tensor -> whether this worker needs it, or what it is to be like: then only the stretch that this has."""


def deliver(chosen: Chosen, wanted: Wanted, worker: Worker) -> dict[str, Any]:
    """Return the parts of a snapshot as this worker needs them; collective over all workers.

    Args:
        chosen: a snapshot, by `choose`; its contents are released.
        wanted: what this worker needs.
        worker: this worker.

    Returns:
        Part -> tree; tensors are on the CPU, unless they are to be like one that is sharded. What this worker does not
        need has no numbers (device meta).

    Raises:
        SnapshotError: a tensor is not all there.
    """
    assert chosen.manifest is not None  # noqa: S101  # for the type checker
    opened = {name: headers.parse(content) for name, content in chosen.contents.items()}
    data = {name: chosen.contents[name][header.size_bytes :] for name, header in opened.items()}
    told = gathered_json([[name, header.tensors, header.tree] for name, header in opened.items()], worker)
    every = {name: headers.Header(tensors, tree, 0) for rows in told for name, tensors, tree in rows}
    trees = assembly.assembled((chosen.manifest.part_of(name), name, every[name]) for name in chosen.manifest.files)
    leaves = [(part, leaf) for part, tree in trees.items() for leaf in assembly.leaves(tree)]
    likes = [wanted(part, leaf) for part, leaf in leaves]
    mine = [_box(like, leaf) for like, (_, leaf) in zip(likes, leaves, strict=True)]
    boxes = [[_unfolded(box, leaf) for box, (_, leaf) in zip(row, leaves, strict=True)] for row in _told(mine, worker)]
    way = _Way(worker)
    tensors: dict[str, dict[tuple[str, ...], torch.Tensor]] = {part: {} for part in trees}
    for number, ((part, leaf), like) in enumerate(zip(leaves, likes, strict=True)):
        local = way.bring(leaf, [row[number] for row in boxes], chosen, data)
        if local is None:
            local = torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype], device="meta")
        elif isinstance(like, torch.Tensor) and mine[number] != 1:
            local = sharded_like(like, local)
        tensors[part][leaf.path] = local
    way.finish()
    chosen.contents.clear()
    return {part: assembly.replaced(tree, tensors[part]) for part, tree in trees.items()}


def _box(like: torch.Tensor | bool, leaf: TreeEntry) -> int | list[list[int]]:
    """Return what is wanted of a tensor, in few words: 0 nothing, 1 all, else a box."""
    if isinstance(like, bool):
        return int(like)
    if tuple(like.shape) != leaf.shape or not hasattr(like, "device_mesh"):
        return 1  # loading reports the error
    offset, shape = box_of(like)
    return [list(offset), list(shape)]


def _unfolded(box: int | list[list[int]], leaf: TreeEntry) -> Box | None:
    if isinstance(box, int):
        return ((0,) * len(leaf.shape), leaf.shape) if box else None
    return tuple(box[0]), tuple(box[1])


def _told(mine: list[Any], worker: Worker) -> list[list[Any]]:
    """Return the boxes that each worker needs; a worker that needs everything sends one number instead."""
    plain = mine[0] if mine and all(box == mine[0] for box in mine) and isinstance(mine[0], int) else None
    told = gathered_json(plain if plain is not None else mine, worker)
    return [[row] * len(mine) if isinstance(row, int) else row for row in told]


class _Way:
    """Exchange of data in the same order on all workers, so that there is no deadlock."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def bring(
        self, leaf: TreeEntry, boxes: list[Box | None], chosen: Chosen, data: dict[str, memoryview]
    ) -> torch.Tensor | None:
        """Return this worker's stretch of a tensor; None if it needs none."""
        rank, dtype = self._worker.rank, DTYPES[leaf.dtype]
        mine = boxes[rank]
        # A view of a map would keep the snapshot in the node's memory after it was removed.
        is_mapped = chosen.manifest is not None and chosen.manifest.hash == layout.HASH_IN_MEMORY
        whole: torch.Tensor | None = None
        for source in sorted(leaf.sources, key=lambda source: source.box):
            reader = chosen.readers[source.file]
            piece = None
            if rank == reader and source.end > source.begin:
                stretch = data[source.file][source.begin : source.end]
                piece = torch.frombuffer(stretch, dtype=dtype).view(source.box[1])
            if piece is not None and mine == source.box and not is_mapped:
                whole = piece  # a view: nothing has to be copied
            elif mine is not None and whole is None and assembly.overlap(mine, source.box) is not None:
                whole = torch.empty(mine[1], dtype=dtype)
            commons = [None if box is None else assembly.overlap(box, source.box) for box in boxes]
            if self._worker.world_size > 1 and all(common == source.box for common in commons):
                self._to_all(piece, reader, whole, mine, source.box)
                continue
            for taker, common in enumerate(commons):
                if common is not None:
                    self._to_one(piece, reader, taker, whole, mine, source.box, common)
        if mine is not None and whole is None:
            whole = torch.empty(mine[1], dtype=dtype)  # of nothing
        return whole

    def _to_all(
        self, piece: torch.Tensor | None, reader: int, whole: torch.Tensor | None, mine: Box | None, box: Box
    ) -> None:
        assert whole is not None  # noqa: S101  # for the type checker
        assert mine is not None  # noqa: S101
        place = _stretch(whole, mine, box)
        if piece is not None:
            dist.broadcast(raw(piece), src=reader)
            if place.data_ptr() != piece.data_ptr():
                place.copy_(piece)
        elif place.is_contiguous():
            dist.broadcast(raw(place), src=reader)
        else:
            held = torch.empty_like(place, memory_format=torch.contiguous_format)
            dist.broadcast(raw(held), src=reader)
            place.copy_(held)

    def _to_one(
        self,
        piece: torch.Tensor | None,
        reader: int,
        taker: int,
        whole: torch.Tensor | None,
        mine: Box | None,
        box: Box,
        common: Box,
    ) -> None:
        rank = self._worker.rank
        if rank == reader and piece is not None:
            part = _stretch(piece, box, common)
            if taker != rank:
                self._send(raw(part), taker)
            elif whole is not None and mine is not None and whole.data_ptr() != piece.data_ptr():
                _stretch(whole, mine, common).copy_(part)
        elif rank == taker and whole is not None and mine is not None:
            place = _stretch(whole, mine, common)
            held = place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype)
            dist.recv(raw(held), src=reader)
            if held is not place:
                place.copy_(held)

    def _send(self, packed: torch.Tensor, taker: int) -> None:
        work = dist.isend(packed, dst=taker)
        if work is not None:
            self._sent.append((work, packed))
        while sum(tensor.numel() for _, tensor in self._sent) > UNDER_WAY_BYTES:
            self._sent.pop(0)[0].wait()

    def finish(self) -> None:
        """Wait until all is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def _stretch(tensor: torch.Tensor, has: Box, wanted: Box) -> torch.Tensor:
    """Return what a box means in a tensor that is itself a box of a larger one."""
    cuts: Iterator[slice] = (
        slice(begin - origin, begin - origin + size) for begin, size, origin in zip(*wanted, has[0], strict=True)
    )
    return tensor[tuple(cuts)]
