"""Seeds by (seed, position) of the random generators from which code of a data set draws.

These are the generators of Python, NumPy and torch, and those of the data set itself. So the samples do not depend on
the process that reads them or on samples read before, and differ from epoch to epoch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch

from dtctl.runtime.data_loading.order import Indices, hash_uint64_array
from dtctl.runtime.members import walk_members
from dtctl.runtime.snapshot.format.encoding import Generator, is_generator, seed_generator


class GeneratorSeeder:
    """Seeder of the generators in this process and of those in a data set."""

    def __init__(self, data: object, seed: int) -> None:
        self._data, self._seed = data, seed
        self._dataset_generators: list[Generator] | None = None

    def compute_sample_seeds(self, positions: Indices) -> list[int]:
        """Return a seed for each sample of a batch."""
        seeds: list[int] = hash_uint64_array(
            hash_uint64_array(positions.astype(np.uint64)) + np.uint64(self._seed % 2**64)
        ).tolist()
        return seeds

    def compute_batch_seed(self, positions: Indices, *, salt: int = 0) -> int:
        """Return one seed for a whole batch.

        This is pure Python, since NumPy takes ten times as long for a single number.
        """
        return _hash_integer(_hash_integer(int(positions[0]) if len(positions) else 0) + self._seed + (salt << 32))

    def seed_place(self, shard: int, place: int) -> None:
        """Seed the generators before a sample of a stream, or (-1 - epoch) before a shard is opened."""
        self.seed_all(_hash_integer(_hash_integer((place << 20) + shard) + self._seed))

    def seed_all(self, seed: int) -> None:
        """Seed the generators of this process and those of the data set."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed % 2**63)
        self.seed_dataset(seed)

    def seed_dataset(self, seed: int) -> None:
        """Seed the generators of the data set."""
        for number, generator in enumerate(self.list_dataset_generators(), start=1):
            seed_generator(generator, _hash_integer(seed + number) % 2**63)

    def list_dataset_generators(self) -> list[Generator]:
        """Return the data set's generators in this process, as a copy of the data set has its own."""
        if self._dataset_generators is None:
            # The order must be the same in every process.
            self._dataset_generators = list(_find_generators(self._data))
        return self._dataset_generators


def _find_generators(data: object) -> Iterator[Generator]:
    for _, value in walk_members(data):
        if is_generator(value):
            yield cast(Generator, value)


def _hash_integer(value: int) -> int:
    """Return SplitMix64's finalizer of one number, as `order.hash_uint64_array` computes it for arrays."""
    value &= 2**64 - 1
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
    return value ^ (value >> 31)
