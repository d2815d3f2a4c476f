"""A sharded model whose process groups are made anew: its meshes, and all that was made from them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtctl.runtime.strategies import regroup

WORKERS = 4


def begin(*, others: int) -> None:
    """A group of workers that are not there, and some more, so that those of a mesh have other names each time."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORKERS)
    for _ in range(others):
        dist.new_group()


@pytest.fixture(autouse=True)
def end() -> Iterator[None]:
    """What a test leaves."""
    yield
    dist.destroy_process_group()


def made() -> tuple[DeviceMesh, DeviceMesh]:
    """Two replicas of two shards, and all of them as one axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    return mesh, mesh["dp", "fsdp"]._flatten("data")


def groups(meshes: list[DeviceMesh]) -> list[dist.ProcessGroup]:
    """Of all axes."""
    return [mesh.get_group(axis) for mesh in meshes for axis in mesh.mesh_dim_names or ()]


def test_what_was_made_from_a_mesh_has_its_new_groups() -> None:
    begin(others=0)
    (held, flat), (other, _) = made(), made()
    of_another = list(other._dim_group_names)
    parts = [held["dp"], held["fsdp"], flat, DeviceMesh._concatenate([held["fsdp"], held["dp"]])]
    for others in (3, 1):
        before = groups([held, *parts])
        dist.destroy_process_group()
        begin(others=others)
        new, new_flat = made()
        regroup.replace_mesh_groups([(held, new)])
        dp, fsdp, data = new.get_group("dp"), new.get_group("fsdp"), new_flat.get_group()
        now = groups([held, *parts])
        assert all(found is group for found, group in zip(now, [dp, fsdp, dp, fsdp, data, fsdp, dp], strict=True))
        assert not set(now) & set(before)
    assert other._dim_group_names == of_another, "it was not replaced"


def test_who_is_interrupted_before_its_first_pass_has_nothing_to_forget() -> None:
    begin(others=0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh, _ = made()
    for part in [*model, model]:
        fully_shard(part, mesh=mesh)
    before = [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[operator]
    regroup.reset_interrupted_pass(model)
    assert all(map(torch.equal, before, [parameter.to_local() for parameter in model.parameters()]))  # type: ignore[operator]
