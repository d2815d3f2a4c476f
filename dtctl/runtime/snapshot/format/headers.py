"""The format of safetensors, in which parts are stored, so that other programs can read them. Imports no torch.

    8 bytes       length of the header, little endian
    header        JSON: name -> {"dtype", "shape", "data_offsets"}; padded with spaces, so that data begins aligned
    data          tensors without gaps

`__metadata__.tree` of the header is the part as JSON. `{"$tensor": name}` stands for a tensor, and
`{"$tensor": name, "$of": {"shape": ..., "offset": ...}}` for a piece of a larger tensor.

Source of the format: README.md of safetensors 0.6, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

ALIGNMENT: Final = 64
METADATA: Final = "__metadata__"
TREE: Final = "tree"
TENSOR: Final = "$tensor"
OF: Final = "$of"
"""Key of a piece: shape of the whole tensor, and the index there of the first number of the piece."""

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
    "C128": "complex128",  # a name of our own, as safetensors has none for it
}
"""Name of a number format in the file -> torch's name."""
SIZES: Final[Mapping[str, int]] = {
    name: 1 if name == "BOOL" else int(name.split("_")[0].lstrip("BFICU")) // 8 for name in DTYPES
}
"""Name of a number format in the file -> bytes of a number."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Header of a file, before its data."""

    tensors: Mapping[str, Any]
    tree: Any
    size_bytes: int
    """Bytes before the data."""


MAX_BYTES: Final = 100_000_000
"""Longest header that readers of safetensors accept."""


class UniqueNames:
    """Unique names of tensors: equal names get a number, so that {"a.b": x, "a": {"b": y}} is allowed.

    The time is linear in the number of names, even if thousands of them are equal.
    """

    def __init__(self) -> None:
        self._taken = {METADATA, ""}
        self._next: dict[str, int] = {}

    def make_unique(self, name: str) -> str:
        """Return this name, or this name with a number if it was returned before."""
        chosen = name
        while chosen in self._taken:
            number = self._next[name] = self._next.get(name, 0) + 1
            chosen = f"{name}_{number}"
        self._taken.add(chosen)
        return chosen


def encode_header(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of the file before its data.

    Args:
        tensors: name -> dtype, shape and data_offsets.
        metadata: text for readers.
    """
    text = json.dumps({METADATA: dict(metadata), **tensors}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def is_tensor(tree: Any) -> bool:
    """Return whether a node of a tree stands for a tensor or a piece of one."""
    return isinstance(tree, dict) and TENSOR in tree and tree.keys() <= {TENSOR, OF}


class MalformedFile(ValueError):
    """A file that matches its digest, but is not a valid file of a snapshot."""


def parse_header(file: memoryview) -> FileHeader:
    """Return the header of a file from its first bytes.

    Raises:
        MalformedFile: there is no header, or an entry for a tensor is impossible.
    """
    length = int.from_bytes(file[:8], "little")
    if len(file) < 8 or not 0 < length <= len(file) - 8:
        raise MalformedFile("its header is incomplete")
    try:
        document = json.loads(bytes(file[8 : 8 + length]))
        metadata = document.pop(METADATA)
        tree = json.loads(metadata[TREE])
        for name, entry in document.items():
            _check_tensor_entry(name, entry)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise MalformedFile(f"its header is malformed: {exc}") from None
    return FileHeader(document, tree, 8 + length)


def check_data(header: FileHeader, size_bytes: int) -> None:
    """Compare a header with the size of its file.

    Raises:
        MalformedFile: a tensor would end after the file, or two tensors share bytes.
    """
    place = 0
    for begin, end in sorted(entry["data_offsets"] for entry in header.tensors.values()):
        if begin < place:
            raise MalformedFile("two of its tensors share bytes")
        place = end
    if header.size_bytes + place > size_bytes:
        raise MalformedFile("its tensors are longer than the file")


class ReadableFile(Protocol):
    """Open file that headers are read from."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes; fewer at the end."""


def read_header(file: ReadableFile, size_bytes: int) -> FileHeader:
    """Return the header of an open file of this size.

    Raises:
        MalformedFile: as in `parse_header` and `check_data`.
        OSError: the file cannot be read.
    """
    beginning = file.read(8)
    length = int.from_bytes(beginning, "little")
    if length > size_bytes:
        raise MalformedFile("its header is longer than the file")
    header = parse_header(memoryview(beginning + file.read(length)))
    check_data(header, size_bytes)
    return header


def _check_tensor_entry(name: str, entry: Any) -> None:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = (*shape, begin, end)
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers) or len(shape) > 64:
        raise ValueError(f"shape or place of {name}")
    if end - begin != math.prod(shape) * SIZES[dtype]:
        raise ValueError(f"the size of {name}")
