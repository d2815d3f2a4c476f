"""Parameters are divided such that no worker has much more than another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.strategies import zero1
from dtctl.runtime.strategies.zero1 import Zero1, assign_parameter_owners, group_message_parameters
from dtctl.train.config import DdpConfig


@given(st.lists(st.integers(0, 1000)), st.integers(1, 9))
def test_loads_differ_by_no_more_than_the_largest_parameter(sizes: list[int], workers: int) -> None:
    owners = assign_parameter_owners(sizes, workers)
    loads = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == worker) for worker in range(workers)
    ]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_shares_are_the_same_on_all_workers() -> None:
    assert assign_parameter_owners([5, 5, 1, 9], 2) == assign_parameter_owners([5, 5, 1, 9], 2) == [1, 1, 0, 0]


def test_small_parameters_travel_together(tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(150)))
        strategy = Zero1(model, DdpConfig(), dataclasses.replace(worker, backend="gloo"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.prepare(optimizer)
        sent: list[int] = []
        real = dist.broadcast

        def noted(values: torch.Tensor, **options: Any) -> Any:
            sent.append(values.numel())
            return real(values, **options)

        monkeypatch.setattr(dist, "broadcast", noted)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert sent == [150 * 20], "one message, not 300"
    finally:
        dist.destroy_process_group()


def test_messages_have_one_kind_of_number_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero1, "MESSAGE_BYTES", 40)
    given = [torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.zeros(4), torch.zeros(99), torch.zeros(2, 2)]
    found = group_message_parameters(given)
    assert [[len(one.reshape(-1)) for one in bunch] for bunch in found] == [[4, 4], [4], [99], [4]]
    assert all(len({one.dtype for one in bunch}) == 1 for bunch in found)
    new = [torch.full((4,), 7.0), torch.full((2, 2), 8.0)]
    old = [torch.zeros(4), torch.zeros(2, 2)]
    zero1._copy_received_values(old, zero1._flatten_sent_parameters(new))
    assert all(torch.equal(one, other) for one, other in zip(old, new, strict=True))
