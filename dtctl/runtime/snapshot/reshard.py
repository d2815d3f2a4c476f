"""Exchange between the workers that have read a snapshot and those that need it, each its own part of every tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import assembly
from dtctl.runtime.snapshot.assembly import Box, TensorEntry
from dtctl.runtime.snapshot.choose import ChosenSnapshot
from dtctl.runtime.snapshot.format import headers, layout
from dtctl.runtime.snapshot.format.packing import DTYPES
from dtctl.runtime.snapshot.format.pieces import compute_local_box, shard_like
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.state import view_tensor_bytes

UNDER_WAY_BYTES: Final = 1 << 28
"""Bytes that may be in transfer at the same time."""

Wanted = Callable[[str, TensorEntry], "torch.Tensor | bool"]
"""Function of a part and a tensor that returns whether this worker needs the tensor. If it returns a tensor, only the
stretch that this tensor covers is needed."""


def reshard_snapshot_parts(chosen: ChosenSnapshot, wanted: Wanted, worker: Worker) -> dict[str, Any]:
    """Return the parts of a snapshot as this worker needs them; collective over all workers.

    Args:
        chosen: a snapshot from `choose_newest_snapshot`; its contents are released.
        wanted: returns what this worker needs.
        worker: this worker.

    Returns:
        Part -> tree. Tensors are on the CPU, unless `wanted` returned a sharded one. Tensors that this worker does not
        need have no data (device meta).

    Raises:
        SnapshotError: a tensor is incomplete.
    """
    assert chosen.manifest is not None  # noqa: S101  # for the type checker
    opened = {name: headers.parse_header(content) for name, content in chosen.contents.items()}
    data = {name: chosen.contents[name][header.size_bytes :] for name, header in opened.items()}
    told = gather_json([[name, header.tensors, header.tree] for name, header in opened.items()], worker)
    every = {name: headers.FileHeader(tensors, tree, 0) for rows in told for name, tensors, tree in rows}
    trees = assembly.assemble_part_trees(
        (chosen.manifest.part_of(name), name, every[name]) for name in chosen.manifest.files
    )
    leaves = [(part, leaf) for part, tree in trees.items() for leaf in assembly.iter_tree_entries(tree)]
    likes = [wanted(part, leaf) for part, leaf in leaves]
    mine = [_encode_wanted_box(like, leaf) for like, (_, leaf) in zip(likes, leaves, strict=True)]
    boxes = [
        [_decode_wanted_box(box, leaf) for box, (_, leaf) in zip(row, leaves, strict=True)]
        for row in _gather_wanted_boxes(mine, worker)
    ]
    way = _PieceExchange(worker)
    tensors: dict[str, dict[tuple[str, ...], torch.Tensor]] = {part: {} for part in trees}
    for number, ((part, leaf), like) in enumerate(zip(leaves, likes, strict=True)):
        local = way.receive_own_stretch(leaf, [row[number] for row in boxes], chosen, data)
        if local is None:
            local = torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype], device="meta")
        elif isinstance(like, torch.Tensor) and mine[number] != 1:
            local = shard_like(like, local)
        tensors[part][leaf.path] = local
    way.finish()
    chosen.contents.clear()
    return {part: assembly.replace_tree_entries(tree, tensors[part]) for part, tree in trees.items()}


def _encode_wanted_box(like: torch.Tensor | bool, leaf: TensorEntry) -> int | list[list[int]]:
    """Return the wanted stretch of a tensor in a short form: 0 for nothing, 1 for all, else a box."""
    if isinstance(like, bool):
        return int(like)
    if tuple(like.shape) != leaf.shape or not hasattr(like, "device_mesh"):
        return 1  # the loading function reports the mismatch
    offset, shape = compute_local_box(like)
    return [list(offset), list(shape)]


def _decode_wanted_box(box: int | list[list[int]], leaf: TensorEntry) -> Box | None:
    if isinstance(box, int):
        return ((0,) * len(leaf.shape), leaf.shape) if box else None
    return tuple(box[0]), tuple(box[1])


def _gather_wanted_boxes(mine: list[Any], worker: Worker) -> list[list[Any]]:
    """Return the boxes that each worker needs; a worker that needs everything sends one number instead."""
    plain = mine[0] if mine and all(box == mine[0] for box in mine) and isinstance(mine[0], int) else None
    told = gather_json(plain if plain is not None else mine, worker)
    return [[row] * len(mine) if isinstance(row, int) else row for row in told]


class _PieceExchange:
    """Exchange of pieces in the same order on all workers, so that there is no deadlock."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def receive_own_stretch(
        self, leaf: TensorEntry, boxes: list[Box | None], chosen: ChosenSnapshot, data: dict[str, memoryview]
    ) -> torch.Tensor | None:
        """Return this worker's stretch of a tensor; None if it needs none."""
        rank, dtype = self._worker.rank, DTYPES[leaf.dtype]
        mine = boxes[rank]
        # Mapped files are copied: a view would keep the snapshot in the node's memory after its removal.
        is_mapped = chosen.manifest is not None and chosen.manifest.hash == layout.HASH_IN_MEMORY
        whole: torch.Tensor | None = None
        for source in sorted(leaf.sources, key=lambda source: source.box):
            reader = chosen.readers[source.file]
            piece = None
            if rank == reader and source.end > source.begin:
                stretch = data[source.file][source.begin : source.end]
                piece = torch.frombuffer(stretch, dtype=dtype).view(source.box[1])
            if piece is not None and mine == source.box and not is_mapped:
                whole = piece  # this is a view and copies nothing
            elif mine is not None and whole is None and assembly.intersect_boxes(mine, source.box) is not None:
                whole = torch.empty(mine[1], dtype=dtype)
            commons = [None if box is None else assembly.intersect_boxes(box, source.box) for box in boxes]
            if self._worker.world_size > 1 and all(common == source.box for common in commons):
                self._to_all(piece, reader, whole, mine, source.box)
                continue
            for taker, common in enumerate(commons):
                if common is not None:
                    self._to_one(piece, reader, taker, whole, mine, source.box, common)
        if mine is not None and whole is None:
            whole = torch.empty(mine[1], dtype=dtype)  # a tensor without elements
        return whole

    def _to_all(
        self, piece: torch.Tensor | None, reader: int, whole: torch.Tensor | None, mine: Box | None, box: Box
    ) -> None:
        assert whole is not None  # noqa: S101  # for the type checker
        assert mine is not None  # noqa: S101
        place = _slice_tensor_box(whole, mine, box)
        if piece is not None:
            dist.broadcast(view_tensor_bytes(piece), src=reader, group=self._worker.group)
            if place.data_ptr() != piece.data_ptr():
                place.copy_(piece)
        elif place.is_contiguous():
            dist.broadcast(view_tensor_bytes(place), src=reader, group=self._worker.group)
        else:
            held = torch.empty_like(place, memory_format=torch.contiguous_format)
            dist.broadcast(view_tensor_bytes(held), src=reader, group=self._worker.group)
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
            part = _slice_tensor_box(piece, box, common)
            if taker != rank:
                self._send_packed_tensor(view_tensor_bytes(part), taker)
            elif whole is not None and mine is not None and whole.data_ptr() != piece.data_ptr():
                _slice_tensor_box(whole, mine, common).copy_(part)
        elif rank == taker and whole is not None and mine is not None:
            place = _slice_tensor_box(whole, mine, common)
            held = place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype)
            dist.recv(view_tensor_bytes(held), src=reader, group=self._worker.group)
            if held is not place:
                place.copy_(held)

    def _send_packed_tensor(self, packed: torch.Tensor, taker: int) -> None:
        work = dist.isend(packed, dst=taker, group=self._worker.group)
        if work is not None:
            self._sent.append((work, packed))
        while sum(tensor.numel() for _, tensor in self._sent) > UNDER_WAY_BYTES:
            self._sent.pop(0)[0].wait()

    def finish(self) -> None:
        """Wait until all pieces are sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def _slice_tensor_box(tensor: torch.Tensor, has: Box, wanted: Box) -> torch.Tensor:
    """Return the position of a box within another box of the same tensor."""
    cuts: Iterator[slice] = (
        slice(begin - origin, begin - origin + size) for begin, size, origin in zip(*wanted, has[0], strict=True)
    )
    return tensor[tuple(cuts)]
