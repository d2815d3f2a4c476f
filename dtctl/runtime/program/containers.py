"""Tensors, arrays and containers: what is kept as a whole, and what is looked into."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Final

import numpy as np
import torch

from dtctl.runtime.program.code import is_own_code
from dtctl.runtime.program.kinds import (
    CONTAINERS,
    MAX_ELEMENTS,
    PLAIN,
    has_memory,
    is_value,
    parts_of,
)
from dtctl.runtime.program.marks import SAMPLE_BYTES, Long, crc_of, crc_of_bytes, text_of
from dtctl.runtime.program.walk import StateEntry, Walk, refuse

LONG_ELEMENTS: Final = 100_000
"""Of a longer list of plain values that is still compared; one that has grown is a record."""


class ContainerWalk(Walk):
    """Below tensors, arrays and containers."""

    def _numbers(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if hasattr(value, "device_mesh") or not has_memory(value):
                return
            if value.numel() * value.element_size() <= SAMPLE_BYTES and value.layout is torch.strided:
                self._note(path, lambda: f"{tuple(value.shape)} {crc_of_bytes(value)}")
            if value.requires_grad and value.is_leaf:  # gradients that live from step to step
                self.visit(value.grad, f"{path}.grad", functools.partial(setattr, value, "grad"), depth + 1)
            self._public(value, path, depth)
        elif isinstance(value, np.ndarray):
            if type(value) is not np.ndarray or value.dtype.kind not in "biufc":
                self._compare(value, path)
                return
            if value.nbytes <= SAMPLE_BYTES:
                self._note(path, lambda: f"{value.shape} {crc_of(value)}")
        elif is_own_code(type(value).__module__):  # a generator that the user has derived from another
            self._below_members(value, path, depth)
        self._leaf(path, value, put)

    def _container(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        if type(value) not in CONTAINERS:
            if is_own_code(type(value).__module__) and not isinstance(value, tuple):
                self._below_members(value, path, depth)
            else:
                self._public(value, path, depth)
        if len(value) > MAX_ELEMENTS:
            if len(value) <= LONG_ELEMENTS and is_value(value, self._stop(), plain=True):
                self._note(path, lambda: f"{len(value)} elements, {zlib.crc32(text_of(value).encode()):08x}")
                self.leaves.setdefault(path, StateEntry(value, put, cache=self._cache, trusted=self._trusting))
            elif not isinstance(value, tuple | frozenset):
                self.leaves.setdefault(path, StateEntry(Long(value), refuse, cache=self._cache, trusted=self._trusting))
            return
        if is_value(value, self._stop()):
            # As a whole, since it may grow or be replaced. What is empty now may come to have anything, such as paths.
            if value and is_value(value, self._stop(), plain=True) and " at 0x" not in text_of(value):
                self._note(path, lambda: text_of(value)[:200])
            self._leaf(path, value, put)
            for part in parts_of(value):
                self._inner.setdefault(id(part), path)
                self._kept.append(part)
        elif isinstance(value, dict):
            self._items(value, path, depth)
        elif isinstance(value, list):
            for index, item in enumerate(list(value)):
                self.visit(item, f"{path}[{index}]", functools.partial(value.__setitem__, index), depth + 1)
        else:
            for index, item in enumerate(list(value)):
                self.visit(item, f"{path}[{index}]", refuse, depth + 1)

    def _items(self, value: Any, path: str, depth: int) -> None:
        for number, key in enumerate(list(value)):
            name = repr(key) if isinstance(key, PLAIN) else f"<{type(key).__qualname__} {number}>"
            self.visit(value[key], f"{path}[{name}]", functools.partial(value.__setitem__, key), depth + 1)

    def _stop(self) -> AbstractSet[int]:
        """What must not be a part of a container that is kept as a whole."""
        return self._known | self._seen.keys()
