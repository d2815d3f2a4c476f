"""Data sets from which the loop reads batches, and one for a file of tokens.

A data set is an object with a length and `batch(indices)`, an ordinary map-style data set of torch, or shards that can
only be read in sequence. feed.py determines which process reads it, and when.
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


class MapDataset(Protocol):
    """Map-style data set as torch defines it."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


@runtime_checkable
class BatchDataset(Protocol):
    """Data set that makes whole batches at once, which is faster than sample by sample.

    The batch should depend only on the indices and on random numbers: before each call, the generators of Python,
    NumPy, torch and the data set are seeded by the position of the batch. This is not possible in a thread
    (`data_workers: thread`), which shares these generators with the loop, so `batch` must draw none there.

    A class that never draws random numbers may have an attribute `deterministic = True` next to `batch`, which saves
    about 15 us per batch.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: Indices) -> Any:
        """Return the samples at `indices`, stacked, on the CPU."""


@runtime_checkable
class SampleStream(Protocol):
    """Endless samples that can only be read in sequence, divided into a fixed number of shards.

    Position p of the run is sample p // shards of shard p % shards, so the order is the same for all numbers of workers
    and on every resume. A worker opens the shards of its positions, and skips the samples of other workers in them; it
    skips fewest if a global batch is a multiple of `shards` or the reverse. An iterator may have `skip(n)`, which skips
    up to n samples faster than reading them and returns their number; a number below n means that the shard has ended.
    """

    shards: int

    def open(self, shard: int, epoch: int) -> Iterator[Any]:
        """Return the samples of a shard in its reading number `epoch`; their order must depend on nothing else."""


class CollatedDataset:
    """Data set with a function of its own that makes a batch of samples, as a DataLoader has it.

    Attributes:
        data: the program's data set.
        collate: makes a batch of samples.
        parts: objects of the program that it consists of, by name.
        irreproducible: reason why a sample depends on more than its position; None if there is no sign of it.
    """

    def __init__(self, data: Any, collate: Callable[[Any], Any]) -> None:
        """Store the program's objects."""
        self.data, self.collate = data, collate
        self.parts: dict[str, Any] = {"data": data, "collate_fn": collate}
        self.irreproducible: str | None = None


def choose_collate(data: object) -> Callable[[Any], Any]:
    """Return the function that makes a batch of samples of a data set."""
    return data.collate if isinstance(data, CollatedDataset) else default_collate


def is_deterministic(data: object) -> bool:
    """Return whether the class that defines `batch` promises to draw no random numbers; this is not inherited."""
    for kind in type(data).__mro__:
        if "batch" in vars(kind):
            return bool(vars(kind).get("deterministic", False)) and "batch" not in getattr(data, "__dict__", {})
    return False


def count_samples(data: MapDataset | BatchDataset | SampleStream) -> int:
    """Return the number of samples; ENDLESS for a stream."""
    return ENDLESS if isinstance(data, SampleStream) else len(data)


def make_batch_reader(data: MapDataset | BatchDataset) -> Callable[[Indices], Any]:
    """Return a function that reads a batch of a data set of either kind."""
    if isinstance(data, BatchDataset):
        return data.batch
    collate = choose_collate(data)
    return lambda indices: collate([data[int(index)] for index in indices])


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch, of any structure, with every tensor on `device` (see `_map_batch_tensors`)."""
    return (
        batch
        if device.type == "cpu"
        else _map_batch_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
    )


def pin_batch_tensors(batch: Any) -> Any:
    """Return the batch with every tensor in memory that a GPU can copy from while it computes.

    See `_map_batch_tensors`.
    """
    return _map_batch_tensors(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())


def _map_batch_tensors(batch: Any, action: Callable[[Any], Any]) -> Any:
    """Return the batch with `action` applied to every tensor; everything else stays the same.

    Tuples (also named ones), lists, mappings (such as Hugging Face's BatchEncoding, a UserDict) and dataclasses keep
    their class and their other attributes. They are copied, since the data set may keep its own ones.
    """
    if isinstance(batch, torch.Tensor | PackedSequence):
        return action(batch)
    if isinstance(batch, Mapping):
        values = {key: _map_batch_tensors(value, action) for key, value in batch.items()}
        return values if type(batch) is dict else _with_entries(batch, values)
    if isinstance(batch, tuple | list):
        items = [_map_batch_tensors(item, action) for item in batch]
        if hasattr(batch, "_make"):
            return type(batch)._make(items)
        return type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        copied = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Without the constructor, which may do more than store them; this works for frozen classes as well.
            object.__setattr__(copied, field.name, _map_batch_tensors(getattr(batch, field.name), action))
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
    """Data set of tensors of equal length; sample i is the tuple of their entries i."""

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

    The file is mapped, not read: workers of a node share its pages. Sample i consists of tokens i * context to (i + 1)
    * context, both included. Its inputs are all but the last, its targets all but the first, so each token is predicted
    once per epoch.
    """

    deterministic = True

    def __init__(self, path: Path, *, context: int, dtype: str = "uint16") -> None:
        """Map a file.

        Args:
            path: the file.
            context: tokens per sample.
            dtype: uint16 or uint32.

        Raises:
            SpecError: the file is missing, does not hold a whole number of tokens, or is shorter than one sample.
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
        """Return the number of samples; tokens after the last whole sample are left out."""
        return (len(self._tokens) - 1) // self.tokens_per_sample

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, int64.

        Shapes:
            [B, context] and [B, context], views of one [B, context + 1].
        """
        starts = indices[:, None] * self.tokens_per_sample
        windows = torch.from_numpy(self._tokens[starts + self._window].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]
