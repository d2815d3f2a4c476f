"""Assembly of parts from the files of several workers, each of which has pieces of tensors. Imports no torch.

A tensor of C-contiguous numbers is divided into boxes, and a worker's file has some of them. Values that are not
tensors are the same in every file, or are merged: dicts by keys, and an optimizer's groups by parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.format import headers


class InconsistentSnapshot(SnapshotError):
    """The files of a snapshot match their digests, but do not fit together."""


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Box of a tensor: index of its first number, and its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSource:
    """Location of a piece of a tensor in a file."""

    file: str
    begin: int
    """Offset in the data of the file, which follows its header."""
    end: int
    box: Box


@dataclass(slots=True, kw_only=True)
class TensorEntry:
    """Tensor of a part, with the locations of its pieces."""

    path: tuple[str, ...]
    dtype: str
    """Name of the number format in safetensors."""
    shape: tuple[int, ...]
    sources: list[PieceSource] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the name of the tensor in its part, such as `blocks.0.weight`."""
        return ".".join(self.path)

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole tensor in bytes."""
        return math.prod(self.shape) * headers.SIZES[self.dtype]


def assemble_part_trees(
    files: Iterable[tuple[str, str, headers.FileHeader]], *, pieces: bool = False
) -> dict[str, Any]:
    """Return all parts as trees, with a `TensorEntry` in place of each tensor.

    Args:
        files: part, name and header of each file. Values that several files have are taken from the first one.
        pieces: True if tensors may be incomplete.

    Raises:
        InconsistentSnapshot: a tensor is incomplete, or the files contradict each other.
    """
    try:
        trees = _merge_file_trees(files)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise InconsistentSnapshot(f"the parts of the snapshot are inconsistent: {exc}") from exc
    for part, tree in trees.items():
        for leaf in iter_tree_entries(tree):
            count = sum(math.prod(source.box[1]) for source in leaf.sources)
            if count != math.prod(leaf.shape) and not pieces:
                raise InconsistentSnapshot(f"{part}.{leaf.name} has {count} of {math.prod(leaf.shape)} numbers")
    return trees


def _merge_file_trees(files: Iterable[tuple[str, str, headers.FileHeader]]) -> dict[str, Any]:
    trees: dict[str, list[Any]] = {}
    for part, name, header in files:
        trees.setdefault(part, []).append(_build_entry_tree(header.tree, dict(header.tensors), name, ()))
    parts = {part: _merge_entry_trees(several) for part, several in trees.items()}
    for part, several in trees.items():
        if len(several) > 1 and part == "optimizer":
            parts[part]["groups"] = drop_repeated_parameters(group for tree in several for group in tree["groups"])
    return parts


def iter_tree_entries(tree: Any) -> Iterator[TensorEntry]:
    """Yield the tensors of a tree of `assemble_part_trees`, in its order."""
    if isinstance(tree, TensorEntry):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from iter_tree_entries(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from iter_tree_entries(value)


def replace_tree_entries(tree: Any, tensors: Mapping[tuple[str, ...], Any]) -> Any:
    """Return the tree with each leaf replaced by the value for its path."""
    if isinstance(tree, TensorEntry):
        return tensors[tree.path]
    if isinstance(tree, dict):
        return {key: replace_tree_entries(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replace_tree_entries(value, tensors) for value in tree]
    return tree


def drop_repeated_parameters(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an optimizer's groups without parameters that an earlier group has, and without empty groups."""
    names: set[str] = set()
    found = []
    for group in groups:
        fresh = [name for name in group["params"] if name not in names]
        names.update(fresh)
        if fresh:
            found.append({**group, "params": fresh})
    return found


def intersect_boxes(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of the same tensor; None if it is empty."""
    begin = tuple(map(max, one[0], other[0]))
    end = [min(a + size, b + other_size) for a, size, b, other_size in zip(*one, *other, strict=True)]
    shape = tuple(after - before for before, after in zip(begin, end, strict=True))
    return (begin, shape) if all(size > 0 for size in shape) else None


def iter_tensor_bytes(leaf: TensorEntry, data: Mapping[str, memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of a whole tensor in their order.

    Args:
        leaf: the tensor.
        data: contents of each file after its header.
    """
    parts = sorted(leaf.sources, key=lambda source: source.box[0])
    if all(source.box[1][1:] == leaf.shape[1:] for source in parts):  # contiguous pieces need no copy
        for source in parts:
            yield data[source.file][source.begin : source.end]
        return
    whole = memoryview(bytearray(leaf.size_bytes))
    size = headers.SIZES[leaf.dtype]
    for source in parts:
        piece = data[source.file][source.begin : source.end]
        for place, begin, count in iter_box_runs(leaf.shape, source.box):
            whole[place * size : (place + count) * size] = piece[begin * size : (begin + count) * size]
    yield whole


def iter_box_runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int, int]]:
    """Yield the longest contiguous runs of a box: begin in the whole tensor, begin in the box, length."""
    offset, size = box
    if not all(size):
        return
    dims = len(shape)
    inner = dims  # from this dim on, the box covers the whole tensor
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


def _build_entry_tree(tree: Any, tensors: dict[str, Any], file: str, path: tuple[str, ...]) -> Any:
    if headers.is_tensor(tree):
        name = tree[headers.TENSOR]
        entry = tensors.pop(name, None)
        # Each tensor may stand in one place only: otherwise a small tree that names a large tensor often would expand.
        if entry is None:
            raise ValueError(f"{'.'.join(path)} is a tensor that is missing, or stored elsewhere")
        own = tuple(entry["shape"])
        whole = tree.get(headers.OF, {"shape": own, "offset": [0] * len(own)})
        begin, end = entry["data_offsets"]
        shape, offset = tuple(whole["shape"]), tuple(whole["offset"])
        inside = zip(shape, offset, own, strict=True)
        if not all(type(all_) is int and 0 <= at <= at + part <= all_ < 1 << 62 for all_, at, part in inside):
            raise ValueError(f"{'.'.join(path)} is a piece of another tensor")
        source = PieceSource(file=file, begin=begin, end=end, box=(offset, own))
        return TensorEntry(path=path, dtype=entry["dtype"], shape=shape, sources=[source])
    if isinstance(tree, dict):
        return {key: _build_entry_tree(value, tensors, file, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_build_entry_tree(value, tensors, file, (*path, str(index))) for index, value in enumerate(tree)]
    return tree


def _merge_entry_trees(trees: Sequence[Any]) -> Any:
    present = [tree for tree in trees if tree is not None]
    if len(present) < 2:
        return present[0] if present else None
    first = present[0]
    if all(isinstance(tree, TensorEntry) for tree in present):
        if any((tree.shape, tree.dtype) != (first.shape, first.dtype) for tree in present):
            raise ValueError(f"pieces of {first.name} are of several tensors")
        boxes = {source.box: source for tree in reversed(present) for source in tree.sources}
        first.sources = list(boxes.values())
        return first
    if all(isinstance(tree, dict) for tree in present):
        keys = dict.fromkeys(key for tree in present for key in tree)
        return {key: _merge_entry_trees([tree[key] for tree in present if key in tree]) for key in keys}
    if all(isinstance(tree, list) and len(tree) == len(first) for tree in present):
        return [_merge_entry_trees(several) for several in zip(*present, strict=True)]
    return first
