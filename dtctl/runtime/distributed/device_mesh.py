"""Process groups of a mesh, which dtctl/train/mesh.py defines."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from dtctl.train.mesh import Degrees

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def build_device_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """Return the process groups of the axes that have more than one worker; collective over all workers.

    cp and ep are parts of fsdp here, and fsdp always exists; see `build_context_group` and `build_expert_mesh`.

    Args:
        degrees: degrees whose product is the world size.
        device_type: cpu or cuda.
    """
    # imported here, since it takes half a second and ddp does not need it
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"pp": degrees.pp, "dp": degrees.dp, "fsdp": degrees.shards, "tp": degrees.tp}
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "fsdp"}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def limit_groups(timeout_s: float) -> None:
    """Set the time limit of collectives in all groups of this worker, as torch makes those of a mesh with 30 minutes.

    Args:
        timeout_s: `train.timeout_s`.
    """
    from torch.distributed import distributed_c10d as c10d

    for group in list(c10d._world.pg_map):
        if isinstance(group, c10d.ProcessGroup):
            c10d._set_pg_timeout(dt.timedelta(seconds=timeout_s), group)


def build_context_group(degrees: Degrees, device_type: str) -> ProcessGroup:
    """Return the group of workers that divide the same sequences; collective over all workers."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (degrees.pp * degrees.dp * degrees.fsdp, degrees.cp, degrees.ep * degrees.tp)
    return init_device_mesh(device_type, shape, mesh_dim_names=("rest", "cp", "inner"))["cp"].get_group()


def build_expert_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """Return the process groups of experts, with the axes dp (if there is one), fsdp and ep; collective.

    Workers on the axis fsdp have the same experts and share their parameters (`Degrees.expert_shards`); those on ep
    divide experts (`Degrees.expert_parts`).
    """
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"pp": degrees.pp, "dp": degrees.dp, "fsdp": degrees.expert_shards, "ep": degrees.expert_parts}
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis in ("fsdp", "ep")}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
