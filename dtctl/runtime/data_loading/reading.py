"""Reading of batches at positions in the stream of samples: the same bits with any number of processes.

Code of the user's that draws random numbers (augmentation, mixup, a shuffle buffer) draws them from generators seeded
by (seed, position): Python's, NumPy's and torch's, and those that the data set keeps itself. So what it makes depends
on neither the process that reads it nor what was read before, and differs from epoch to epoch.
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
from torch.utils.data import default_collate

from dtctl.runtime.data_loading.datasets import Batches, Samples, SampleStream, is_deterministic
from dtctl.runtime.data_loading.order import Indices, mix
from dtctl.runtime.members import walk_members
from dtctl.runtime.snapshot.format.encoding import Generator, generator_state, is_generator, seed_generator

PROBES: Final = 8
"""Samples that are looked at before training: the first, the last, and some in between."""
PROBE_S: Final = 0.1
"""Seconds that it may take; one sample is read in any case."""


@dataclass(slots=True)
class DatasetExamination:
    """Digests of some samples of a data set, and the reasons why they may differ next time."""

    digests: dict[str, str] = field(default_factory=dict)
    """Index (of a stream: position) -> digest of the sample."""
    irreproducible: str | None = None
    """Reason why a sample depends on more than its position; None if there is no sign of it."""
    unseen: str | None = None
    """Part that was not looked at."""


class Reader:
    """Makes batches of a data set of any kind; may be sent to another process."""

    def __init__(self, data: Samples | Batches | SampleStream, seed: int) -> None:
        self.data, self._seed = data, seed
        self._cursors: dict[int, Cursor] = {}
        self._own_generators: list[Generator] | None = None
        self._examining, self._drawn = False, 0
        self.at_once: Callable[[Indices], Any] | None = None
        """Function that returns a whole batch of a data set that draws no random numbers."""
        self._read: Callable[[Indices, Indices], Any] = self._one_by_one
        if isinstance(data, SampleStream):
            self._read = self._from_stream
        elif isinstance(data, Batches):
            self._read = self._whole
            if is_deterministic(data):
                self.at_once = data.batch

    def __call__(self, indices: Indices, positions: Indices) -> Any:
        """Return the batch of the samples at `indices`, which stand at `positions` in the stream; on the CPU.

        The loop's stream of torch's random numbers continues as if nothing had been drawn; those of Python and NumPy
        continue from the position (`settle`).
        """
        if self.at_once is not None:
            return self.at_once(indices)
        rng_state = torch.get_rng_state()
        try:
            return self._read(indices, positions)
        finally:
            if self._examining:
                self._drawn = self._state()
            torch.set_rng_state(rng_state)
            self.settle(positions)

    def in_thread(self, indices: Indices, positions: Indices) -> Any:
        """Read as `__call__` does, but leave the generators alone that the loop draws from meanwhile."""
        if self.at_once is not None:
            return self.at_once(indices)
        self._seed_own(self._seed_of(positions))
        return cast(Batches, self.data).batch(indices)

    def settle(self, positions: Indices) -> None:
        """Seed Python's and NumPy's generators for what the loop draws with the batch that stands there.

        To keep their states and put them back would take ten times as long.
        """
        if self.at_once is None:
            seed = self._seed_of(positions, salt=1)
            random.seed(seed)
            np.random.seed(seed % 2**32)

    def _whole(self, indices: Indices, positions: Indices) -> Any:
        self._seed_all(self._seed_of(positions))
        return cast(Batches, self.data).batch(indices)

    def _one_by_one(self, indices: Indices, positions: Indices) -> Any:
        samples = []
        for index, seed in zip(indices.tolist(), self._seeds(positions), strict=True):
            self._seed_all(seed)
            samples.append(self.data[index])  # type: ignore[index]
        return default_collate(samples)

    def _from_stream(self, _indices: Indices, positions: Indices) -> Any:
        stream = cast(SampleStream, self.data)
        samples = []
        for position in positions.tolist():
            place, shard = divmod(position, stream.shards)
            cursor = self._cursors.get(shard)
            if cursor is None or cursor.place > place:
                cursor = self._cursors[shard] = Cursor(stream, shard, functools.partial(self._seed_place, shard))
            cursor.go_to(place)
            samples.append(cursor.take())
        return default_collate(samples)

    # -- seeds ------------------------------------------------------------------------------------------------------

    def _seeds(self, positions: Indices) -> list[int]:
        seeds: list[int] = mix(mix(positions.astype(np.uint64)) + np.uint64(self._seed % 2**64)).tolist()
        return seeds

    def _seed_of(self, positions: Indices, *, salt: int = 0) -> int:
        """Return one seed for a whole batch; pure Python, since NumPy takes ten times as long for a single number."""
        return _mixed(_mixed(int(positions[0]) if len(positions) else 0) + self._seed + (salt << 32))

    def _seed_place(self, shard: int, place: int) -> None:
        """Seed the generators before a sample of a stream, or (-1 - epoch) before a shard is opened."""
        self._seed_all(_mixed(_mixed((place << 20) + shard) + self._seed))

    def _seed_all(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed % 2**63)
        self._seed_own(seed)

    def generators(self) -> list[Generator]:
        """Return those that the data set keeps in this process: they are others where it was copied to."""
        if self._own_generators is None:
            self._own_generators = list(_generators(self.data))
        return self._own_generators

    def _seed_own(self, seed: int) -> None:
        for number, generator in enumerate(self.generators(), start=1):
            seed_generator(generator, _mixed(seed + number) % 2**63)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out everything that belongs to this process."""
        return {"data": self.data, "seed": self._seed}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["data"], state["seed"])  # type: ignore[misc]

    # -- before training --------------------------------------------------------------------------------------------

    def examine(self, positions: Indices, *, threaded: bool) -> DatasetExamination:
        """Read a few samples twice; the generators of the loop are as before afterwards, but for Python's and NumPy's.

        Args:
            positions: of a stream, those that are read.
            threaded: whether a thread will read, which draws from the loop's generators in no fixed order.
        """
        examination = DatasetExamination()
        self._examining = True
        rng_state = torch.get_rng_state()
        # A data set may count how often it is read.
        held = getattr(self.data, "__dict__", {})
        numbers = {name: value for name, value in held.items() if isinstance(value, int | float)}
        begun_s = time.perf_counter()
        try:
            for name, indices, places in self._probes(positions):
                first, drawn = self._probe(indices, places, other=False), self._drawn
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
                again = self._probe(indices, places, other=threaded)
                if again == first and not threaded and drawn != self._drawn:
                    examination.irreproducible = (
                        f"the data set draws random numbers for sample {name} when it is first asked, and keeps them"
                    )
                    break
                if again != first:
                    del examination.digests[name]
                    examination.irreproducible = (
                        "`batch` draws random numbers in a thread, which shares their generators with the loop "
                        "(use processes: train.data_workers: 1)"
                        if threaded and self._probe(indices, places, other=False) == first
                        else f"the data set gives another sample {name} each time it is asked"
                    )
                    break
        finally:
            self._examining = False
            torch.set_rng_state(rng_state)
            held.update(numbers)
        return examination

    def _state(self) -> int:
        """Return the states of all generators, after something was read."""
        crc = zlib.crc32(torch.get_rng_state().numpy().data)
        crc = zlib.crc32(repr((random.getstate(), np.random.get_state(legacy=False))).encode(), crc)
        return zlib.crc32(repr([_digest_of(generator) for generator in self.generators()]).encode(), crc)

    def _probes(self, positions: Indices) -> Iterator[tuple[str, Indices, Indices]]:
        if isinstance(self.data, SampleStream):
            yield str(int(positions[0])), positions[:1], positions[:1]
            return
        count = len(self.data)
        random_places = mix(np.arange(PROBES - 2, dtype=np.uint64)) % np.uint64(count)
        for index in dict.fromkeys([0, count - 1, *random_places.tolist()]):
            pair = np.array([index, (index + 1) % count][: min(2, count)], dtype=np.int64)
            yield str(index), pair, pair

    def _probe(self, indices: Indices, positions: Indices, *, other: bool) -> str:
        """Return the digest of a batch, with the generators of the process seeded otherwise or not."""
        reader = self
        if isinstance(self.data, SampleStream):
            reader = Reader(self.data, self._seed)
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
        return f"{_digest(batch, 0):08x}"


def _digest_of(generator: Generator) -> str:
    state = generator_state(generator)
    return str(_digest(state["torch"], 0)) if "torch" in state else repr(state)


def _mixed(value: int) -> int:
    """Return the finalizer of SplitMix64, as `order.mix` has it, of one number."""
    value &= 2**64 - 1
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
    return value ^ (value >> 31)


def _digest(value: Any, crc: int) -> int:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().reshape(-1)
        crc = zlib.crc32(repr((value.dtype, len(value))).encode(), crc)
        return zlib.crc32(value.view(torch.uint8).numpy().data, crc) if len(value) else crc
    if isinstance(value, Mapping):
        for key, item in value.items():
            crc = _digest(item, zlib.crc32(repr(key).encode(), crc))
        return crc
    if isinstance(value, list | tuple):
        for item in value:
            crc = _digest(item, crc)
        return zlib.crc32(str(len(value)).encode(), crc)
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
    plain = isinstance(value, bool | int | float | complex | str | bytes | type(None) | np.generic)
    return zlib.crc32((repr(value) if plain else type(value).__qualname__).encode(), crc)


def _generators(data: object) -> Iterator[Generator]:
    """Yield the generators of random numbers that a data set keeps, in an order that is the same in every process."""
    for _, value in walk_members(data):
        if is_generator(value):
            yield cast(Generator, value)


class Cursor:
    """A place in one shard of a stream, which is read again and again.

    Attributes:
        place: how many samples of the shard have been taken or passed, over all epochs.
    """

    def __init__(self, stream: SampleStream, shard: int, seed: Callable[[int], None] = lambda _: None) -> None:
        """Open a shard.

        Args:
            stream: the stream that the shard belongs to.
            shard: its number.
            seed: called with each place before the sample there is read or skipped, since both may draw random
                numbers; and with -1 - epoch before the shard is opened.
        """
        self.place = 0
        self._stream, self._shard, self._epoch, self._taken = stream, shard, 0, 0
        self._seed = seed
        self._samples = self._open()

    def _open(self) -> Iterator[Any]:
        self._seed(-1 - self._epoch)
        return iter(self._stream.open(self._shard, self._epoch))

    def go_to(self, place: int) -> None:
        """Pass what stands before a place."""
        while self.place < place:
            distance = place - self.place
            skip = getattr(self._samples, "skip", None)
            passed = skip(distance) if skip else self._pass(distance)
            self.place += passed if skip else 0
            self._taken += passed
            if passed < distance:
                self._again()

    def _pass(self, count: int) -> int:
        for number in range(count):
            self._seed(self.place)
            if next(self._samples, _END) is _END:
                return number
            self.place += 1
        return count

    def take(self) -> Any:
        """Return the sample at this place."""
        while True:
            self._seed(self.place)
            sample = next(self._samples, _END)
            if sample is not _END:
                self.place += 1
                self._taken += 1
                return sample
            self._again()

    def _again(self) -> None:
        if self._taken == 0:
            raise ValueError(f"shard {self._shard} of the data set has no samples in epoch {self._epoch}")
        self._epoch, self._taken = self._epoch + 1, 0
        self._samples = self._open()


_END: Final = object()
