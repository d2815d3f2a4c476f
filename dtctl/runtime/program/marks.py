"""Marks of values, by which it is seen that one has changed: nothing is copied, and of tensors nothing is read."""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from dtctl.runtime.program.kinds import CONTAINERS, MAX_ELEMENTS, PLAIN
from dtctl.runtime.program.stateful import is_stateful
from dtctl.runtime.snapshot.format.encoding import decode, generator_state, is_generator

SAMPLE_BYTES: Final = 1 << 16
"""Of a larger array that are compared."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """Something that is compared, and cannot be put back."""

    digest: str

    def mark(self) -> tuple[Any, ...]:
        """By which a change is seen."""
        return ("opaque", self.digest)


@dataclass(frozen=True, slots=True)
class Long:
    """A container of which too much is there to be kept."""

    value: Any

    def mark(self) -> tuple[Any, ...]:
        """By which most changes are seen."""
        return ("long", len(self.value), [id(item) for item in _some_items(self.value)])


def mark_of(value: Any, held: list[object] | None = None) -> Any:
    """Equal as long as a value is what it was; nothing is copied, and of tensors nothing is read.

    Args:
        value: anything that is looked at.
        held: is given the tensors, by whose addresses the mark goes.
    """
    if isinstance(value, torch.Tensor):
        if held is not None:
            held.append(value)
        return ("tensor", value.data_ptr() if value.layout is torch.strided else id(value), value._version, value.shape)
    if isinstance(value, np.ndarray):
        return ("array", crc_of(value))
    if is_generator(value):
        state = decode(generator_state(value))
        return ("generator", crc_of_bytes(state["torch"]) if "torch" in state else repr(state))
    if isinstance(value, torch.optim.Optimizer):
        tensors = [mark_of(one, held) for state in value.state.values() for one in state.values()]
        return ("optimizer", tensors, repr([{k: v for k, v in g.items() if k != "params"} for g in value.param_groups]))
    if isinstance(value, CONTAINERS) and len(value) > MAX_ELEMENTS:
        return (type(value).__name__, len(value), zlib.crc32(text_of(value).encode()))
    if isinstance(value, set | frozenset):
        return (type(value).__name__, len(value), text_of(value))
    if isinstance(value, Mapping):
        return ("mapping", len(value), [(repr(key), mark_of(item, held)) for key, item in value.items()])
    if isinstance(value, list | tuple | deque):
        return (type(value).__name__, len(value), [mark_of(item, held) for item in value])
    if isinstance(value, PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, Opaque | Long):
        return value.mark()
    if is_stateful(value):
        try:
            return ("state", mark_of(value.state_dict(), held))
        except Exception as exc:  # noqa: BLE001  # the user's code, at a time when nobody calls it
            return ("state", type(exc).__qualname__)
    return ("other", type(value).__qualname__)


def is_large(value: Any) -> bool:
    """Whether a copy of it, only to be on the safe side, is too much."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() > SAMPLE_BYTES
    if isinstance(value, np.ndarray):
        return value.nbytes > SAMPLE_BYTES
    if isinstance(value, CONTAINERS):
        return len(value) > MAX_ELEMENTS or any(map(is_large, value.values() if isinstance(value, dict) else value))
    return is_stateful(value)


def has_grown(before: Any, mark: Any) -> bool:
    """Whether two marks of a container tell of other lengths."""
    return isinstance(before, tuple) and before[0] == mark[0] and len(before) > 1 and before[1] != mark[1]


def _some_items(value: Any) -> Iterable[Any]:
    """Of a long container, few enough to be looked at each time: its ends, and some between."""
    if not isinstance(value, list | deque):
        items = value.values() if isinstance(value, dict) else value
        return itertools.islice(items, 64)
    stride = max(1, len(value) // 64)
    return [*itertools.islice(value, 0, None, stride), *itertools.islice(reversed(value), 16)]


def crc_of(value: np.ndarray[Any, Any]) -> str:
    """Of an array; of a large one, of some of it."""
    if value.nbytes <= 1 << 20:
        return f"{zlib.crc32(np.ascontiguousarray(value).tobytes()):08x}"
    flat = value.reshape(-1)
    some = flat[:: max(1, flat.size * flat.itemsize // SAMPLE_BYTES)]
    return f"{zlib.crc32(np.ascontiguousarray(some).tobytes()):08x}"


def crc_of_bytes(value: torch.Tensor) -> str:
    """Of a tensor."""
    plain = value.detach().cpu().contiguous().reshape(-1)
    return f"{zlib.crc32(plain.view(torch.uint8).numpy().tobytes()):08x}" if plain.numel() else "empty"


def text_of(value: Any) -> str:
    """As `repr`, with sets in an order that is the same in every process."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {text_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple | deque):
        return f"({', '.join(map(text_of, value))})"
    return repr(value)
