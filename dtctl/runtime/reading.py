"""From positions in the stream of samples to batches: the same bits wherever and by how many processes they are read.

A sample that draws random numbers (augmentation) draws them from generators seeded by (seed, position), so what it
becomes depends on neither the process that reads it nor what was read before, and differs from epoch to epoch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from dtctl.runtime.data import Batches, Samples, Stream
from dtctl.runtime.order import Indices, mix
from dtctl.runtime.randomness import capture, restore

CPU = torch.device("cpu")


class Reader:
    """Makes batches of a data set of any kind; may be sent to another process."""

    def __init__(self, data: Samples | Batches | Stream, seed: int) -> None:
        self.data, self._seed = data, seed
        self._cursors: dict[int, Cursor] = {}
        self.at_once: Callable[[Indices], Any] | None = None
        """How to get a whole batch, for data sets that make them; what they make does not depend on positions."""
        self._read: Callable[[Indices, Indices], Any] = self._one_by_one
        if isinstance(data, Stream):
            self._read = self._from_stream
        elif isinstance(data, Batches):
            self.at_once = data.batch

    def __call__(self, indices: Indices, positions: Indices) -> Any:
        """The batch of the samples at `indices`, which stand at `positions` in the stream; on the CPU."""
        return self.at_once(indices) if self.at_once is not None else self._read(indices, positions)

    def _one_by_one(self, indices: Indices, positions: Indices) -> Any:
        seeds = self._seeds(positions)
        kept = capture(CPU)
        samples = []
        for index, seed in zip(indices.tolist(), seeds, strict=True):
            _seed_all(seed)
            samples.append(self.data[index])  # type: ignore[index]
        restore(kept, CPU)
        return default_collate(samples)

    def _from_stream(self, _indices: Indices, positions: Indices) -> Any:
        stream = cast(Stream, self.data)
        seeds = self._seeds(positions)
        kept = capture(CPU)
        samples = []
        for position, seed in zip(positions.tolist(), seeds, strict=True):
            place, shard = divmod(position, stream.shards)
            cursor = self._cursors.get(shard)
            if cursor is None or cursor.place > place:
                cursor = self._cursors[shard] = Cursor(stream, shard)
            cursor.go_to(place)
            _seed_all(seed)
            samples.append(cursor.take())
        restore(kept, CPU)
        return default_collate(samples)

    def _seeds(self, positions: Indices) -> list[int]:
        found: list[int] = mix(mix(positions.astype(np.uint64)) + np.uint64(self._seed % 2**64)).tolist()
        return found


def _seed_all(seed: int) -> None:
    """As `worker.seed_all`, without looking for GPUs."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)


class Cursor:
    """A place in one shard of a stream, which is read again and again.

    Attributes:
        place: how many samples of the shard have been taken or passed, over all epochs.
    """

    def __init__(self, stream: Stream, shard: int) -> None:
        self.place = 0
        self._stream, self._shard, self._epoch, self._taken = stream, shard, 0, 0
        self._samples: Iterator[Any] = iter(stream.open(shard, 0))

    def go_to(self, place: int) -> None:
        """Pass what stands before a place."""
        while self.place < place:
            wanted = place - self.place
            skip = getattr(self._samples, "skip", None)
            passed = skip(wanted) if skip else sum(1 for _ in itertools.islice(self._samples, wanted))
            self.place += passed
            self._taken += passed
            if passed < wanted:
                self._again()

    def take(self) -> Any:
        """The sample at this place."""
        for sample in self._samples:
            self.place += 1
            self._taken += 1
            return sample
        self._again()
        return self.take()

    def _again(self) -> None:
        if self._taken == 0:
            raise ValueError(f"shard {self._shard} of the data set has no samples in epoch {self._epoch}")
        self._epoch, self._taken = self._epoch + 1, 0
        self._samples = iter(self._stream.open(self._shard, self._epoch))
