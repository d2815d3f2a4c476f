"""Order of samples as a pure function of (seed, epoch, index), so that a resume needs only a counter.

Training reads one endless stream of positions 0, 1, 2, ...; position p is index p % N of epoch p // N. A step of global
batch B takes the next B positions with any number of workers. Steps continue over the end of an epoch, so no sample is
lost, repeated or padded there. Only the last step of a run that counts epochs may be smaller.

Every epoch has its own permutation, which is computed index by index (a Feistel network over a grid that just covers N,
applied once more while the result is outside of N). Compared with `torch.randperm` for each epoch, no worker needs an
array of N numbers, no epoch starts with a pause, and the order is the same in every version of torch.

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, sections 4 and 5; the mixing function is
the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dtctl.train.batch import BatchSizes

Indices = NDArray[np.int64]

ROUNDS: Final = 8
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def hash_uint64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value; for arrays only, since NumPy warns of the intended overflow for scalars."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class SampleOrder:
    """The order of `samples` samples under one seed."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self._seed = hash_uint64_array(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
        self._rows = np.uint64(math.isqrt(samples - 1) + 1 if samples > 1 else 1)
        self._columns = np.uint64(-(-samples // int(self._rows)))

    def __call__(self, positions: Indices) -> Indices:
        """Return the index of the sample at each position of the endless stream."""
        epochs, indices = np.divmod(positions.ravel().astype(np.uint64), np.uint64(self.samples))
        keys = hash_uint64_array(self._seed + (epochs + np.uint64(1)) * _GOLDEN)
        found = self._permute_cells(indices, keys)
        # The grid has less than one row more than N cells, so few indices are outside and need another round.
        outside = np.flatnonzero(found >= self.samples)
        while outside.size:
            found[outside] = self._permute_cells(found[outside], keys[outside])
            outside = outside[found[outside] >= self.samples]
        return found.astype(np.int64).reshape(positions.shape)

    def _permute_cells(self, cells: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row, column = np.divmod(cells, self._columns)
        for number in range(ROUNDS):
            keys = keys + _GOLDEN
            if number % 2:
                column = (column + hash_uint64_array(row ^ keys) % self._columns) % self._columns
            else:
                row = (row + hash_uint64_array(column ^ keys) % self._rows) % self._rows
        return row * self._columns + column


class SequentialOrder:
    """Order of samples that can only be read in sequence: the index of a sample is its position."""

    def __call__(self, positions: Indices) -> Indices:
        """Return the positions unchanged."""
        return positions


class WorkerSampler:
    """Indices that one worker takes in each step."""

    WINDOW: Final = 4096
    """Number of indices that are computed together: NumPy takes the same time for one as for hundreds."""

    def __init__(self, order: SampleOrder | SequentialOrder, batch: BatchSizes, *, rank: int, end: int) -> None:
        """Divide the stream of samples into this worker's micro batches.

        Args:
            order: order of the samples.
            batch: sizes of a batch.
            rank: number of this worker.
            end: position at which the run ends; the last step takes the remaining samples before it.
        """
        self.stand_in: Indices = order(np.zeros(2, dtype=np.int64))
        """Samples for an empty micro batch of this worker: one sample twice, since BatchNorm refuses a single one."""
        self._order = order
        self._accumulate = batch.accumulate
        self._total = batch.total
        self.samples_per_pass: Final = batch.micro * batch.parts
        """Number of samples of all workers in one forward pass."""
        self._end = end
        shares = batch.shares or (1,) * batch.world_size
        first = np.arange(batch.accumulate)[:, None] * batch.parts + sum(shares[:rank])
        own = np.arange(batch.micro * shares[rank])
        # Shape: [accumulate, micro batch size times the share].
        self._offsets = (first * batch.micro + own).astype(np.int64)
        self._ahead = max(1, self.WINDOW // self._offsets.size)
        self._first = self._last = 0  # the positions in the window
        self._window = np.empty((0, *self._offsets.shape), dtype=np.int64)

    def samples(self, start: int) -> int:
        """Return the number of samples over all workers in the step at position `start`."""
        return min(self._total, self._end - start)

    def __call__(self, start: int) -> list[Indices]:
        """Return the indices of this worker's micro batches in the step that begins at position `start`.

        In the last step a micro batch may be short or empty.
        """
        total = self._total
        place, rest = divmod(start - self._first, total)
        if rest or not self._first <= start < self._last:
            steps = np.arange(self._ahead, dtype=np.int64)[:, None, None] * total
            self._first, self._last, place = start, start + self._ahead * total, 0
            self._window = self._order(start + steps + self._offsets)
        rows = self._window[place]
        if start + total <= self._end:
            return list(rows)
        inside = start + self._offsets < self._end
        return [row[keep] for row, keep in zip(rows, inside, strict=True)]

    def positions(self, start: int) -> list[Indices]:
        """Return the positions in the stream of the samples whose indices `schedule(start)` returns."""
        found = start + self._offsets
        return [row if row[-1] < self._end else row[row < self._end] for row in found]

    def keys(self, start: int, index: int) -> Iterator[tuple[int, int]]:
        """Yield start and number of each micro batch with samples, from number `index` of the step at `start` on."""
        for place in range(start, self._end, self._total):
            for number in range(index if place == start else 0, self._accumulate):
                if place + int(self._offsets[number, 0]) < self._end:
                    yield place, number

    def requests(self, start: int, index: int) -> Iterator[tuple[Indices, Indices]]:
        """Yield the indices and positions of the micro batches that `keys` yields."""
        ahead = copy.copy(self)  # it is far ahead of the loop, so it needs its own window
        for place, number in self.keys(start, index):
            yield ahead(place)[number], ahead.positions(place)[number]
