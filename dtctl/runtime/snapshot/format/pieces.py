"""Pieces of the state that each worker writes, if the state is spread over workers or several of them have the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import assembly
from dtctl.runtime.snapshot.json_collectives import gather_json

GONE: Final = object()
"""Marker for a value that another worker writes."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A stretch of a larger tensor."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    """Shape of the larger tensor."""
    offset: tuple[int, ...]
    """Index of the first number in the larger tensor."""


Key = tuple[str, ...]
"""Path of a tensor in the parts, followed by the offset of the piece."""


def extract_local_pieces(tree: Any) -> Any:
    """Return a tree in which every sharded tensor (DTensor) is a `TensorPiece`, without copies or exchanges."""
    if isinstance(tree, torch.Tensor) and hasattr(tree, "device_mesh"):
        own: torch.Tensor = tree.to_local().detach()  # type: ignore[attr-defined]
        return TensorPiece(own, tuple(tree.shape), compute_local_box(tree)[0])
    if isinstance(tree, Mapping):
        return {key: extract_local_pieces(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [extract_local_pieces(value) for value in tree]
    return tree


def compute_local_box(tensor: torch.Tensor) -> assembly.Box:
    """Return the box of a sharded tensor that this worker has; of any other tensor, the box of the whole."""
    if not hasattr(tensor, "device_mesh"):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    # The import costs half a second, and only sharded tensors need it.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)  # noqa: S101  # for the type checker
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


def shard_tensor_like(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a whole tensor as a DTensor like `tensor`, or the whole if `tensor` is not sharded.

    A tensor of another shape is returned whole, and the loading function reports it. A sharded tensor is returned as it
    is.
    """
    if hasattr(whole, "device_mesh") or not hasattr(tensor, "device_mesh") or tensor.shape != whole.shape:
        return whole
    offset, shape = compute_local_box(tensor)
    return shard_like(tensor, whole[tuple(slice(i, i + size) for i, size in zip(offset, shape, strict=True))])


def shard_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor sharded like `tensor`, with `part` as this worker's part."""
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)  # noqa: S101  # for the type checker
    return DTensor.from_local(
        part.to(tensor.to_local().device).contiguous(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def find_buffers(model: nn.Module) -> Callable[[Key], bool]:
    """Return a predicate for the buffers of a model, such as running means of each worker's own samples.

    The first worker's buffers count, for a snapshot and for its sum.
    """
    trained = {name for name, _ in model.named_parameters()}
    return lambda key: key[0] == "model" and key[1] not in trained


class PieceAssignment:
    """Assignment of pieces to workers: each piece once, with about equal shares for the workers that have it.

    The workers compute it together once, and repeat this only when one of them has different pieces.
    """

    def __init__(self, worker: Worker, firsts: Callable[[Key], bool]) -> None:
        """Prepare the assignment; the workers exchange their lists of pieces at the first selection.

        Args:
            worker: this worker.
            firsts: returns True for pieces that the first worker that has them writes, since values of the others may
                differ.
        """
        self._worker, self._firsts = worker, firsts
        self._had: list[list[Any]] | None = None
        self._mine: frozenset[Key] = frozenset()

    def select_own_pieces(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pieces that this worker writes, out of its parts from `extract_local_pieces`.

        Collective over all workers.
        """
        have = [[size, self._firsts(key), *key] for key, size in _list_tensor_keys(parts, ())]
        changed = torch.tensor([int(have != self._had)])
        if int(self._worker.sum(changed)):
            self._had = have
            everyone = gather_json(have, self._worker)
            self._mine = frozenset(self._choose_written_keys(everyone))
        left = _remove_foreign_tensors(parts, (), self._mine)
        return left if isinstance(left, dict) else {}

    def _choose_written_keys(self, everyone: list[list[list[Any]]]) -> Iterator[Key]:
        """Yield the keys that this worker writes: its unique pieces, and a balanced share of the others."""
        holders: dict[Key, list[int]] = {}
        sizes: dict[Key, int] = {}
        for rank, have in enumerate(everyone):
            for size, first, *words in have:
                key = tuple(words)
                ranks = holders.setdefault(key, [])
                sizes[key] = size
                # `first` is used as the holder of the tensor has sent it, since all workers need the same result.
                if not (first and ranks):
                    ranks.append(rank)
        loads = [0] * len(everyone)
        for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
            owner = min(holders[key], key=lambda rank: (loads[rank], rank))
            loads[owner] += sizes[key]
            if owner == self._worker.rank:
                yield key


def _list_tensor_keys(tree: Any, path: Key) -> Iterator[tuple[Key, int]]:
    tensor = tree.tensor if isinstance(tree, TensorPiece) else tree
    if isinstance(tensor, torch.Tensor):
        # Empty pieces of larger tensors are not written.
        if tensor.numel() or not isinstance(tree, TensorPiece):
            yield _build_piece_key(tree, path), tensor.numel() * tensor.element_size()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _list_tensor_keys(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _list_tensor_keys(value, (*path, str(index)))


def _build_piece_key(tree: Any, path: Key) -> Key:
    return (*path, json.dumps(tree.offset if isinstance(tree, TensorPiece) else None))


def _remove_foreign_tensors(tree: Any, path: Key, mine: frozenset[Key]) -> Any:
    """Return the tree without tensors that other workers write; in a list they become None."""
    if isinstance(tree, torch.Tensor | TensorPiece):
        return tree if _build_piece_key(tree, path) in mine else GONE
    if isinstance(tree, Mapping):
        left = {key: _remove_foreign_tensors(value, (*path, key), mine) for key, value in tree.items()}
        return {key: value for key, value in left.items() if value is not GONE}
    if isinstance(tree, list | tuple):
        found = [_remove_foreign_tensors(value, (*path, str(index)), mine) for index, value in enumerate(tree)]
        return [None if value is GONE else value for value in found]
    return tree
