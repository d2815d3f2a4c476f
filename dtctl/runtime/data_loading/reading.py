"""Reading of batches at positions in the stream of samples, with the same bits for any number of processes.

The user's code (augmentation, mixup, a shuffle buffer) draws random numbers from generators that are seeded by position
(seeding.py).
"""

from __future__ import annotations

import functools
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import torch

from dtctl.runtime.data_loading.datasets import (
    BatchDataset,
    CollatedDataset,
    MapDataset,
    SampleStream,
    choose_collate,
    is_deterministic,
)
from dtctl.runtime.data_loading.order import Indices, hash_uint64_array
from dtctl.runtime.data_loading.seeding import GeneratorSeeder
from dtctl.runtime.snapshot.format.encoding import Generator, encode_generator_state

PROBES: Final = 8
"""Number of samples that are examined before training: the first, the last, and some in between."""
PROBE_S: Final = 0.1
"""Seconds that the examination may take; one sample is read in any case."""


@dataclass(slots=True)
class DatasetExamination:
    """Digests of some samples of a data set, and the reasons why they may not be reproducible."""

    digests: dict[str, str] = field(default_factory=dict)
    """Index of the sample, or its position in a stream -> digest of the sample."""
    irreproducible: str | None = None
    """Reason why a sample depends on more than its position; None if there is no sign of it."""
    unseen: str | None = None
    """Part that was not examined, in words."""


class BatchReader:
    """Reader of the batches of any data set; it can be sent to another process."""

    def __init__(self, data: MapDataset | BatchDataset | SampleStream, seed: int) -> None:
        self.data, self._seed = data, seed
        self.seeder = GeneratorSeeder(data, seed)
        self._cursors: dict[int, ShardCursor] = {}
        self._examining, self._drawn = False, 0
        self._collate = choose_collate(data)
        self.at_once: Callable[[Indices], Any] | None = None
        """Function that returns a whole batch of a data set that draws no random numbers."""
        self._read: Callable[[Indices, Indices], Any] = self._one_by_one
        if isinstance(data, SampleStream):
            self._read = self._from_stream
        elif isinstance(data, BatchDataset):
            self._read = self._read_whole_batch
            if is_deterministic(data):
                self.at_once = data.batch

    def __call__(self, indices: Indices, positions: Indices) -> Any:
        """Return the batch of the samples at `indices`, whose positions in the stream are `positions`; on the CPU.

        torch's random numbers in the loop continue as if nothing had been drawn; those of Python and NumPy continue
        from the position (`seed_generators`).
        """
        if self.at_once is not None:
            return self.at_once(indices)
        rng_state = torch.get_rng_state()
        try:
            return self._read(indices, positions)
        finally:
            if self._examining:
                self._drawn = self._compute_generators_checksum()
            torch.set_rng_state(rng_state)
            self.seed_generators(positions)

    def in_thread(self, indices: Indices, positions: Indices) -> Any:
        """Read as `__call__` does, but without changes of the generators that the loop uses meanwhile."""
        if self.at_once is not None:
            return self.at_once(indices)
        self.seeder.seed_dataset(self.seeder.compute_batch_seed(positions))
        return cast(BatchDataset, self.data).batch(indices)

    def seed_generators(self, positions: Indices) -> None:
        """Seed Python's and NumPy's generators for the code in the loop that uses the batch at these positions.

        Saving and restoring their states would take ten times as long.
        """
        if self.at_once is None:
            seed = self.seeder.compute_batch_seed(positions, salt=1)
            random.seed(seed)
            np.random.seed(seed % 2**32)

    def _read_whole_batch(self, indices: Indices, positions: Indices) -> Any:
        self.seeder.seed_all(self.seeder.compute_batch_seed(positions))
        return cast(BatchDataset, self.data).batch(indices)

    def _one_by_one(self, indices: Indices, positions: Indices) -> Any:
        samples = []
        for index, seed in zip(indices.tolist(), self.seeder.compute_sample_seeds(positions), strict=True):
            self.seeder.seed_all(seed)
            samples.append(self.data[index])  # type: ignore[index]
        return self._collate(samples)

    def _from_stream(self, _indices: Indices, positions: Indices) -> Any:
        stream = cast(SampleStream, self.data)
        samples = []
        for position in positions.tolist():
            place, shard = divmod(position, stream.shards)
            cursor = self._cursors.get(shard)
            if cursor is None or cursor.place > place:
                cursor = self._cursors[shard] = ShardCursor(
                    stream, shard, functools.partial(self.seeder.seed_place, shard)
                )
            cursor.skip_to_place(place)
            samples.append(cursor.read_sample())
        return self._collate(samples)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the objects that belong to this process."""
        return {"data": self.data, "seed": self._seed}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["data"], state["seed"])  # type: ignore[misc]

    # -- before training --------------------------------------------------------------------------------------------

    def examine_dataset(self, positions: Indices, *, threaded: bool) -> DatasetExamination:
        """Read a few samples twice. Only Python's and NumPy's generators are different afterwards.

        Args:
            positions: positions to read in a stream.
            threaded: True if a thread will read, which draws from the loop's generators in no fixed order.
        """
        subject = self.data.data if isinstance(self.data, CollatedDataset) else self.data
        examination = DatasetExamination(
            irreproducible=self.data.irreproducible if isinstance(self.data, CollatedDataset) else None
        )
        self._examining = True
        rng_state = torch.get_rng_state()
        # A data set may count its reads, so its counters are restored afterwards.
        held = getattr(subject, "__dict__", {})
        numbers = {name: value for name, value in held.items() if isinstance(value, int | float)}
        begun_s = time.perf_counter()
        try:
            for name, indices, places in self._choose_probe_samples(positions):
                first, drawn = self.compute_probe_digest(indices, places, other=False), self._drawn
                spent_s = time.perf_counter() - begun_s
                examination.digests[name] = first
                if self.at_once is not None:
                    continue
                if spent_s > PROBE_S:
                    if len(examination.digests) == 1:
                        examination.unseen = (
                            f"whether the data set returns the same sample twice: reading one takes {spent_s:.1f} s"
                        )
                    break
                again = self.compute_probe_digest(indices, places, other=threaded)
                if again == first and not threaded and drawn != self._drawn:
                    examination.irreproducible = (
                        f"the data set draws random numbers for sample {name} at the first read, and keeps them"
                    )
                    break
                if again != first:
                    del examination.digests[name]
                    examination.irreproducible = (
                        "`batch` draws random numbers in a thread, which shares their generators with the loop "
                        "(use processes: train.data_workers: 1)"
                        if threaded and self.compute_probe_digest(indices, places, other=False) == first
                        else f"the data set gives another sample {name} at each call"
                    )
                    break
        finally:
            self._examining = False
            torch.set_rng_state(rng_state)
            held.update(numbers)
        return examination

    def _compute_generators_checksum(self) -> int:
        """Return a checksum of the states of all generators."""
        crc = zlib.crc32(torch.get_rng_state().numpy().data)
        crc = zlib.crc32(repr((random.getstate(), np.random.get_state(legacy=False))).encode(), crc)
        digests = [_compute_generator_digest(generator) for generator in self.seeder.list_dataset_generators()]
        return zlib.crc32(repr(digests).encode(), crc)

    def _choose_probe_samples(self, positions: Indices) -> Iterator[tuple[str, Indices, Indices]]:
        if isinstance(self.data, SampleStream):
            yield str(int(positions[0])), positions[:1], positions[:1]
            return
        count = len(self.data)
        random_places = hash_uint64_array(np.arange(PROBES - 2, dtype=np.uint64)) % np.uint64(count)
        for index in dict.fromkeys([0, count - 1, *random_places.tolist()]):
            pair = np.array([index, (index + 1) % count][: min(2, count)], dtype=np.int64)
            yield str(index), pair, pair

    def compute_probe_digest(self, indices: Indices, positions: Indices, *, other: bool = False) -> str:
        """Return the digest of a batch; if `other` is true, the generators of the process have another seed."""
        reader = self
        if isinstance(self.data, SampleStream):
            reader = BatchReader(self.data, self._seed)
        try:
            if other:
                torch.default_generator.manual_seed(1)
                random.seed(1)
                np.random.seed(1)
                batch = reader.in_thread(indices, positions)
            else:
                batch = reader(indices, positions)
        except Exception as exc:  # noqa: BLE001  # a sample that training may never reach
            return f"{type(exc).__name__}"
        return f"{_compute_value_checksum(batch, 0):08x}"


def _compute_generator_digest(generator: Generator) -> str:
    state = encode_generator_state(generator)
    return str(_compute_value_checksum(state["torch"], 0)) if "torch" in state else repr(state)


def _compute_value_checksum(value: Any, crc: int) -> int:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().reshape(-1)
        crc = zlib.crc32(repr((value.dtype, len(value))).encode(), crc)
        return zlib.crc32(value.view(torch.uint8).numpy().data, crc) if len(value) else crc
    if isinstance(value, Mapping):
        for key, item in value.items():
            crc = _compute_value_checksum(item, zlib.crc32(repr(key).encode(), crc))
        return crc
    if isinstance(value, list | tuple):
        for item in value:
            crc = _compute_value_checksum(item, crc)
        return zlib.crc32(str(len(value)).encode(), crc)
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
    plain = isinstance(value, bool | int | float | complex | str | bytes | type(None) | np.generic)
    return zlib.crc32((repr(value) if plain else type(value).__qualname__).encode(), crc)


class ShardCursor:
    """Position in one shard of a stream, which is read repeatedly.

    Attributes:
        place: number of samples of the shard that were read or skipped, over all epochs.
    """

    def __init__(self, stream: SampleStream, shard: int, seed: Callable[[int], None] = lambda _: None) -> None:
        """Open a shard.

        Args:
            stream: the stream that the shard belongs to.
            shard: number of the shard.
            seed: called with each place before its sample is read or skipped, since both may draw random numbers; and
                with -1 - epoch before the shard is opened.
        """
        self.place = 0
        self._stream, self._shard, self._epoch, self._taken = stream, shard, 0, 0
        self._seed = seed
        self._samples = self._open_shard()

    def _open_shard(self) -> Iterator[Any]:
        self._seed(-1 - self._epoch)
        return iter(self._stream.open(self._shard, self._epoch))

    def skip_to_place(self, place: int) -> None:
        """Skip the samples before a place."""
        while self.place < place:
            distance = place - self.place
            skip = getattr(self._samples, "skip", None)
            passed = skip(distance) if skip else self._skip_samples(distance)
            self.place += passed if skip else 0
            self._taken += passed
            if passed < distance:
                self._start_next_epoch()

    def _skip_samples(self, count: int) -> int:
        for number in range(count):
            self._seed(self.place)
            if next(self._samples, _END) is _END:
                return number
            self.place += 1
        return count

    def read_sample(self) -> Any:
        """Return the sample at the present place."""
        while True:
            self._seed(self.place)
            sample = next(self._samples, _END)
            if sample is not _END:
                self.place += 1
                self._taken += 1
                return sample
            self._start_next_epoch()

    def _start_next_epoch(self) -> None:
        if self._taken == 0:
            raise ValueError(f"shard {self._shard} of the data set has no samples in epoch {self._epoch}")
        self._epoch, self._taken = self._epoch + 1, 0
        self._samples = self._open_shard()


_END: Final = object()
