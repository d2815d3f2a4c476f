"""Kinds of values: what is plain, what contains others, and what of a container can be kept as a whole."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, Final

import numpy as np
import torch

MAX_ELEMENTS: Final = 1024
"""Of a container. A longer one is a record of what happened, or data."""

PLAIN: Final = (bool, int, float, complex, str, bytes, range, type(None), torch.dtype, torch.device, np.generic, Enum)

FUNCTIONS: Final = (types.FunctionType, types.MethodType, functools.partial)

CONTAINERS: Final = (dict, OrderedDict, list, tuple, set, frozenset, deque)


def has_storage(tensor: object) -> bool:
    """Whether it is a tensor with numbers of its own in memory."""
    return isinstance(tensor, torch.Tensor) and not hasattr(tensor, "device_mesh") and tensor.layout is torch.strided


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers are there: sharding frees those of whole parameters, and leaves the tensors."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return not tensor.is_meta
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > tensor.storage_offset() * tensor.element_size()


def is_value(value: Any, stop: AbstractSet[int], *, plain: bool = False) -> bool:
    """Whether a container has numbers, text and tensors alone, none of which is in snapshots anyway.

    Args:
        value: a container.
        stop: identities of what must not be in it.
        plain: whether tensors do not count as such.
    """
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for item in items:
        if isinstance(item, CONTAINERS):
            fits = id(item) not in stop and type(item) in CONTAINERS and len(item) <= MAX_ELEMENTS
            fits = fits and is_value(item, stop, plain=plain)
        elif isinstance(item, torch.Tensor):
            fits = not plain and id(item) not in stop and not hasattr(item, "device_mesh") and has_memory(item)
        else:
            fits = isinstance(item, PLAIN) or (not plain and type(item) is np.ndarray and id(item) not in stop)
        if not fits:
            return False
    return True


def parts_of(value: Any) -> Iterator[object]:
    """What is in a container and may be in another one, too."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (torch.Tensor, np.ndarray, list, dict, set, deque)):
            yield item
        if isinstance(item, CONTAINERS):
            yield from parts_of(item)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value that is one, or a container of such."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
