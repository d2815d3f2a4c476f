"""The order of samples: a permutation an epoch, nothing lost or doubled, whatever the workers and the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtctl.runtime.data_loading.order import SampleOrder, WorkerSampler
from dtctl.train.batch import BatchSizes


@given(samples=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    found = SampleOrder(samples, seed)(np.arange(epoch * samples, (epoch + 1) * samples))
    assert sorted(found.tolist()) == list(range(samples))


def test_large_sets_need_no_table() -> None:
    samples = 10**12 + 39
    found = SampleOrder(samples, 1)(np.arange(100_000))
    assert found.min() >= 0
    assert found.max() < samples
    assert len(np.unique(found)) == 100_000


def test_the_order_is_fixed_for_good() -> None:
    """A resumed run must find the order it began with: other numbers here break every run under way."""
    assert SampleOrder(10, 0)(np.arange(20)).tolist() == [4, 9, 3, 0, 5, 7, 2, 1, 6, 8, 5, 1, 8, 0, 7, 4, 6, 9, 2, 3]


def test_epochs_and_seeds_differ_and_indices_are_spread() -> None:
    samples = 1000
    orders = [SampleOrder(samples, seed)(np.arange(2 * samples)) for seed in range(20)]
    first = np.array([found[:samples] for found in orders])
    second = np.array([found[samples:] for found in orders])
    assert all((one != two).mean() > 0.98 for one, two in zip(first, second, strict=True))
    # Each place should see all regions of the data: the mean of 20 uniform draws has a deviation of 65.
    assert abs(first.mean(0) - (samples - 1) / 2).max() < 6 * 65
    neighbours = np.abs(np.diff(first, axis=1)).mean()
    assert neighbours == pytest.approx(samples / 3, rel=0.05)


@settings(max_examples=200)
@given(
    samples=st.integers(1, 200),
    micro=st.integers(1, 7),
    workers=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    epochs=st.integers(1, 3),
)
def test_workers_share_each_step_and_lose_nothing(
    samples: int, micro: int, workers: int, accumulate: int, epochs: int
) -> None:
    sizes = BatchSizes(micro=micro, accumulate=accumulate, world_size=workers)
    end = samples * epochs
    order = SampleOrder(samples, 5)
    schedules = [WorkerSampler(order, sizes, rank=rank, end=end) for rank in range(workers)]
    seen: list[int] = []
    for start in range(0, end, sizes.total):
        step = [indices for schedule in schedules for indices in schedule(start)]
        taken = [index for indices in step for index in indices.tolist()]
        assert len(taken) == schedules[0].samples(start) == min(sizes.total, end - start)
        assert sorted(taken) == sorted(order(np.arange(start, start + len(taken))).tolist())
        seen += taken
    assert sorted(seen) == sorted(list(range(samples)) * epochs)


def test_other_numbers_of_workers_see_the_same_steps() -> None:
    order = SampleOrder(100, 3)
    for start in (0, 24, 48):
        steps = []
        for micro, workers, accumulate in ((24, 1, 1), (4, 3, 2), (6, 2, 2), (1, 4, 6)):
            sizes = BatchSizes(micro=micro, accumulate=accumulate, world_size=workers)
            step = [
                i for r in range(workers) for part in WorkerSampler(order, sizes, rank=r, end=1000)(start) for i in part
            ]
            steps.append(sorted(step))
        for micro, shares in ((2, (1, 3)), (4, (3, 2, 1)), (1, (5, 1))):
            sizes = BatchSizes(
                micro=micro, accumulate=24 // micro // sum(shares), world_size=len(shares), shares=shares
            )
            assert sizes.total == 24
            schedules = [WorkerSampler(order, sizes, rank=rank, end=1000) for rank in range(len(shares))]
            parts = [schedule(start) for schedule in schedules]
            assert [len(part[0]) for part in parts] == [micro * share for share in shares]
            steps.append(sorted(i for part in parts for indices in part for i in indices))
        assert all(step == steps[0] for step in steps)


def test_a_schedule_may_begin_anywhere() -> None:
    sizes = BatchSizes(micro=3, accumulate=2, world_size=2)
    whole = WorkerSampler(SampleOrder(50, 1), sizes, rank=1, end=10**6)
    expected = {start: np.concatenate(whole(start)).tolist() for start in range(0, 120_000, 12)}
    for start in (119_988, 48, 60, 72, 0):
        assert (
            np.concatenate(WorkerSampler(SampleOrder(50, 1), sizes, rank=1, end=10**6)(start)).tolist()
            == expected[start]
        )
        assert np.concatenate(whole(start)).tolist() == expected[start]
    off_grid = WorkerSampler(SampleOrder(50, 1), sizes, rank=0, end=10**6)
    assert off_grid(5)[0].tolist() == SampleOrder(50, 1)(np.arange(5, 8)).tolist()
