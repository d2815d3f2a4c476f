"""One part of a snapshot as one file in the format of safetensors, so that others can read it; nothing is pickled.

    8 bytes       length of the header, little endian
    header        JSON: name -> {"dtype", "shape", "data_offsets"}; padded with spaces, so that data begins aligned
    data          tensors, the widest numbers first, without gaps

`__metadata__.tree` of the header is the part as JSON, with `{"$tensor": name}` in the place of each tensor.
Source of the format: safetensors 0.6, README.md, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from dtctl.errors import SnapshotError

ALIGNMENT: Final = 64
TREE: Final = "tree"
TENSOR: Final = "$tensor"

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,  # ours: safetensors has no name for it
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies in the data of its file."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Outline:
    """A part without the bytes of its tensors."""

    tree: Any
    """The part, with `{"$tensor": name}` in the place of tensors."""
    slots: tuple[Slot, ...]
    size_bytes: int
    """Of the data."""

    def header(self) -> bytes:
        """All that stands before the data.

        Raises:
            SnapshotError: the part has a value that is not kept.
        """
        document: dict[str, Any] = {"__metadata__": {TREE: _text(self.tree)}}
        for slot in self.slots:
            document[slot.name] = {
                "dtype": _NAMES[slot.dtype],
                "shape": list(slot.shape),
                "data_offsets": [slot.begin, slot.end],
            }
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def outline(part: Any) -> tuple[Outline, list[torch.Tensor]]:
    """How a part will lie in a file, and its tensors in that order.

    Args:
        part: tensors and JSON's values in dicts, lists and tuples (which come back as lists).

    Raises:
        SnapshotError: a tensor is of a kind that is not kept.
    """
    found: dict[str, torch.Tensor] = {}
    tree = _skeleton(part, "", found)
    ordered = sorted(found.items(), key=lambda item: -item[1].element_size())
    slots, place = [], 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
            raise SnapshotError(
                f"{name} is a tensor of {tensor.dtype}, {tensor.layout}, which snapshots do not keep",
                hint="keep it out of the state (persistent=False), or in another form",
            )
        size_bytes = tensor.numel() * tensor.element_size()
        slots.append(Slot(name, tensor.dtype, tensor.shape, place, place + size_bytes))
        place += size_bytes
    return Outline(tree, tuple(slots), place), [tensor for _, tensor in ordered]


def view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A tensor of a file in a buffer of its data, uint8 and aligned."""
    return buffer[slot.begin : slot.end].view(slot.dtype).view(slot.shape)


def unpack(file: torch.Tensor) -> Any:
    """The part in the bytes of a file whose digest was found right.

    Args:
        file: uint8, the whole file; tensors of the part are views of it where that is possible.
    """
    length = int.from_bytes(file[:8].numpy().tobytes(), "little")
    document = json.loads(file[8 : 8 + length].numpy().tobytes())
    data = file[8 + length :]
    tree = json.loads(document.pop("__metadata__")[TREE])
    tensors = {
        name: view(data, Slot(name, DTYPES[entry["dtype"]], torch.Size(entry["shape"]), *entry["data_offsets"]))
        for name, entry in document.items()
    }
    return _filled(tree, tensors)


def _skeleton(tree: Any, path: str, found: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        while path in found or path in ("", "__metadata__"):  # {"a.b": x, "a": {"b": y}} is allowed
            path += "_"
        found[path] = tree.detach()
        return {TENSOR: path}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise SnapshotError(
                f"{path or 'a part'} has a key that is not text, and snapshots are JSON and tensors",
                hint="name entries by text",
            )
        return {key: _skeleton(value, f"{path}.{key}" if path else key, found) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_skeleton(value, f"{path}.{index}" if path else str(index), found) for index, value in enumerate(tree)]
    return tree


def _filled(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {TENSOR}:
            return tensors[tree[TENSOR]]
        return {key: _filled(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_filled(value, tensors) for value in tree]
    return tree


def _text(tree: Any) -> str:
    try:
        return json.dumps(tree, separators=(",", ":"))
    except (TypeError, ValueError) as exc:
        raise SnapshotError(
            f"the state has a value that snapshots do not keep: {exc}",
            hint="keep tensors, numbers, text, lists and dicts; nothing is pickled",
        ) from exc
