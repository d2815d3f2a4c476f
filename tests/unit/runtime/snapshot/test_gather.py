"""Sharded tensors are put together and cut again; the same names come from everyone once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dtctl.errors import SnapshotError
from dtctl.runtime import Worker
from dtctl.runtime.snapshot import state
from dtctl.runtime.snapshot.format.pieces import shard_tensor_like
from dtctl.runtime.snapshot.gather import gather_entries_on_first, gather_optimizer
from tests.facts import raises


@pytest.fixture
def mesh(worker: Worker) -> Iterator[DeviceMesh]:
    """Of one worker, whose shards are whole; equality tests have more."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_tensor_is_gathered_and_cut_again(mesh: DeviceMesh, worker: Worker) -> None:
    whole = torch.arange(12.0).view(3, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    tree = gather_entries_on_first(
        {"a": sharded, "b": {"step": torch.tensor(3.0), "deep": {"x": sharded}, "none": None}}, worker
    )
    assert tree is not None
    assert type(tree["a"]) is torch.Tensor
    assert torch.equal(tree["b"]["deep"]["x"], whole)
    assert tree["b"]["none"] is None
    again = shard_tensor_like(sharded, tree["a"])
    assert isinstance(again, DTensor)
    assert torch.equal(again.to_local(), whole)


def test_what_has_another_shape_or_is_not_sharded_stays_whole(mesh: DeviceMesh) -> None:
    sharded = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(0)])
    scalar = torch.tensor(1.0)
    assert shard_tensor_like(sharded, scalar) is scalar
    assert shard_tensor_like(torch.zeros(()), scalar) is scalar


def test_another_model_is_refused_with_its_names(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    with raises(SnapshotError, "mismatch weight"):
        state.load_model(model, {"weight": torch.zeros(5, 4), "bias": torch.zeros(3)})
    with pytest.raises(SnapshotError, match="other"):
        state.load_model(model, {"weight": torch.zeros(3, 4), "bias": torch.zeros(3), "other": torch.zeros(1)})
    state.load_model(
        model, {"weight": torch.ones(3, 4), "bias": torch.ones(3), "other": torch.zeros(1)}, absent_keys={"other"}
    )
    assert float(model.weight.detach().sum()) == 12


def test_groups_of_one_optimizer_are_one_tree(worker: Worker) -> None:
    tree = {
        "state": {"a": {"step": torch.tensor(1.0)}},
        "groups": [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["b"]}],
    }
    assert gather_optimizer(tree, worker) == {"state": tree["state"], "groups": [{"lr": 0.1, "params": ["a", "b"]}]}
