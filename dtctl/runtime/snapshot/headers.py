"""The format of safetensors, in which parts lie on disk, so that others can read them. Imports no torch.

    8 bytes       length of the header, little endian
    header        JSON: name -> {"dtype", "shape", "data_offsets"}; padded with spaces, so that data begins aligned
    data          tensors without gaps

`__metadata__.tree` of the header is the part as JSON, with `{"$tensor": name}` in the place of each tensor.
Source of the format: README.md of safetensors 0.6, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

ALIGNMENT: Final = 64
METADATA: Final = "__metadata__"
TREE: Final = "tree"
TENSOR: Final = "$tensor"

DTYPES: Final[Mapping[str, str]] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "C128": "complex128",  # ours: safetensors has no name for it
}
"""Name in the file -> torch's name."""


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the data."""

    tensors: Mapping[str, Any]
    tree: Any
    size_bytes: int
    """Where the data begins."""

    def named(self, tree: Any, path: str) -> Iterator[tuple[str, Any]]:
        """Every tensor's entry with its path in a tree of this header, `model.blocks.0.weight`."""
        if isinstance(tree, dict):
            if tree.keys() == {TENSOR}:
                yield path, self.tensors[tree[TENSOR]]
                return
            for key, value in tree.items():
                yield from self.named(value, f"{path}.{key}")
        elif isinstance(tree, list):
            for index, value in enumerate(tree):
                yield from self.named(value, f"{path}.{index}")


def to_bytes(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """All that stands before the data.

    Args:
        tensors: name -> dtype, shape and data_offsets.
        metadata: text for readers.
    """
    text = json.dumps({METADATA: dict(metadata), **tensors}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def parse(file: memoryview) -> Header:
    """The header of a file, of which there is at least the beginning."""
    length = int.from_bytes(file[:8], "little")
    document = json.loads(bytes(file[8 : 8 + length]))
    metadata = document.pop(METADATA)
    return Header(document, json.loads(metadata[TREE]), 8 + length)
