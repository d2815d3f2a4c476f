"""A sum of the raw bits of tensors, which is the same however they are divided among workers.

The sum of one tensor adds, over its elements, bits * (2 * place + 1), modulo 2^64; the place is the index in the whole
tensor in row-major order. The sum of several tensors adds their sums, each multiplied by an odd number that follows
from the tensor's name. Sums of parts add up to that of the whole in any order, so workers need to exchange only one
number.

An element of eight bytes counts as two elements of four: modulo 2^64 the highest bits of an even number of elements
would cancel, and so would the signs of a negated tensor.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Shape = tuple[int, ...]
Places = npt.NDArray[np.int64]
MODULUS: Final = 1 << 64
BLOCK: Final = 1 << 15
"""Number of words that are widened at a time; they stay in the cache."""
ROW: Final = 1 << 10
"""Number of words that are summed as 64-bit floating point numbers: 2^31 * (1 + 3 + ... + 2047) = 2^51 is exact, and
BLAS is faster than any sum of integers in NumPy or torch."""
DEVICE_BLOCK: Final = 1 << 24
"""Number of words that are widened at a time on a GPU, where the launch of a kernel costs more than memory."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def sum_tensors(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the sum over tensors, or over this worker's parts of them.

    Args:
        tensors: name -> a tensor on any device, or a DTensor, of which this worker's part is used.

    Returns:
        A number below 2^64.
    """
    total = 0
    for name, tensor in _as_strided(tensors).items():
        shape, offset = tuple(tensor.shape), (0,) * tensor.dim()
        if hasattr(tensor, "device_mesh"):
            from dtctl.runtime.snapshot.format.pieces import compute_local_box

            offset, tensor = compute_local_box(tensor)[0], tensor.to_local()  # type: ignore[attr-defined]
        total += weigh_name(name) * sum_tensor_part(tensor, shape, offset)
    return total % MODULUS


def _as_strided(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, with indices and values of sparse ones as separate entries.

    Gradients of an embedding may be sparse.
    """
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
    """Return the odd factor for the sum of a tensor of this name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def sum_tensor_part(tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> int:
    """Return the sum over a part of a tensor.

    Args:
        tensor: the part, of any strides, on any device.
        shape: shape of the whole tensor.
        offset: index of the first element in the whole tensor.

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
    """Return the bits of a tensor as a vector of integers, in row-major order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().reshape(-1)
    return flat.view(_WORDS.get(flat.element_size(), torch.int32))


def _find_stretches(part: Shape, whole: Shape, offset: Shape) -> tuple[Places, int]:
    """Return where the contiguous stretches of a part begin in the whole tensor, and their length."""
    # Dimensions after the last divided one are contiguous with it.
    last = max((i for i, size in enumerate(part) if size != whole[i]), default=0)
    steps = [math.prod(whole[i + 1 :]) for i in range(len(whole))]
    places = np.asarray(sum(o * step for o, step in zip(offset, steps, strict=True)), dtype=np.int64)
    for i in range(last):
        places = np.add.outer(places, np.arange(part[i], dtype=np.int64) * steps[i])
    return places.reshape(-1), math.prod(part[last:])


def _sum_on_cpu(words: torch.Tensor, places: Places, count: int) -> int:
    numbers, total = words.numpy(), 0
    if len(places) == 1 or count > BLOCK // 2:
        for number, place in enumerate(places.tolist()):
            stretch = numbers[number * count : (number + 1) * count]
            for begin in range(0, count, BLOCK):
                total += _sum_block(stretch[begin : begin + BLOCK], place + begin)
        return total
    odd, rows = _list_odd_numbers()[:count], BLOCK // count
    for number in range(0, len(places), rows):  # many short stretches at a time
        starts = places[number : number + rows]
        table = numbers[number * count : (number + len(starts)) * count].reshape(-1, count).astype(np.int64)
        total += int(np.dot(table.sum(axis=0), odd)) + int(np.dot(table.sum(axis=1), 2 * starts))
    return total


def _sum_block(numbers: npt.NDArray[Any], place: int) -> int:
    """Return the sum over a block whose first word is at this index."""
    whole = len(numbers) // ROW * ROW
    total = 0
    if whole:
        sums = (numbers[:whole].reshape(-1, ROW).astype(np.float64) @ _build_row_weights()).astype(np.int64)
        starts = np.arange(place, place + whole, ROW, dtype=np.int64)
        total = int(sums[:, 1].sum()) + 2 * int(np.dot(sums[:, 0], starts))
    if whole < len(numbers):
        rest = numbers[whole:].astype(np.int64)
        total += int(np.dot(rest, _list_odd_numbers()[: len(rest)])) + 2 * (place + whole) * int(rest.sum())
    return total


@functools.lru_cache(maxsize=1)
def _build_row_weights() -> npt.NDArray[np.float64]:
    """Return two columns of factors for the words of a row: ones for their sum, odd numbers for the weighted sum."""
    return np.asfortranarray(np.stack([np.ones(ROW), np.arange(1.0, 2 * ROW, 2)], axis=1))


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


@functools.lru_cache(maxsize=1)
def _list_odd_numbers() -> Places:
    """Return the odd numbers for the longest stretch of a tensor that is summed together with others."""
    return np.arange(1, BLOCK, 2, dtype=np.int64)
