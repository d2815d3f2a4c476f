"""DataLoaders, samplers and IterableDatasets of torch as data of the Trainer.

The Trainer reads samples by their position in the run, so that the batches do not depend on the number of workers, and
a resume needs no more than a number. Of a DataLoader it uses the data set, `collate_fn`, the batch size, the number of
processes, and the order: a sampler is drawn again for each epoch, with all random generators seeded by the epoch.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dtctl.errors import PlanError, WorkerFailed
from dtctl.runtime.data_loading.datasets import BatchDataset, CollatedDataset, MapDataset, SampleStream
from dtctl.runtime.data_loading.reading import BatchReader
from dtctl.runtime.data_loading.seeding import GeneratorSeeder
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.format.encoding import encode_generator_state, set_generator_state
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.train.config import TrainConfig

WHERE: Final = "the DataLoader of the Trainer"
IN_A_SESSION: Final = "or write the loop yourself, in dtctl.runtime.session"
_PLACE: Final = (1 << 20) - 1
"""Number in place of a shard, by which the seeds of samplers differ from those of samples."""
Data = MapDataset | BatchDataset | SampleStream


class SamplerOrder:
    """Order of a sampler: what it yields in each epoch, a function of the seed and the epoch alone.

    Attributes:
        sampler: yields indices, or lists of indices.
        length: number of samples, or batches, in an epoch.
        is_repeatable: False if the sampler yielded something else when it was drawn again with the same seeds.
        checksum: of the first epoch.
    """

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        """Draw the order of the first epoch.

        Args:
            sampler: yields indices, or lists of indices.
            seed: seed of the run.
        """
        self.sampler, self._seeder = sampler, GeneratorSeeder(sampler, seed)
        self._epochs: dict[int, Sequence[Any]] = {}
        first = self._draw(0)
        self.length = len(first)
        self.checksum = zlib.crc32(repr(first).encode())
        self.is_repeatable = self._draw(0) == first

    @property
    def name(self) -> str:
        """Return the class of the sampler."""
        return type(self.sampler).__qualname__

    def list_epoch(self, epoch: int) -> Sequence[Any]:
        """Return what the sampler yields in an epoch.

        Raises:
            WorkerFailed: the epoch has another length than the first one.
        """
        if epoch not in self._epochs:
            drawn = self._draw(epoch)
            if len(drawn) != self.length:
                raise WorkerFailed(
                    f"the sampler {self.name} has {len(drawn)} entries in epoch {epoch}, and had {self.length} in the "
                    "first one",
                    where=WHERE,
                    hint=f"let it have as many in each epoch, {IN_A_SESSION}",
                )
            self._epochs = {kept: order for kept, order in self._epochs.items() if kept == epoch - 1}
            self._epochs[epoch] = drawn
        return self._epochs[epoch]

    def _draw(self, epoch: int) -> list[Any]:
        """Return what the sampler yields in an epoch; no generator continues from there."""
        own = [(generator, encode_generator_state(generator)) for generator in self._seeder.list_dataset_generators()]
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            self._seeder.seed_place(_PLACE, epoch)
            if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
                set_epoch(epoch)
            return [entry.tolist() if isinstance(entry, torch.Tensor) else entry for entry in self.sampler]
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])
            for generator, state in own:
                set_generator_state(generator, state)


class LoaderSamples(CollatedDataset):
    """Samples of a DataLoader with a map-style data set.

    Attributes:
        order: order of the sampler; None if the Trainer shuffles. With an epoch length, indices count over all epochs.
    """

    def __init__(
        self, data: MapDataset, collate: Callable[[Any], Any], order: SamplerOrder | None, *, batched: bool
    ) -> None:
        """Store the parts of a DataLoader.

        Args:
            data: the data set.
            collate: makes a batch of samples.
            order: order of the sampler, if the Trainer must keep to it.
            batched: True if an entry of the order is a list of indices.
        """
        super().__init__(data, collate)
        self.order, self._is_batched = order, batched
        if order is not None:
            self.parts["sampler"] = order.sampler
            if not order.is_repeatable:
                self.irreproducible = f"the sampler {order.name} yields another order at each call"
        self.tokens_per_sample = getattr(data, "tokens_per_sample", None)

    def __len__(self) -> int:
        """Return the number of samples in an epoch; the number of batches if the order consists of whole batches."""
        return len(self.data) if self.order is None else self.order.length

    def __getitem__(self, index: int) -> Any:
        """Return a sample, or the list of samples of a batch."""
        if self.order is None:
            return self.data[index]
        epoch, place = divmod(index, self.order.length)
        entry = self.order.list_epoch(epoch)[place]
        return [self.data[each] for each in entry] if self._is_batched else self.data[entry]


class IterableSamples(CollatedDataset):
    """Samples of an IterableDataset: one shard, which every worker reads, taking the samples at its own positions."""

    shards = 1

    def open(self, shard: int, epoch: int) -> Iterator[Any]:  # noqa: ARG002  # there is one shard
        """Return the samples of an epoch, from the first one on."""
        if callable(set_epoch := getattr(self.data, "set_epoch", None)):
            set_epoch(epoch)
        return iter(self.data)


class _WholeBatch:
    """Function that makes a batch of a single entry, which is a batch already."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, entries: Sequence[Any]) -> Any:
        (batch,) = entries
        return self._collate(batch)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedData:
    """Data that the Trainer can read by position, and the settings that follow from a DataLoader."""

    data: Data
    config: TrainConfig
    line: str | None = None
    """Line for the log; None if nothing was adapted."""


def adapt_training_data(data: Any, config: TrainConfig, worker: Worker) -> AdaptedData:
    """Return data as the Trainer reads them; collective over all workers.

    Args:
        data: a data set of any kind, an IterableDataset, or a DataLoader.
        config: settings of the run; the batch size and the processes of a DataLoader take effect where they have none.
        worker: this worker.

    Raises:
        PlanError: the Trainer cannot read these data by position, or workers have other data.
    """
    adapted = _adapt(data, config)
    if adapted.line is not None:
        _require_equal_order(adapted.data, config.seed, worker)
    return adapted


def adapt_validation_data(data: Any) -> Any:
    """Return the validation set of a DataLoader, or the data set itself; order and batch size have no effect.

    Raises:
        PlanError: the data set cannot be read by index.
    """
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset) or (data.batch_size is None and data.batch_sampler is None):
            raise PlanError(
                "an evaluation reads each sample by its index, and this DataLoader has none",
                where="Trainer, validation",
                hint="give a data set with `__len__` and `__getitem__`",
            )
        return LoaderSamples(data.dataset, data.collate_fn, None, batched=False)  # type: ignore[arg-type]
    return data


def has_own_order(data: Data) -> bool:
    """Return whether samples are read in the order of the data; else the Trainer shuffles them."""
    return isinstance(data, SampleStream) or (isinstance(data, LoaderSamples) and data.order is not None)


def _adapt(data: Any, config: TrainConfig) -> AdaptedData:
    if isinstance(data, DataLoader):
        return _adapt_loader(data, config)
    if isinstance(data, IterableDataset) and not isinstance(data, SampleStream | BatchDataset):
        return _adapt_iterable(data, None, config)
    kind = type(data)
    is_known = isinstance(data, SampleStream) or (
        hasattr(kind, "__len__") and (hasattr(kind, "__getitem__") or isinstance(data, BatchDataset))
    )
    if not is_known:
        raise PlanError(
            f"the Trainer reads samples by their position, and a {kind.__qualname__} has none",
            where="Trainer, samples",
            hint="give a data set (`__len__` and `__getitem__`), a DataLoader or an IterableDataset, "
            f"{IN_A_SESSION}, which takes any iterable",
        )
    return AdaptedData(data=data, config=config)


def _adapt_loader(loader: DataLoader[Any], config: TrainConfig) -> AdaptedData:
    if loader.worker_init_fn is not None:
        raise PlanError(
            "the DataLoader has a worker_init_fn, and the Trainer reads with processes of its own",
            where=WHERE,
            hint="leave it out (generators are seeded by the position of each sample; files may be opened in "
            f"`__getitem__`), {IN_A_SESSION}",
        )
    if config.data_workers == 0 and loader.num_workers:
        many = 1 if isinstance(loader.dataset, IterableDataset) else loader.num_workers
        config = dataclasses.replace(config, data_workers=many)
    if isinstance(loader.dataset, IterableDataset):
        return _adapt_iterable(loader.dataset, loader, config)
    sampler, size = loader.sampler, loader.batch_size
    if type(loader.batch_sampler) is BatchSampler:  # both a default batch sampler and one that the program has made
        sampler, size = loader.batch_sampler.sampler, loader.batch_sampler.batch_size
    elif loader.batch_sampler is not None:
        sampler = loader.batch_sampler
    is_whole = size is None
    order = None if _is_shuffled(sampler, loader.dataset) else SamplerOrder(_unwrap(sampler), config.seed)
    is_batched = is_whole and loader.batch_sampler is not None
    collate = _WholeBatch(loader.collate_fn) if is_whole else loader.collate_fn
    samples = LoaderSamples(loader.dataset, collate, order, batched=is_batched)  # type: ignore[arg-type]
    config = _use_batch_size(config, 1 if size is None else size, is_whole=is_whole)
    what = f"{len(samples)} batches" if is_whole else f"{len(samples)} samples"
    how = "shuffled by the Trainer" if order is None else f"in the order of {order.name}, seeded by the epoch"
    return AdaptedData(data=samples, config=config, line=f"data: a DataLoader with {what}, {how}")


def _adapt_iterable(data: Any, loader: DataLoader[Any] | None, config: TrainConfig) -> AdaptedData:
    if config.data_workers not in (0, 1):
        raise PlanError(
            f"data_workers is {config.data_workers}, and an IterableDataset can be read by one process only",
            where="train.data_workers",
            hint="use 1: each process would read all samples, or its own part where the data set divides them",
        )
    collate: Callable[[Any], Any] = torch.utils.data.default_collate
    if loader is not None:
        is_whole = loader.batch_size is None
        collate = _WholeBatch(loader.collate_fn) if is_whole else loader.collate_fn
        config = _use_batch_size(config, loader.batch_size or 1, is_whole=is_whole)
    line = (
        f"data: {type(data).__qualname__}, read from the beginning by every worker; it has no way to continue at a "
        "position, so a resume reads again what it leaves out"
    )
    return AdaptedData(data=IterableSamples(data, collate), config=config, line=line)


def _use_batch_size(config: TrainConfig, size: int, *, is_whole: bool) -> TrainConfig:
    """Return the configuration, with the batch size of a DataLoader if it does not set one."""
    if is_whole and config.micro_batch not in (None, 1):
        raise PlanError(
            f"micro_batch is {config.micro_batch}, and the DataLoader makes the batches itself",
            where="train.micro_batch",
            hint="leave it out: each batch of the DataLoader is one pass of one worker",
        )
    if is_whole or (config.micro_batch is None and config.global_batch is None):
        return dataclasses.replace(config, micro_batch=size)
    return config


def _is_shuffled(sampler: Any, data: Any) -> bool:
    """Return whether a sampler yields all samples of a data set in a random order, as the Trainer does itself."""
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle)
    return type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(data)


def _unwrap(sampler: Any) -> Any:
    """Return a sampler of all workers; a sampler that deals out samples to workers in their order is replaced."""
    if type(sampler) is DistributedSampler:
        return SequentialSampler(sampler.dataset)  # type: ignore[arg-type]
    return sampler


def _require_equal_order(data: Data, seed: int, worker: Worker) -> None:
    """Refuse data that are not the same on all workers: the Trainer would divide what is divided already."""
    own: int | str | None = None
    if isinstance(data, LoaderSamples):
        own = None if data.order is None else data.order.checksum
    elif worker.backend is not None:
        own = BatchReader(data, seed).compute_probe_digest(*[np.zeros(1, dtype=np.int64)] * 2)
    if len({repr(each) for each in gather_json(own, worker)}) > 1:
        raise PlanError(
            "the workers get different samples from the same positions of the data",
            where=WHERE,
            hint="give all workers the same data and the same order, since the Trainer divides them (no `rank` in the "
            f"data set or its sampler), {IN_A_SESSION}",
        )
