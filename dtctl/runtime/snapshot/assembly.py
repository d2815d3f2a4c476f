"""Assembly of parts from the files of several workers, which each have pieces of tensors. Imports no torch.

A tensor of C-contiguous numbers is divided into boxes; a worker's file has some of them. What is no tensor is the same
in every file, or is added up: dicts by keys, and an optimizer's groups by parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.format import headers


class Misfit(SnapshotError):
    """The files of a snapshot match their digests, but do not fit together."""


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A stretch of a tensor: index of its first number, and its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSource:
    """Place of a piece of a tensor."""

    file: str
    begin: int
    """Offset in the data of the file, which follows its header."""
    end: int
    box: Box


@dataclass(slots=True, kw_only=True)
class TreeEntry:
    """A tensor of a part, wherever its pieces are."""

    path: tuple[str, ...]
    dtype: str
    """Name in the format of safetensors."""
    shape: tuple[int, ...]
    sources: list[PieceSource] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the tensor in its part: `blocks.0.weight`."""
        return ".".join(self.path)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * headers.SIZES[self.dtype]


def assembled(files: Iterable[tuple[str, str, headers.Header]], *, pieces: bool = False) -> dict[str, Any]:
    """Return all parts as trees, with a `Leaf` in the place of each tensor.

    Args:
        files: part, name and header of each file; of what several have, that of the first counts.
        pieces: whether tensors may be there in part only.

    Raises:
        Misfit: a tensor is not all there, or what there is does not fit together.
    """
    try:
        trees = _fitted(files)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise Misfit(f"the parts of the snapshot do not fit together: {exc}") from exc
    for part, tree in trees.items():
        for leaf in leaves(tree):
            count = sum(math.prod(source.box[1]) for source in leaf.sources)
            if count != math.prod(leaf.shape) and not pieces:
                raise Misfit(f"{part}.{leaf.name} has {count} of {math.prod(leaf.shape)} numbers")
    return trees


def _fitted(files: Iterable[tuple[str, str, headers.Header]]) -> dict[str, Any]:
    trees: dict[str, list[Any]] = {}
    for part, name, header in files:
        trees.setdefault(part, []).append(_leafy(header.tree, dict(header.tensors), name, ()))
    parts = {part: _merged(several) for part, several in trees.items()}
    for part, several in trees.items():
        if len(several) > 1 and part == "optimizer":
            parts[part]["groups"] = one_group_each(group for tree in several for group in tree["groups"])
    return parts


def leaves(tree: Any) -> Iterator[TreeEntry]:
    """Yield the tensors of a tree of `assembled`, in its order."""
    if isinstance(tree, TreeEntry):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from leaves(value)


def replaced(tree: Any, tensors: Mapping[tuple[str, ...], Any]) -> Any:
    """Return the tree with something in the place of each leaf, by its path."""
    if isinstance(tree, TreeEntry):
        return tensors[tree.path]
    if isinstance(tree, dict):
        return {key: replaced(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replaced(value, tensors) for value in tree]
    return tree


def one_group_each(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An optimizer's groups without the parameters that an earlier one has, and without those that are then empty."""
    names: set[str] = set()
    found = []
    for group in groups:
        fresh = [name for name in group["params"] if name not in names]
        names.update(fresh)
        if fresh:
            found.append({**group, "params": fresh})
    return found


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes of the same tensor have in common; None if that is nothing."""
    begin = tuple(map(max, one[0], other[0]))
    end = [min(a + size, b + other_size) for a, size, b, other_size in zip(*one, *other, strict=True)]
    shape = tuple(after - before for before, after in zip(begin, end, strict=True))
    return (begin, shape) if all(size > 0 for size in shape) else None


def content(leaf: TreeEntry, data: Mapping[str, memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of a whole tensor in their order.

    Args:
        leaf: the tensor.
        data: of each file, behind its header.
    """
    parts = sorted(leaf.sources, key=lambda source: source.box[0])
    if all(source.box[1][1:] == leaf.shape[1:] for source in parts):  # in a row: nothing has to be put together
        for source in parts:
            yield data[source.file][source.begin : source.end]
        return
    whole = memoryview(bytearray(leaf.size_bytes))
    size = headers.SIZES[leaf.dtype]
    for source in parts:
        piece = data[source.file][source.begin : source.end]
        for place, begin, count in runs(leaf.shape, source.box):
            whole[place * size : (place + count) * size] = piece[begin * size : (begin + count) * size]
    yield whole


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a box in the whole tensor: place there, place in the box, length; the longest possible."""
    offset, size = box
    if not all(size):
        return
    dims = len(shape)
    inner = dims  # the first dim from which on the box has everything
    while inner and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)
    count = math.prod(size[inner:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(dims)]
    start = sum(place * stride for place, stride in zip(offset, strides, strict=True))
    index = [0] * inner
    for number in range(math.prod(size[:inner])):
        yield start + sum(i * stride for i, stride in zip(index, strides[:inner], strict=True)), number * count, count
        for dim in reversed(range(inner)):
            index[dim] += 1
            if index[dim] < size[dim]:
                break
            index[dim] = 0


def _leafy(tree: Any, tensors: dict[str, Any], file: str, path: tuple[str, ...]) -> Any:
    if headers.is_tensor(tree):
        name = tree[headers.TENSOR]
        entry = tensors.pop(name, None)
        # Each stands in one place. A small tree that names a large tensor often would be written out as often.
        if entry is None:
            raise ValueError(f"{'.'.join(path)} is a tensor that is not there, or stands elsewhere")
        own = tuple(entry["shape"])
        whole = tree.get(headers.OF, {"shape": own, "offset": [0] * len(own)})
        begin, end = entry["data_offsets"]
        shape, offset = tuple(whole["shape"]), tuple(whole["offset"])
        inside = zip(shape, offset, own, strict=True)
        if not all(type(all_) is int and 0 <= at <= at + part <= all_ < 1 << 62 for all_, at, part in inside):
            raise ValueError(f"{'.'.join(path)} is a piece of something else")
        source = PieceSource(file=file, begin=begin, end=end, box=(offset, own))
        return TreeEntry(path=path, dtype=entry["dtype"], shape=shape, sources=[source])
    if isinstance(tree, dict):
        return {key: _leafy(value, tensors, file, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_leafy(value, tensors, file, (*path, str(index))) for index, value in enumerate(tree)]
    return tree


def _merged(trees: Sequence[Any]) -> Any:
    present = [tree for tree in trees if tree is not None]
    if len(present) < 2:
        return present[0] if present else None
    first = present[0]
    if all(isinstance(tree, TreeEntry) for tree in present):
        if any((tree.shape, tree.dtype) != (first.shape, first.dtype) for tree in present):
            raise ValueError(f"pieces of {first.name} are of several tensors")
        boxes = {source.box: source for tree in reversed(present) for source in tree.sources}
        first.sources = list(boxes.values())
        return first
    if all(isinstance(tree, dict) for tree in present):
        keys = dict.fromkeys(key for tree in present for key in tree)
        return {key: _merged([tree[key] for tree in present if key in tree]) for key in keys}
    if all(isinstance(tree, list) and len(tree) == len(first) for tree in present):
        return [_merged(several) for several in zip(*present, strict=True)]
    return first
