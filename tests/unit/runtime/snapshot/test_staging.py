"""The memory that states are copied to from a GPU, with a CUDA that notes what it is asked for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from dtctl.errors import SnapshotError
from dtctl.runtime.distributed import capacity
from dtctl.runtime.snapshot.storage.staging import StagingBuffer, allocate_page_locked
from tests.facts import raises


class Runtime:
    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.locked = refuses, dict[int, int]()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 0
        if self.refuses:
            return 2
        self.locked[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


def test_no_more_is_locked_than_the_state_takes_and_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    size_bytes = (1 << 20) + 4096  # torch's own allocator would take 2 MiB for ever
    buffer = allocate_page_locked(size_bytes)
    assert runtime.locked == {buffer.data_ptr(): size_bytes}
    part = buffer[4096:]
    del buffer
    gc.collect()
    assert runtime.locked, "a part of it is in use"
    del part
    gc.collect()
    assert not runtime.locked


def test_where_it_cannot_be_locked_torch_s_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return real(*args, **options)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(refuses=True))
    monkeypatch.setattr(torch, "empty", empty)
    assert len(allocate_page_locked(64)) == 64
    assert asked == [False, True]


def test_a_state_that_no_memory_holds_is_refused_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": {"weight": torch.ones(1024)}}
    monkeypatch.setattr(capacity, "compute_node_memory_bytes", lambda: 4096 + 1024)
    staging = StagingBuffer()
    assert staging.stage_tensors(state).files[0].data.numel() >= 4096
    monkeypatch.setattr(capacity, "compute_node_memory_bytes", lambda: 4095)
    staging.stage_tensors(state)  # there is room already
    with raises(SnapshotError, "copied memory") as refused:
        StagingBuffer().stage_tensors(state)
    assert "sharded" in str(refused.value.hint)
