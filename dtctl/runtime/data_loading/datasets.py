"""Data sets: what the loop reads batches from, and a file of tokens as one.

A data set is anything with a length and `batch(indices)`, or an ordinary map-style data set of torch, or shards that
can only be read one after the other. Who reads it, and when, is in feed.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from dtctl.errors import SpecError
from dtctl.runtime.data_loading.order import Indices
from dtctl.train.batch import ENDLESS

TOKEN_TYPES: Final = ("uint16", "uint32")


class Samples(Protocol):
    """Map-style data set, as torch defines it."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


@runtime_checkable
class Batches(Protocol):
    """A data set that makes whole batches at once, which is faster than sample by sample.

    What it makes should depend on the indices and on random numbers alone: before each call, Python's, NumPy's and
    torch's generators, and those that the data set keeps, are seeded by the position of the batch. A thread cannot have
    that (`data_workers: thread`), since it shares these generators with the loop: `batch` must draw nothing there.
    A class that never draws random numbers may have an attribute `deterministic = True` next to `batch`, which saves
    some 15 us a batch.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: Indices) -> Any:
        """Return the samples at `indices`, stacked, on the CPU."""


@runtime_checkable
class SampleStream(Protocol):
    """Samples that can only be read in sequence, cut into a fixed number of shards; it has no end.

    Position p of the training is sample p // shards of shard p % shards, so the order is the same for all numbers of
    workers and on every resume. A worker opens the shards that its positions fall on, and passes over the samples of
    others: where a global batch is a multiple of `shards`, or the other way round, that is least. An iterator may
    have `skip(n)`, which passes up to n samples faster than reading them and returns how many it passed; fewer than n
    mean that the shard is at its end.
    """

    shards: int

    def open(self, shard: int, epoch: int) -> Iterator[Any]:
        """Return the samples of a shard in its epoch-th reading, in an order that depends on nothing else."""


def is_deterministic(data: object) -> bool:
    """Return whether the class with `batch` also promises to draw no random numbers; not inherited."""
    for kind in type(data).__mro__:
        if "batch" in vars(kind):
            return bool(vars(kind).get("deterministic", False)) and "batch" not in getattr(data, "__dict__", {})
    return False


def size(data: Samples | Batches | SampleStream) -> int:
    """Return the number of samples; ENDLESS for a stream."""
    return ENDLESS if isinstance(data, SampleStream) else len(data)


def reader(data: Samples | Batches) -> Callable[[Indices], Any]:
    """Return how to get a batch from a data set of either kind."""
    if isinstance(data, Batches):
        return data.batch
    return lambda indices: default_collate([data[int(index)] for index in indices])


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on `device`, of whatever it is made (see `_each`)."""
    return batch if device.type == "cpu" else _each(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(batch: Any) -> Any:
    """Return the batch with every tensor in memory that a GPU can copy from while it computes; see `_each`."""
    return _each(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())


def _each(batch: Any, action: Callable[[Any], Any]) -> Any:
    """Return the batch with `action` done to every tensor, and all else as it is.

    Tuples (named ones too), lists, mappings (such as Hugging Face's BatchEncoding, a UserDict) and dataclasses keep
    their class and what else they have; a new one is made of each, so that the data set may hold on to its own.
    """
    if isinstance(batch, torch.Tensor | PackedSequence):
        return action(batch)
    if isinstance(batch, Mapping):
        values = {key: _each(value, action) for key, value in batch.items()}
        return values if type(batch) is dict else _with_entries(batch, values)
    if isinstance(batch, tuple | list):
        items = [_each(item, action) for item in batch]
        if hasattr(batch, "_make"):
            return type(batch)._make(items)
        return type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        copied = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Not by its constructor, which may do more than take them, and also where it is frozen.
            object.__setattr__(copied, field.name, _each(getattr(batch, field.name), action))
        return copied
    return batch


def _with_entries(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with other values under its keys and the same other attributes."""
    if not isinstance(batch, MutableMapping):
        return values
    copied = copy.copy(batch)
    if isinstance(copied, UserDict):
        copied.data = values
    else:
        copied.update(values)
    return copied


class TensorData:
    """Tensors of equal length as a data set; sample i is the tuple of their i-th entries."""

    deterministic = True

    def __init__(self, *tensors: torch.Tensor) -> None:
        if not tensors or any(len(tensor) != len(tensors[0]) for tensor in tensors):
            raise ValueError("a data set needs one tensor or several of equal length")
        self.tensors = tensors

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.tensors[0])

    def batch(self, indices: Indices) -> tuple[torch.Tensor, ...]:
        """Return the entries at `indices` of each tensor."""
        chosen = torch.from_numpy(indices)
        return tuple(tensor[chosen] for tensor in self.tensors)


class TokenFile:
    """A flat file of tokens (nanoGPT's .bin: little-endian integers without a header) cut into windows.

    The file is mapped, not read: workers of a node share its pages. Sample i holds tokens i * context up to and
    including (i + 1) * context; its inputs are all but the last and its targets all but the first, so each token is
    predicted once per epoch.
    """

    deterministic = True

    def __init__(self, path: Path, *, context: int, dtype: str = "uint16") -> None:
        """Map a file.

        Args:
            path: the file.
            context: tokens per sample.
            dtype: uint16 or uint32.

        Raises:
            SpecError: the file is missing, is no whole number of tokens, or is shorter than one sample.
        """
        if dtype not in TOKEN_TYPES:
            raise SpecError(f"tokens are {' or '.join(TOKEN_TYPES)}, not {dtype}", where=str(path))
        try:
            size_bytes = path.stat().st_size
        except OSError as exc:
            raise SpecError(f"the token file cannot be read: {exc.strerror}", where=str(path)) from exc
        width_bytes = np.dtype(dtype).itemsize
        if size_bytes % width_bytes or size_bytes // width_bytes <= context:
            raise SpecError(
                f"{size_bytes} bytes are not a whole number of {dtype} tokens, or fewer than {context + 1} tokens",
                where=str(path),
                hint="check the file's dtype, or lower the context",
            )
        self.tokens_per_sample = context
        self._tokens = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
        self._window = np.arange(context + 1, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of samples; the tokens after the last whole one are left out."""
        return (len(self._tokens) - 1) // self.tokens_per_sample

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64.

        Shapes:
            [B, context] and [B, context], views of one [B, context + 1].
        """
        starts = indices[:, None] * self.tokens_per_sample
        windows = torch.from_numpy(self._tokens[starts + self._window].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]
