"""Process groups of a mesh; dtctl/train/mesh.py defines them."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from dtctl.train.mesh import Degrees

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def device_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """Return the process groups of the axes that have more than one worker; collective over all workers.

    cp and ep are parts of fsdp here, which is there always; see `context_group` and `expert_mesh`.

    Args:
        degrees: their product is the world size.
        device_type: cpu or cuda.
    """
    from torch.distributed.device_mesh import init_device_mesh  # takes half a second, which ddp need not wait for

    sizes = {"pp": degrees.pp, "dp": degrees.dp, "fsdp": degrees.shards, "tp": degrees.tp}
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "fsdp"}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def limit_groups(timeout_s: float) -> None:
    """Let collectives of all groups of this worker wait that long; those of a mesh are made with torch's half hour.

    Args:
        timeout_s: `train.timeout_s`.
    """
    from torch.distributed import distributed_c10d as c10d

    for group in list(c10d._world.pg_map):
        if isinstance(group, c10d.ProcessGroup):
            c10d._set_pg_timeout(dt.timedelta(seconds=timeout_s), group)


def context_group(degrees: Degrees, device_type: str) -> ProcessGroup:
    """Return the workers that divide this one's sequences; collective over all workers."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (degrees.pp * degrees.dp * degrees.fsdp, degrees.cp, degrees.ep * degrees.tp)
    return init_device_mesh(device_type, shape, mesh_dim_names=("rest", "cp", "inner"))["cp"].get_group()


def expert_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """The process groups of experts, with the axes dp (if there is one), fsdp and ep; collective over all workers.

    fsdp are the workers that have the same experts and share their parameters (`Degrees.expert_shards`), ep those that
    divide experts: `Degrees.expert_parts`.
    """
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"pp": degrees.pp, "dp": degrees.dp, "fsdp": degrees.expert_shards, "ep": degrees.expert_parts}
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis in ("fsdp", "ep")}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
