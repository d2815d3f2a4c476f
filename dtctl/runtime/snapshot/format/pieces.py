"""Pieces that each worker writes of a state that is spread over workers, or that several of them have alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import assembly
from dtctl.runtime.snapshot.json_collectives import gathered_json

GONE: Final = object()
"""Stands for what another worker writes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a larger tensor."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    """Shape of the larger tensor."""
    offset: tuple[int, ...]
    """Index of the first number in the larger tensor."""


Key = tuple[str, ...]
"""Path of a tensor in the parts, and the offset of the piece as its last word."""


def local(tree: Any) -> Any:
    """Return a tree in which every sharded tensor (DTensor) is a `Piece`; nothing is copied or exchanged."""
    if isinstance(tree, torch.Tensor) and hasattr(tree, "device_mesh"):
        own: torch.Tensor = tree.to_local().detach()  # type: ignore[attr-defined]
        return Piece(own, tuple(tree.shape), box_of(tree)[0])
    if isinstance(tree, Mapping):
        return {key: local(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [local(value) for value in tree]
    return tree


def box_of(tensor: torch.Tensor) -> assembly.Box:
    """Return the stretch of a sharded tensor that this worker has; all of any other."""
    if not hasattr(tensor, "device_mesh"):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    # To import this costs every training half a second, and only sharded ones have need of it.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)  # noqa: S101  # for the type checker
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


def like(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a whole tensor, as a DTensor like `tensor`, if that is sharded; else the whole.

    A tensor of another shape is left whole: loading reports it. One that is sharded already is left as it is.
    """
    if hasattr(whole, "device_mesh") or not hasattr(tensor, "device_mesh") or tensor.shape != whole.shape:
        return whole
    offset, shape = box_of(tensor)
    return sharded_like(tensor, whole[tuple(slice(i, i + size) for i, size in zip(offset, shape, strict=True))])


def sharded_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor that is sharded as `tensor` is, of this worker's part."""
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


class Division:
    """Assignment of pieces to workers: each piece once, and about as much on every worker that has something.

    Found out together once, and again only when a worker has something else than before.
    """

    def __init__(self, worker: Worker, firsts: Callable[[Key], bool]) -> None:
        """Nothing is exchanged yet.

        Args:
            worker: this worker.
            firsts: whether something is written by the first worker that has it, since others may have other values.
        """
        self._worker, self._firsts = worker, firsts
        self._had: list[list[Any]] | None = None
        self._mine: frozenset[Key] = frozenset()

    def mine(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this worker writes of its parts, which are of `local`. Collective over all workers."""
        have = [[size, self._firsts(key), *key] for key, size in _keys(parts, ())]
        changed = torch.tensor([int(have != self._had)])
        if int(self._worker.sum(changed)):
            self._had = have
            everyone = gathered_json(have, self._worker)
            self._mine = frozenset(self._divided(everyone))
        left = _without(parts, (), self._mine)
        return left if isinstance(left, dict) else {}

    def _divided(self, everyone: list[list[list[Any]]]) -> Iterator[Key]:
        """Keys of what this worker writes: what it has alone, and of the rest such that all write about as much."""
        holders: dict[Key, list[int]] = {}
        sizes: dict[Key, int] = {}
        for rank, have in enumerate(everyone):
            for size, first, *words in have:
                key = tuple(words)
                ranks = holders.setdefault(key, [])
                sizes[key] = size
                # `first` as the worker with the tensor has sent it: others lack it, and all need the same result.
                if not (first and ranks):
                    ranks.append(rank)
        loads = [0] * len(everyone)
        for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
            owner = min(holders[key], key=lambda rank: (loads[rank], rank))
            loads[owner] += sizes[key]
            if owner == self._worker.rank:
                yield key


def _keys(tree: Any, path: Key) -> Iterator[tuple[Key, int]]:
    tensor = tree.tensor if isinstance(tree, Piece) else tree
    if isinstance(tensor, torch.Tensor):
        # An empty piece of a larger tensor is nothing to write.
        if tensor.numel() or not isinstance(tree, Piece):
            yield _key(tree, path), tensor.numel() * tensor.element_size()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _keys(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _keys(value, (*path, str(index)))


def _key(tree: Any, path: Key) -> Key:
    return (*path, json.dumps(tree.offset if isinstance(tree, Piece) else None))


def _without(tree: Any, path: Key, mine: frozenset[Key]) -> Any:
    """Return the tree without tensors of others; where a list has one, None."""
    if isinstance(tree, torch.Tensor | Piece):
        return tree if _key(tree, path) in mine else GONE
    if isinstance(tree, Mapping):
        left = {key: _without(value, (*path, key), mine) for key, value in tree.items()}
        return {key: value for key, value in left.items() if value is not GONE}
    if isinstance(tree, list | tuple):
        found = [_without(value, (*path, str(index)), mine) for index, value in enumerate(tree)]
        return [None if value is GONE else value for value in found]
    return tree
