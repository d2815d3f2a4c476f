"""Parameters are divided such that no worker has much more than another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtctl.runtime.strategies.zero1 import shares


@given(st.lists(st.integers(0, 1000)), st.integers(1, 9))
def test_loads_differ_by_no_more_than_the_largest_parameter(sizes: list[int], workers: int) -> None:
    owners = shares(sizes, workers)
    loads = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == worker) for worker in range(workers)
    ]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_shares_are_the_same_on_all_workers() -> None:
    assert shares([5, 5, 1, 9], 2) == shares([5, 5, 1, 9], 2) == [1, 1, 0, 0]
