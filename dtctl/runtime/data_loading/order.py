"""Order of samples: a pure function of (seed, epoch, index), so that resuming needs nothing but a counter.

Training reads one endless stream of positions 0, 1, 2, ...; position p is index p % N of epoch p // N. A step of global
batch B takes the next B positions whatever the number of workers is, and steps run across the end of an epoch, so no
sample is lost, doubled or padded there. Only the very last step of a training by epochs may be smaller.

Every epoch has a permutation of its own, computed index by index (a Feistel network over a grid that just covers N,
walked again while it leaves N). Against `torch.randperm` per epoch: no array of N numbers in every worker, no pause
at the start of an epoch, and the same order under every version of torch.

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

from dtctl.train.batch import Batch

Indices = NDArray[np.int64]

ROUNDS: Final = 8
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value; arrays only, since NumPy warns of the wanted overflow on single numbers."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Order:
    """The order of `samples` samples under one seed."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self._seed = mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
        self._rows = np.uint64(math.isqrt(samples - 1) + 1 if samples > 1 else 1)
        self._columns = np.uint64(-(-samples // int(self._rows)))

    def __call__(self, positions: Indices) -> Indices:
        """Return the index of the sample at each position of the endless stream."""
        epochs, indices = np.divmod(positions.ravel().astype(np.uint64), np.uint64(self.samples))
        keys = mix(self._seed + (epochs + np.uint64(1)) * _GOLDEN)
        found = self._permute(indices, keys)
        # The grid has fewer than one row more than N cells, so few indices land outside and walk on.
        outside = np.flatnonzero(found >= self.samples)
        while outside.size:
            found[outside] = self._permute(found[outside], keys[outside])
            outside = outside[found[outside] >= self.samples]
        return found.astype(np.int64).reshape(positions.shape)

    def _permute(self, cells: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row, column = np.divmod(cells, self._columns)
        for number in range(ROUNDS):
            keys = keys + _GOLDEN
            if number % 2:
                column = (column + mix(row ^ keys) % self._columns) % self._columns
            else:
                row = (row + mix(column ^ keys) % self._rows) % self._rows
        return row * self._columns + column


class InSequence:
    """The order of samples that can only be read one after the other: the index of a sample is its position."""

    def __call__(self, positions: Indices) -> Indices:
        """Return the positions."""
        return positions


class Schedule:
    """The indices that one worker takes at each step."""

    WINDOW: Final = 4096
    """Indices computed at a time: NumPy costs as much for one as for hundreds."""

    def __init__(self, order: Order | InSequence, batch: Batch, *, rank: int, end: int) -> None:
        """Cut the stream of samples into this worker's micro batches.

        Args:
            order: of the samples.
            batch: sizes of a batch.
            rank: of this worker.
            end: position at which the training ends; the last step takes what is left before it.
        """
        self.stand_in: Indices = order(np.zeros(2, dtype=np.int64))
        """Samples for a worker with an empty last micro batch: one twice, since BatchNorm refuses a single one."""
        self._order = order
        self._accumulate = batch.accumulate
        self._total = batch.total
        self.samples_per_pass: Final = batch.micro * batch.parts
        """Over all workers."""
        self._end = end
        shares = batch.shares or (1,) * batch.world_size
        first = np.arange(batch.accumulate)[:, None] * batch.parts + sum(shares[:rank])
        own = np.arange(batch.micro * shares[rank])
        self._offsets = (first * batch.micro + own).astype(np.int64)  # [accumulate, micro times the share]
        self._ahead = max(1, self.WINDOW // self._offsets.size)
        self._first = self._last = 0  # positions that the window covers
        self._window = np.empty((0, *self._offsets.shape), dtype=np.int64)

    def samples(self, start: int) -> int:
        """Return how many samples the step at position `start` takes over all workers."""
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
        """Return the positions in the stream of samples of what `schedule(start)` has the indices of."""
        found = start + self._offsets
        return [row if row[-1] < self._end else row[row < self._end] for row in found]

    def keys(self, start: int, index: int) -> Iterator[tuple[int, int]]:
        """Yield the places of the micro batches that are not empty, from `index` of the step at `start` on."""
        for place in range(start, self._end, self._total):
            for number in range(index if place == start else 0, self._accumulate):
                if place + int(self._offsets[number, 0]) < self._end:
                    yield place, number

    def requests(self, start: int, index: int) -> Iterator[tuple[Indices, Indices]]:
        """Yield the indices and positions of the micro batches that `keys` yields."""
        ahead = copy.copy(self)  # it is far ahead of the loop, and needs a window of its own
        for place, number in self.keys(start, index):
            yield ahead(place)[number], ahead.positions(place)[number]
