"""Position of a program in its data (epoch and batch), and the return to this position in a resume.

At the beginning of a pass over the loader, the states of all random generators are stored. A resume restores them,
opens the loader, skips the batches that were taken, and then restores the states of the snapshot. The sampler skips
batches without reading them where this gives the same bits: in a loader without processes. The processes of a loader
draw their own random numbers, so there the batches are read once more.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from dtctl.errors import PlanError, SnapshotError
from dtctl.runtime import randomness
from dtctl.runtime.console import say
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness.stateful import is_stateful, put_state, take_state
from dtctl.runtime.members import walk_members
from dtctl.runtime.own_loop.several_models import WHERE
from dtctl.runtime.snapshot.format.encoding import encode_value, is_generator
from dtctl.runtime.snapshot.json_collectives import gather_json

Skip = Literal["auto", "sampler", "read"]
_SAMPLERS: Final = ("sampler", "batch_sampler")


class DataPosition:
    """Position in a loader.

    Attributes:
        epoch: number of the epoch under way, from 0.
        batch: number of its batches that were taken.
        length: batches of an epoch; None if the loader does not define it.
        begun: states of this worker's random generators when the pass began; None between two passes.
    """

    def __init__(self, loader: Any, worker: Worker, *, skip: Skip) -> None:
        """Start before the first batch.

        Args:
            loader: any iterable of batches; None if the program reads its data itself.
            worker: this worker.
            skip: method to skip batches in a resume: `sampler` never reads them, `read` always does, `auto` reads them
                where random numbers may depend on it.
        """
        self._loader, self._worker, self._skip = loader, worker, skip
        self.epoch = self.batch = 0
        self.length = _measure_length(loader)
        self.begun: randomness.State | None = None
        self.has_own_state = is_stateful(loader)
        self._is_passed = False
        """True once a pass of this epoch has begun in this process."""
        self._left_out, self._is_resumed = 0, False
        self._stays_open = isinstance(loader, DataLoader) and loader.persistent_workers
        # Processes of a loader have data sets of their own, whose states begin anew in each pass.
        is_read_here = not self.has_own_state and not getattr(loader, "num_workers", 0)
        self.generators = LoaderState(loader, reads_again=is_read_here and not self._can_leave_out_by_sampler())
        self._before: randomness.State | None = None

    def document(self) -> dict[str, Any]:
        """Return the position for a snapshot; JSON."""
        size = getattr(self._loader, "batch_size", None)
        return {
            "epoch": self.epoch, "batch": self.batch, "batches": self.length, "workers": self._worker.world_size,
            "batch_size": size if isinstance(size, int) else None,
        }  # fmt: skip

    def seek(self, then: Mapping[str, Any], before: randomness.State | None) -> None:
        """Go to the position of a snapshot, where the next pass begins.

        Args:
            then: position in the form of `document`.
            before: states of the random generators when that pass began.

        Raises:
            SnapshotError: the position does not exist with this loader or this number of workers.
        """
        self.epoch, self.batch = then["epoch"], self._translate_batch(then)
        self._left_out, self._before, self._is_resumed = self.batch, before, True

    def _translate_batch(self, then: Mapping[str, Any]) -> int:
        """Return the number of batches that each worker has taken, converted to the present number of workers."""
        batch: int = then["batch"]
        workers, now = then["workers"], self._worker.world_size
        if self.length is not None and batch and batch == then["batches"]:
            return self.length  # the whole epoch
        if workers != now and batch:
            sampler = getattr(self._loader, "sampler", None)
            is_dealt = isinstance(sampler, DistributedSampler) and then["batch_size"] == self._loader.batch_size
            if not is_dealt or batch * workers % now:
                raise SnapshotError(
                    f"the snapshot was made in the middle of epoch {self.epoch}, when each of {workers} workers had "
                    f"taken {batch} batches; {now} workers cannot continue there",
                    where=WHERE,
                    hint=f"resume with {workers} workers, or with a number that divides {batch * workers} and a "
                    "DistributedSampler; between two epochs any number will do",
                )
            batch = batch * workers // now
        if self.length is not None and batch > self.length:
            raise SnapshotError(
                f"the snapshot was made after batch {batch} of an epoch, and the loader has {self.length} now",
                where=WHERE,
                hint="resume with the data and the batch size that the run began with, or start over with another "
                "folder of snapshots",
            )
        return batch

    @property
    def is_resumed_inside(self) -> bool:
        """Return whether the next pass begins in the middle of an epoch."""
        return self._left_out > 0

    def set_epoch(self) -> None:
        """Pass the number of the epoch to the samplers, as DistributedSampler requires."""
        inner = getattr(getattr(self._loader, "batch_sampler", None), "sampler", None)
        holders = [self._loader, inner, *(getattr(self._loader, name, None) for name in (*_SAMPLERS, "dataset"))]
        for holder in {id(each): each for each in holders}.values():
            if callable(set_epoch := getattr(holder, "set_epoch", None)):
                set_epoch(self.epoch)

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.epoch, self.batch, self.begun, self._is_passed = self.epoch + 1, 0, None, False
        self._left_out = 0

    def open_pass(self, restore: Callable[[], None], noted: Callable[[], None]) -> Iterator[Any]:
        """Return the remaining batches of this epoch; collective over all workers.

        Args:
            restore: restores the states of random generators in the snapshot, at its first call only.
            noted: called for each batch that is read once more.

        Raises:
            PlanError: the loader does not have the same length on all workers.
        """
        if self._is_passed:  # the program does not use `epochs`
            self.end_epoch()
            self.set_epoch()
        self._is_passed = True
        self._require_equal_lengths()
        if self._is_resumed and self._stays_open and self.epoch:
            self._open_once()
        self._is_resumed = False
        count, self._left_out = self._left_out, 0
        if not count:
            restore()
        elif self._before is not None:
            randomness.restore_rng_states(self._before, self._worker.device)
            self.generators.rewind()
        self.begun = randomness.capture_rng_states(self._worker.device)
        self.generators.note()
        if not count:
            return iter(self._loader)
        if self.has_own_state:  # the loader has restored its own position
            batches: Iterator[Any] = iter(self._loader)
            restore()
            return batches
        if self._can_leave_out_by_sampler():
            return _open_behind(self._loader, count, restore)
        return self._read_again(count, restore, noted)

    def _open_once(self) -> None:
        """Open a loader whose processes persist over epochs, as it was open when the epoch began."""
        iter(self._loader)  # from now on torch draws no seed for its processes when it opens the loader
        if self._worker.is_first:
            say(
                "persistent_workers: the loader's processes draw random numbers on from epoch to epoch, which a resume "
                "cannot repeat; if samples draw any, leave it out"
            )

    def _can_leave_out_by_sampler(self) -> bool:
        loader = self._loader
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            return False
        if self._skip == "read" or isinstance(loader.dataset, IterableDataset):
            return False
        return loader.num_workers == 0 or (self._skip == "sampler" and not self._stays_open)

    def _read_again(self, count: int, restore: Callable[[], None], noted: Callable[[], None]) -> Iterator[Any]:
        if self._worker.is_first and not isinstance(self._loader, list | tuple):
            why = "a loader with state_dict would save this"
            if isinstance(getattr(self._loader, "dataset", None), IterableDataset):
                why = "an IterableDataset has no other way"
            elif isinstance(self._loader, DataLoader):
                why = "`skip='sampler'` without persistent_workers saves this if samples draw no random numbers"
            say(f"epoch {self.epoch}: {count} batches are read again and left out; {why}")
        batches: Iterator[Any] = iter(self._loader)
        for number in range(count):
            noted()
            if next(batches, _NONE) is _NONE:
                raise SnapshotError(
                    f"the snapshot was made after batch {count} of epoch {self.epoch}, and the loader has {number} now",
                    where=WHERE,
                    hint="resume with the data and the batch size that the run began with",
                )
        restore()
        return batches

    def _require_equal_lengths(self) -> None:
        self.length = _measure_length(self._loader)
        lengths = gather_json(self.length, self._worker)
        if any(length != lengths[0] for length in lengths):
            ranks: dict[Any, list[str]] = {}
            for rank, length in enumerate(lengths):
                ranks.setdefault(length, []).append(str(rank))
            described = "; ".join(f"{length} on rank {', '.join(who)}" for length, who in ranks.items())
            raise PlanError(
                f"the loader has not the same number of batches on all workers: {described}",
                where=f"epoch {self.epoch}, dtctl.runtime.session",
                hint="the worker with most would wait for the others without end: use a DistributedSampler, which "
                "deals out equal shares, or drop the rest",
            )


_NONE: Final = object()


def _measure_length(loader: Any) -> int | None:
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a loader of an IterableDataset has no length
        return None


class LoaderState:
    """Random generators of a loader and its samplers, with their present states and those when the pass began.

    If batches are read again, the data set also has to return to its state when the pass began: a stream that tells its
    position would otherwise begin where it was at the snapshot.
    """

    def __init__(self, loader: Any, *, reads_again: bool) -> None:
        """Find the generators, and the objects with a state.

        Args:
            loader: any iterable of batches.
            reads_again: True if this process reads batches again in a resume.
        """
        samplers = [getattr(loader, name, None) for name in _SAMPLERS]
        holders = [loader, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]
        found = [getattr(holder, "generator", None) for holder in holders]
        for holder in holders[1:]:
            found += [value for _, value in walk_members(holder, named=True)]
        held = [value for value in found if is_generator(value)]
        self.data: list[Any] = []
        """Data sets that tell their position."""
        if reads_again:
            data = getattr(loader, "dataset", None)
            self.data = [value for _, value in walk_members(data, named=True) if _is_data(value)]
        self._held = list({id(value): value for value in [*held, *self.data]}.values())
        self._is_read_again = False
        self._begun = self._take()

    def __bool__(self) -> bool:
        return bool(self._held)

    def _take(self) -> list[Any]:
        return [copy.deepcopy(take_state(value)) for value in self._held]

    def note(self) -> None:
        """Store the states at the beginning of a pass."""
        self._begun = self._take()

    def rewind(self) -> None:
        """Restore the states that `note` stored, from which batches are read again."""
        self._put(self._begun)
        self._is_read_again = True

    def _put(self, states: list[Any]) -> None:
        for value, state in zip(self._held, states, strict=False):
            # A data set has come to its state by being read. To set it would move the beginning of the next pass.
            if not self._is_read_again or is_generator(value):
                put_state(value, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the states when the pass began, and the present ones."""
        return {"begun": self._begun, "now": self._take()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._begun = list(state["begun"])
        self._put(state["now"])


def _is_data(value: object) -> bool:
    """Return whether an object is a data set with a small state, not a model in it, and snapshots can keep this."""
    if not is_stateful(value) or isinstance(value, nn.Module | torch.optim.Optimizer):
        return False
    try:
        encode_value(take_state(value))
    except Exception:  # noqa: BLE001  # NotEncodable, or any error of the user's `state_dict`
        return False
    return True


class _RestOfSampler:
    """Sampler without its first indices; it calls `reached` when it has skipped them."""

    def __init__(self, sampler: Any, count: int, reached: Callable[[], None]) -> None:
        self._sampler, self._count, self._reached = sampler, count, reached

    def __iter__(self) -> Iterator[Any]:
        # A generator like torch's samplers, which draw their seed with the first index, after the loader has drawn its
        # own.
        indices = iter(self._sampler)
        count, self._count = self._count, 0  # persistent processes of a loader use this object for later epochs
        for _ in itertools.islice(indices, count):
            pass
        self._reached()
        yield from indices

    def __len__(self) -> int:
        return len(self._sampler)


def _open_behind(loader: DataLoader[Any], count: int, restore: Callable[[], None]) -> Iterator[Any]:
    """Return the batches of a loader after the first `count`, which are not read."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    whole = getattr(loader, name)
    # A DataLoader does not allow this attribute to be set. It reads the attribute only when it makes an iterator.
    loader.__dict__[name] = _RestOfSampler(whole, count, restore)
    try:
        batches = iter(loader)
    finally:
        loader.__dict__[name] = whole
    return batches
