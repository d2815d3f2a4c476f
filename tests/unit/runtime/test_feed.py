"""Batches ahead of time: by processes, by a thread, in the loop; the same bits in the same order, whatever happens."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtctl.errors import PlanError, WorkerFailed
from dtctl.runtime import TensorData
from dtctl.runtime.data_loading.feed import BatchLoader
from dtctl.runtime.data_loading.order import SampleOrder, SequentialOrder, WorkerSampler
from dtctl.runtime.data_loading.reading import BatchReader
from dtctl.train.batch import BatchSizes
from dtctl.train.config import TrainConfig
from tests.facts import raises
from tests.unit.runtime.conftest import Make, points, squared
from tests.unit.runtime.test_loop import Killed, dies_at, digest

CPU = torch.device("cpu")


class Noisy:
    """Points with noise from three generators, and the number of the process that read them."""

    def __init__(self, count: int = 50, dies_at: int = -1) -> None:
        self.points, self.dies_at = points(count), dies_at

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = (tensor[index] for tensor in self.points.tensors)
        noise = torch.randn(8) + random.random() + torch.from_numpy(np.random.rand(8).astype(np.float32))
        return inputs + noise / 9, targets


class Counting:
    """A stream whose samples tell where they are from; shard 1 is shorter than the others."""

    shards = 3

    def __init__(self, *, fast: bool = False) -> None:
        self.fast = fast

    def open(self, shard: int, epoch: int) -> Iterator[Any]:
        rows = [torch.tensor([shard, epoch, place]) for place in range(3 if shard == 1 else 5)]
        return Fast(rows) if self.fast else iter(rows)


class Fast:
    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows, self.place = rows, 0

    def __iter__(self) -> Fast:
        return self

    def __next__(self) -> torch.Tensor:
        self.place += 1
        if self.place > len(self.rows):
            raise StopIteration
        return self.rows[self.place - 1]

    def skip(self, count: int) -> int:
        passed = min(count, len(self.rows) - self.place)
        self.place += passed
        return passed


def ends(make: Make, folder: str, workers: Any, samples: Any, *, killed: int = 0, **settings: Any) -> str:
    settings = {"data_workers": workers, "snapshot": {"dir": folder, "every_steps": 4}, **settings}
    if killed:
        with pytest.raises(Killed):
            make(settings, samples=samples, loss=dies_at(killed)).run()
    trainer = make(settings, samples=samples)
    trainer.run()
    return digest(trainer)


def test_augmentation_depends_on_neither_processes_nor_interruptions(make: Make) -> None:
    noisy = Noisy()
    expected = ends(make, "alone", 0, noisy, accumulate=2)
    assert ends(make, "two", 2, noisy, accumulate=2) == expected
    assert ends(make, "killed", 2, noisy, accumulate=2, killed=13) == expected
    assert ends(make, "resumed alone", 0, noisy, accumulate=2, killed=13) == expected


def test_every_epoch_has_noise_of_its_own_and_the_loops_is_left_alone() -> None:
    reader = BatchReader(Noisy(), 0)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = reader(np.array([7, 8]), np.array([0, 1]))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(reader(np.array([7]), np.array([0]))[0][0], first[0][0])
    assert not torch.equal(reader(np.array([7]), np.array([50]))[0][0], first[0][0])
    assert not torch.equal(BatchReader(Noisy(), 1)(np.array([7]), np.array([0]))[0][0], first[0][0])


@pytest.mark.parametrize("workers", [1, "thread"])
def test_batches_that_are_made_whole(make: Make, workers: Any) -> None:
    expected = ends(make, "alone", 0, points(), steps=None, epochs=2, micro_batch=8)
    assert ends(make, "ahead", workers, points(), steps=None, epochs=2, micro_batch=8) == expected


def test_no_sample_is_lost_or_doubled_at_the_end_of_an_epoch(make: Make) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.extend(batch[2].tolist())
        return squared(model, batch[:2])

    data = TensorData(*points(26).tensors, torch.arange(26))
    settings = {"steps": None, "epochs": 3, "micro_batch": 4, "accumulate": 2, "data_workers": 2}
    make(settings, samples=data, loss=loss).run()
    assert sorted(seen) == sorted(list(range(26)) * 3)
    assert [sorted(seen[start : start + 26]) for start in (0, 26, 52)] == [list(range(26))] * 3


@pytest.mark.parametrize("fast", [True, False])
def test_shards_are_read_in_turn_from_anywhere(fast: bool) -> None:
    stream = Counting(fast=fast)
    whole = BatchReader(stream, 0)(np.arange(60), np.arange(60)).tolist()
    assert whole[:6] == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 0, 1], [1, 0, 1], [2, 0, 1]]
    assert whole[9:12] == [[0, 0, 3], [1, 1, 0], [2, 0, 3]]
    assert len({tuple(row) for row in whole}) == 60
    reader = BatchReader(stream, 0)
    for start in (0, 48, 50, 12, 13):
        found = np.arange(start, start + 2)
        assert reader(found, found).tolist() == whole[start : start + 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_share_a_stream(workers: int) -> None:
    rows: list[Any] = []
    for rank in range(2):
        sizes = BatchSizes(micro=2, accumulate=2, world_size=2)
        schedule = WorkerSampler(SequentialOrder(), sizes, rank=rank, end=32)
        feed = BatchLoader(BatchReader(Counting(), 0), TrainConfig(data_workers=workers), CPU)
        with feed.running():
            for start in (8, 16, 24):
                for index in range(2):
                    rows += feed.batch(schedule(start)[index], schedule, start, index).tolist()
    expected = BatchReader(Counting(), 0)(np.arange(8, 32), np.arange(8, 32)).tolist()
    assert sorted(rows) == sorted(expected)


def test_a_jump_is_followed() -> None:
    sizes = BatchSizes(micro=3, accumulate=2, world_size=1)
    schedule = WorkerSampler(SampleOrder(40, 0), sizes, rank=0, end=40)
    data = TensorData(torch.arange(40))
    feed = BatchLoader(BatchReader(data, 0), TrainConfig(data_workers=1, data_prefetch=3), CPU)
    with feed.running():
        for start, index in ((0, 0), (0, 1), (6, 0), (0, 0), (0, 1), (36, 0), (36, 1), (12, 1)):
            assert (
                feed.batch(schedule(start)[index], schedule, start, index)[0].tolist()
                == schedule(start)[index].tolist()
            )


# A batch that was under way is lost with the process, and the file that torch passes it in is closed by nobody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_death_of_a_process_has_a_name(make: Make) -> None:
    with raises(WorkerFailed, "SIGKILL"):
        make({"data_workers": 1, "steps": 50}, samples=Noisy(dies_at=17)).run()


def test_an_error_in_the_data_set_is_what_it_is(make: Make) -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise RuntimeError("no such image")

    with raises(RuntimeError, "such image"):
        make({"data_workers": 1}, samples=Broken()).run()


def ignores(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.split("SigIgn:")[1].split()[0], 16)
    return bool(mask >> (number - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_processes_outlive_a_signal_to_the_group_and_end_with_the_loop(make: Make) -> None:
    pids: list[int] = []

    class Named(Noisy):
        def __getitem__(self, index: int) -> Any:
            return *super().__getitem__(index), torch.tensor(os.getpid())

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        pids.extend(batch[2].tolist())
        if trainer.step == 3:
            assert all(ignores(pid, signal.SIGTERM) for pid in pids)  # forked ones would also inherit our handler
            for pid in {*pids, os.getpid()}:
                os.kill(pid, signal.SIGTERM)
        return squared(model, batch[:2])

    trainer = make({"data_workers": 2, "data_prefetch": 1, "steps": 60}, samples=Named(), loss=loss)
    trainer.run()
    assert (trainer.step, len(set(pids))) == (4, 2)
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline


def test_what_cannot_be_read_is_refused(make: Make) -> None:
    with raises(PlanError, "whole batches"):
        make({"data_workers": "thread"}, samples=Noisy())
    with raises(PlanError, "stream end"):
        make({"steps": None, "epochs": 1}, samples=Counting())


@pytest.mark.parametrize("workers", [0, "thread"])
def test_batches_for_a_gpu_are_pinned_also_if_the_loop_reads(monkeypatch: pytest.MonkeyPatch, workers: Any) -> None:
    seen: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    config = TrainConfig(micro_batch=4, steps=2, data_workers=workers)
    feed = BatchLoader(BatchReader(points(), 0), config, torch.device("cuda", 0))
    schedule = WorkerSampler(SampleOrder(50, 0), BatchSizes(micro=4, accumulate=1, world_size=1), rank=0, end=8)
    with feed.running():
        feed.batch(schedule(0)[0], schedule, 0, 0)
    assert len(seen) >= 2


class BadRecord(Exception):
    """Cannot be made from its text alone, as torch makes the exceptions of its processes anew."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"cannot decode {path} line {line}")


class Bad:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index == 37:
            raise self.error
        return torch.full((8,), float(index)), torch.ones(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "error", [BadRecord("shard-3", 812), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "shard-3")], ids=["own", "unicode"]
)
def test_the_cause_of_a_sample_that_cannot_be_read_is_told(make: Make, error: Exception) -> None:
    with pytest.raises(Exception, match="shard-3"):
        make({"data_workers": 1, "steps": 20}, samples=Bad(error)).run()
