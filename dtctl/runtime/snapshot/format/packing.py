"""Part of a snapshot as one file in the format of safetensors; headers.py has the format.

Tensors with the widest numbers come first in the data, so that every tensor is aligned without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.format import headers
from dtctl.runtime.snapshot.format.headers import OF, TENSOR
from dtctl.runtime.snapshot.format.pieces import TensorPiece

DTYPES: Final[Mapping[str, torch.dtype]] = {name: getattr(torch, ours) for name, ours in headers.DTYPES.items()}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Place of a tensor in the data of its file."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PartOutline:
    """Outline of a part: everything except the bytes of its tensors."""

    tree: Any
    """The part, with `{"$tensor": name}` in place of each tensor."""
    slots: tuple[TensorSlot, ...]
    size_bytes: int
    """Size of the data in bytes."""

    def header(self) -> bytes:
        """Return the bytes of the file before its data.

        Raises:
            SnapshotError: the part has a value that snapshots cannot keep.
        """
        document: dict[str, Any] = {}
        for slot in self.slots:
            document[slot.name] = {
                "dtype": _NAMES[slot.dtype],
                "shape": list(slot.shape),
                "data_offsets": [slot.begin, slot.end],
            }
        return headers.encode_header(document, {headers.TREE: _format_tree_json(self.tree)})


def build_part_outline(part: Any) -> tuple[PartOutline, list[torch.Tensor]]:
    """Return the outline of a part's file, and its tensors in the order of the data.

    Args:
        part: tensors and JSON's values in dicts, lists and tuples (which come back as lists).

    Raises:
        SnapshotError: a tensor is of a kind that snapshots cannot keep.
    """
    found: dict[str, torch.Tensor] = {}
    tree = _build_part_skeleton(part, "", found, headers.UniqueNames())
    ordered = sorted(found.items(), key=lambda item: -item[1].element_size())
    slots, place = [], 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
            raise SnapshotError(
                f"{name} is a tensor of {tensor.dtype}, {tensor.layout}, which snapshots do not keep",
                hint="keep it out of the state (persistent=False), or in another form",
            )
        size_bytes = tensor.numel() * tensor.element_size()
        slots.append(TensorSlot(name, tensor.dtype, tensor.shape, place, place + size_bytes))
        place += size_bytes
    return PartOutline(tree, tuple(slots), place), [tensor for _, tensor in ordered]


def view_slot_tensor(buffer: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """Return a view of a tensor in the buffer of its file's data, which is uint8 and aligned."""
    return buffer[slot.begin : slot.end].view(slot.dtype).view(slot.shape)


def _build_part_skeleton(tree: Any, path: str, found: dict[str, torch.Tensor], free: headers.UniqueNames) -> Any:
    if isinstance(tree, TensorPiece):
        of = {"shape": list(tree.shape), "offset": list(tree.offset)}
        return {**_build_part_skeleton(tree.tensor, path, found, free), OF: of}
    if isinstance(tree, torch.Tensor):
        name = free.make_unique(path)
        found[name] = tree.detach()
        return {TENSOR: name}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise SnapshotError(
                f"{path or 'a part'} has a key that is not text, and snapshots are JSON and tensors",
                hint="name entries by text",
            )
        return {
            key: _build_part_skeleton(value, f"{path}.{key}" if path else key, found, free)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        names = (f"{path}.{index}" if path else str(index) for index in range(len(tree)))
        return [_build_part_skeleton(value, name, found, free) for name, value in zip(names, tree, strict=True)]
    return tree


def _format_tree_json(tree: Any) -> str:
    try:
        return json.dumps(tree, separators=(",", ":"))
    except (TypeError, ValueError) as exc:
        raise SnapshotError(
            f"the state has a value that snapshots do not keep: {exc}",
            hint="keep tensors, numbers, text, lists and dicts; nothing is pickled",
        ) from exc
