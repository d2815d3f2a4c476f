"""A sum of the raw bits of tensors, which is the same however they are divided among workers.

Of a tensor: the sum over its elements of bits * (2 * place + 1), modulo 2^64, where the place is that in the whole
tensor in row-major order. Of several: the sum of theirs, each times an odd number that follows from its name. Sums of
parts add up to that of the whole, in any order, so that workers need to exchange one number.

An element of eight bytes counts as two of four: modulo 2^64 the highest bit of an even number of elements would cancel
out, and with it the signs of a tensor that was negated.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Shape = tuple[int, ...]
Places = npt.NDArray[np.int64]
MODULUS: Final = 1 << 64
BLOCK: Final = 1 << 15
"""Words that are widened at a time; they stay in the cache."""
DEVICE_BLOCK: Final = 1 << 24
"""The same on a GPU, where launching a kernel costs more than memory."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def sum_tensors(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the sum over whole tensors, or over the parts of them that this worker has.

    Args:
        tensors: name -> a tensor on any device, or a DTensor, which has this worker's part.

    Returns:
        A number below 2^64.
    """
    total = 0
    for name, tensor in _as_strided(tensors).items():
        shape, offset = tuple(tensor.shape), (0,) * tensor.dim()
        if hasattr(tensor, "device_mesh"):
            from dtctl.runtime.snapshot.format.pieces import box_of

            offset, tensor = box_of(tensor)[0], tensor.to_local()  # type: ignore[attr-defined]
        total += weigh_name(name) * sum_part(tensor, shape, offset)
    return total % MODULUS


def _as_strided(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same with places and values apart of what is sparse, such as gradients of an embedding."""
    strided: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.sparse_coo:
            whole = tensor.coalesce()
            strided |= {f"{name}\0indices": whole.indices(), f"{name}\0values": whole.values()}
        else:
            strided[name] = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return strided


@functools.lru_cache(maxsize=1 << 16)
def weigh_name(name: str) -> int:
    """Return the odd number that the sum of a tensor of this name counts with."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def sum_part(tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> int:
    """Return the sum over a part of a tensor.

    Args:
        tensor: the part, of any strides, on any device.
        shape: of the whole tensor.
        offset: in there, of the first element.

    Returns:
        A number below 2^64; 0 for an empty part.
    """
    if not tensor.numel():
        return 0
    words = _as_words(tensor.detach())
    per_element = words.numel() // tensor.numel()
    places, count = _find_stretches(tuple(tensor.shape), tuple(shape), tuple(offset))
    sum_stretches = _sum_on_cpu if words.device.type == "cpu" else _sum_on_device
    return sum_stretches(words, places * per_element, count * per_element) % MODULUS


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits as a vector of integers, in row-major order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().reshape(-1)
    return flat.view(_WORDS.get(flat.element_size(), torch.int32))


def _find_stretches(part: Shape, whole: Shape, offset: Shape) -> tuple[Places, int]:
    """Return where stretches of a part that are in one piece in the whole begin there, and how long each is."""
    # All dimensions behind the last divided one are in one piece with it.
    last = max((i for i, size in enumerate(part) if size != whole[i]), default=0)
    steps = [math.prod(whole[i + 1 :]) for i in range(len(whole))]
    places = np.asarray(sum(o * step for o, step in zip(offset, steps, strict=True)), dtype=np.int64)
    for i in range(last):
        places = np.add.outer(places, np.arange(part[i], dtype=np.int64) * steps[i])
    return places.reshape(-1), math.prod(part[last:])


def _sum_on_cpu(words: torch.Tensor, places: Places, count: int) -> int:
    numbers, odd, total = words.numpy(), _list_odd_numbers(min(count, BLOCK)), 0
    if len(places) == 1 or count > BLOCK // 2:
        for number, place in enumerate(places.tolist()):
            for begin in range(0, count, BLOCK):
                first = number * count + begin
                block = numbers[first : first + min(BLOCK, count - begin)].astype(np.int64)
                total += int(np.dot(block, odd[: len(block)]))
                if place + begin:
                    total += 2 * (place + begin) * int(block.sum())
        return total
    rows = BLOCK // count
    for number in range(0, len(places), rows):  # many short ones at a time
        starts = places[number : number + rows]
        table = numbers[number * count : (number + len(starts)) * count].reshape(-1, count).astype(np.int64)
        total += int(np.dot(table.sum(axis=0), odd)) + int(np.dot(table.sum(axis=1), 2 * starts))
    return total


def _sum_on_device(words: torch.Tensor, places: Places, count: int) -> int:
    table = words.view(-1, count)
    rows = max(1, DEVICE_BLOCK // count)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number in range(0, len(places), rows):
        starts = torch.from_numpy(2 * places[number : number + rows]).to(words.device)
        for begin in range(0, count, DEVICE_BLOCK):
            block = table[number : number + rows, begin : begin + DEVICE_BLOCK].to(torch.int64)
            odd = torch.arange(1, 2 * block.shape[1], 2, dtype=torch.int64, device=words.device)
            total += (block * odd).sum() + (block.sum(dim=1) * (starts + 2 * begin)).sum()
    return int(total)


@functools.lru_cache(maxsize=4)
def _list_odd_numbers(count: int) -> Places:
    return np.arange(1, 2 * count, 2, dtype=np.int64)
