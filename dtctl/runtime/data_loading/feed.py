"""Loading of batches: in the loop itself, or ahead of it by a thread or by processes.

The order of batches is fixed before anything is read (see order.py). Therefore samples and snapshots do not depend on
the process that reads: the position of the loop is enough, regardless of the batches that were read ahead.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from dtctl.errors import PlanError, WorkerFailed
from dtctl.runtime.data_loading import handles
from dtctl.runtime.data_loading.datasets import BatchDataset, pin_batch_tensors
from dtctl.runtime.data_loading.order import Indices, WorkerSampler
from dtctl.runtime.data_loading.reading import BatchReader, DatasetExamination
from dtctl.train.config import TrainConfig

Request = tuple[Indices, Indices]
"""Indices and positions of one micro batch."""
IGNORED: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
"""Signals to the whole process group at which the loop makes a snapshot, for which it may need more batches."""


class BatchLoader:
    """Loader of the batches for the loop.

    Reading starts with the first batch that the loop requests, and restarts when the loop requests any other than the
    next.
    """

    def __init__(self, reader: BatchReader, config: TrainConfig, device: torch.device) -> None:
        """Prepare to read, without starting a thread or a process.

        Raises:
            PlanError: the data set cannot be read by a thread, or holds handles that several processes cannot share.
        """
        if config.data_workers == "thread" and not isinstance(reader.data, BatchDataset):
            raise PlanError(
                "a thread can only read from data sets that make whole batches",
                where="train.data_workers",
                hint="give the data set a method `batch(indices)`, or use processes: `data_workers: 2`",
            )
        self.reader = reader
        self._workers, self._ahead = config.data_workers, config.data_prefetch
        self._pin = device.type == "cuda"
        self._source: Iterator[Any] | None = None
        self._next: tuple[int, int] | None = None
        self._order: Iterator[tuple[int, int]] = iter(())
        self._processes: list[Any] = []
        self._handles = (
            handles.DatasetHandles(reader.data) if isinstance(config.data_workers, int) and self._workers else None
        )

    def batch(self, indices: Indices, schedule: WorkerSampler, start: int, index: int) -> Any:
        """Return a micro batch on the CPU.

        Args:
            indices: indices of its samples, at least one.
            schedule: sampler of the worker, which has the micro batch.
            start: position at which its step begins.
            index: number of the micro batch in the step.
        """
        if self._workers == 0:
            at_once = self.reader.at_once
            found = self.reader(indices, schedule.positions(start)[index]) if at_once is None else at_once(indices)
            return (
                pin_batch_tensors(found) if self._pin else found
            )  # a copy from pageable memory would wait for all work of the GPU
        if self._source is None or self._next != (start, index):
            self.close()
            self._start_batch_source(schedule, start, index)
        assert self._source is not None  # noqa: S101  # for the type checker
        try:
            found = next(self._source)
        except (EOFError, ConnectionError):
            # The pipe of a process that is ending. torch's handler of SIGCHLD raises an error after its end; wait for
            # that here, so that it does not interrupt the handling of this error.
            self._let_die()
            raise
        self._next = next(self._order, None)
        if self.reader.at_once is None:
            self.reader.seed_generators(schedule.positions(start)[index])
        return found

    def examine_dataset(self, positions: Indices) -> DatasetExamination:
        """Examine a few samples before training; of a stream, those at `positions` are read."""
        return self.reader.examine_dataset(positions, threaded=self._workers == "thread")

    def single(self, indices: Indices) -> Any:
        """Return a batch outside of the usual order."""
        return self.reader(indices, indices)

    def _start_batch_source(self, schedule: WorkerSampler, start: int, index: int) -> None:
        self._order = schedule.keys(start, index)
        self._next = next(self._order)
        requests = schedule.requests(start, index)
        if self._workers == "thread":
            self._source = _by_thread(self.reader, requests, ahead=self._ahead, pin=self._pin)
            return
        opened = self._handles.list_new_handles() if self._handles is not None else []
        before = set(multiprocessing.active_children())
        loader: DataLoader[Any] = DataLoader(
            _RequestDataset(self.reader),
            sampler=requests,  # the loader takes requests when batches are due
            batch_size=None,
            num_workers=int(self._workers),
            prefetch_factor=self._ahead,
            pin_memory=self._pin,
            worker_init_fn=partial(_begin_worker, handles.open_files(), opened),
            generator=torch.Generator(),  # otherwise the loader draws its seed from the loop's random state
        )
        self._source = iter(loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return the context of a loop: it reports the failure of a reading process, and ends all of them at exit.

        Raises:
            WorkerFailed: a process that reads data has ended.
        """
        try:
            yield
        except (RuntimeError, EOFError, ConnectionError) as exc:
            died = self.describe_lost_readers(exc)
            if not died:
                raise
            raise WorkerFailed(
                f"a process that reads data died: {died}",
                where="train.data_workers",
                hint="SIGKILL usually means a lack of memory: use fewer `data_workers`, or a lower `data_prefetch`; "
                "SIGBUS means that /dev/shm is full",
            ) from exc
        finally:
            self.close()

    def describe_lost_readers(self, error: BaseException) -> str:
        """Return the reading processes that have failed, with their exit codes, if they caused an error; else ""."""
        # The first sign varies: torch's error, or the end of the pipe for a batch.
        if not isinstance(error, RuntimeError | EOFError | ConnectionError):
            return ""
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in str(error):
            return ""
        self._let_die()
        codes = {process.pid: process.exitcode for process in self._processes if process.exitcode}
        ends = {pid: signal.Signals(-code).name if code < 0 else f"exit code {code}" for pid, code in codes.items()}
        return ", ".join(f"{end} (pid {pid})" for pid, end in ends.items())

    def _let_die(self) -> None:
        """Wait up to a second for a process to end."""
        ended = wait([process.sentinel for process in self._processes], timeout=1.0)
        for process in self._processes:
            if process.sentinel in ended:
                process.join(1.0)  # it closes its end of the pipe shortly before its exit code is available

    def close(self) -> None:
        """Discard batches that were read ahead, and end the readers."""
        if isinstance(self._source, Iterator) and hasattr(self._source, "close"):
            self._source.close()
        self._source = self._next = None  # the loader's iterator ends its processes when it is deleted
        for process in self._processes:
            if process.is_alive():  # in code of the data set, which does not react to SIGTERM
                process.kill()
                process.join()
        self._processes = []


class _RequestDataset(Dataset[Any]):
    """A data set that is indexed by requests for batches."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __getitem__(self, request: Request) -> Any:
        return self._reader(*request)


def _begin_worker(
    files: dict[int, handles.OpenFile], opened: list[tuple[dict[str, Any], str, Any]], _number: int
) -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    handles.reopen_inherited_files(files)
    handles.put_back(opened)


def _by_thread(reader: BatchReader, requests: Iterator[Request], *, ahead: int, pin: bool) -> Iterator[Any]:
    """Yield batches in order; a thread reads up to `ahead` of them in advance."""

    def read(request: Request) -> Any:
        batch = reader.in_thread(*request)
        return pin_batch_tensors(batch) if pin else batch

    pending: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
        try:
            for request in requests:
                pending.append(thread.submit(read, request))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
