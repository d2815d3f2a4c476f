"""Limits of groups, and how a worker leaves them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _random

from dtctl.errors import PlanError
from dtctl.runtime.distributed.device_mesh import limit_groups
from dtctl.runtime.distributed.process_group import _can_be_bound, leave_process_group, require_same_device
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.strategies.tensor import draw_alike
from tests import forked
from tests.facts import raises


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one."""
    limit = dt.timedelta(seconds=77)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1, timeout=limit)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_groups_of_a_mesh_wait_as_long_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.new_group([0], timeout=dt.timedelta(minutes=30))  # as a mesh makes them
    made = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]
    assert len(made) > 1
    set_to = {}
    real = dist.distributed_c10d._set_pg_timeout

    def noted(timeout: dt.timedelta, group: Any) -> None:
        set_to[group] = timeout.total_seconds()
        real(timeout, group)

    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", noted)
    limit_groups(33.0)
    assert set_to == dict.fromkeys(made, 33.0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("backend", "aborts"), [("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)])
def test_a_failed_worker_does_not_wait_for_its_peers_on_gpus(
    monkeypatch: pytest.MonkeyPatch, backend: str, aborts: bool
) -> None:
    done: list[str] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: done.append("aborted"))
    leave_process_group(within_s=5.0)
    assert done == ["aborted" if aborts else "destroyed"]
    assert threading.active_count() >= 1
    monkeypatch.undo()


def test_divided_tensors_draw_by_the_state_of_their_own_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Mesh:
        device_type = "cuda"

    monkeypatch.setattr(_random, "_rng_tracker", None)
    monkeypatch.setattr(_random, "OffsetBasedRNGTracker", lambda _, *, run_state_sync: asked.append(run_state_sync))
    draw_alike(Mesh())  # type: ignore[arg-type]
    assert asked == [False]
    Mesh.device_type = "cpu"
    draw_alike(Mesh())  # type: ignore[arg-type]
    assert asked == [False], "on CPUs torch has no tracker"


@pytest.mark.parametrize("kinds", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_worker_on_another_kind_of_device_is_told_before_it_waits(worker: Worker, kinds: tuple[str, str]) -> None:
    shared = dist.HashStore()
    first, second = (
        dataclasses.replace(worker, rank=rank, world_size=2, device=torch.device(kind))
        for rank, kind in enumerate(kinds)
    )
    require_same_device(shared, first)
    if kinds[0] == kinds[1]:
        require_same_device(shared, second)
        return
    names = {"cuda": "GPU", "cpu": "CPU"}
    with raises(PlanError, f"1 {names[kinds[1]]} 0 {names[kinds[0]]}"):
        require_same_device(shared, second)


@pytest.mark.parametrize(
    ("version", "backend", "bound"),
    [
        ("2.13.0+cu130", "cpu:gloo,cuda:nccl", True),
        ("2.9.1", "cpu:gloo,cuda:nccl", False),
        ("3.0.0a0+git1", "cpu:gloo,cuda:nccl", True),
        ("2.13.0", "gloo", False),
    ],
)
def test_groups_are_bound_to_gpus_where_torch_can_split_them(
    monkeypatch: pytest.MonkeyPatch, version: str, backend: str, bound: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert _can_be_bound(backend) is bound


ENDS = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from dtctl.runtime.distributed.process_group import keep_gloo_groups

def train_and_leave():
    group = dist.new_group()
    layers = [nn.Linear(8, 8) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group, bucket_cap_mb=1e-4)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    keep_gloo_groups()
    dist.destroy_process_group(group)  # and the model outlives it by a moment

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
dist.init_process_group("gloo")
sys.setswitchinterval(100)
for _ in range(30):
    train_and_leave()
print("through", flush=True)
"""


def test_a_model_that_outlives_its_group_does_not_hang(tmp_path: Path) -> None:
    """DDP's reducer waits for gloo's threads and holds the interpreter's lock: hung without `keep_gloo_groups`."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    ended = forked.launch([script], 3, cwd=tmp_path, limit_s=100)
    assert ended.output.count("through") == 3, ended.output
    assert ended.code == 0
