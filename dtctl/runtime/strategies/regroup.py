"""Move of a sharded model to new process groups: the shards stay where they are, and nothing is wrapped again.

fully_shard (torch 2.13) keeps its groups in the mesh and in what it notes of the mesh for each group of parameters, and
resets what an interrupted pass has left. DTensors have no groups of their own: they use those of their mesh, which is
often made from another mesh (a slice, two of them together) and has the names of that mesh's groups.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


def interrupt(root: nn.Module) -> None:
    """Forget the pass that is under way: gradients, gathered parameters, what was on its way; local."""
    if not hasattr(root, "reset_iter_state"):  # since torch 2.13; callers check for it first
        return
    if cast(Any, root)._get_fsdp_state()._is_root is None:  # no pass has come as far as to fully_shard yet
        return
    for _ in root.modules():
        try:
            cast(FSDPModule, root).reset_iter_state()
            break
        except RuntimeError:  # parameters that were on their way from a peer that is gone, of one group at a time
            for group in _groups(root):
                group._all_gather_result = None
    for group in _groups(root):
        group.reduce_grads = group.all_reduce_grads = True
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def replace(meshes: Iterable[tuple[DeviceMesh, DeviceMesh]]) -> None:
    """Let meshes, and all that was made from them, have the process groups of others from now on; local.

    Args:
        meshes: each with groups that are gone, changed in place, since DTensors and modules refer to it; and one of the
            same shape with groups that are there, and with the same axes flattened.
    """
    renamed: dict[int, dict[Any, Any]] = {}
    for held, new in meshes:
        names: dict[Any, Any] = dict(zip(held._dim_group_names, new._dim_group_names, strict=True))
        for axis, flat in held._flatten_mapping.items():
            names |= zip(flat._dim_group_names, new._flatten_mapping[axis]._dim_group_names, strict=True)
        renamed[id(held)] = names
        held._pg_registry = new._pg_registry
    # Their holders are not listed: parameters, fully_shard, states of the optimizer, DTensor's cache of operations.
    for each in gc.get_objects():
        if type(each) is DeviceMesh and id(each._get_root_mesh()) in renamed:
            names = renamed[id(each._get_root_mesh())]
            each._dim_group_names = [names[name] for name in each._dim_group_names]


def join(root: nn.Module) -> None:
    """Use the process groups that the meshes have now; local.

    Args:
        root: a module that is sharded.
    """
    for group in _groups(root):
        for info in {id(info): info for info in (group.mesh_info, group.post_forward_mesh_info)}.values():
            if info is not None:
                info.__post_init__()


def _groups(root: nn.Module) -> Iterator[Any]:
    """Yield what fully_shard keeps of each group of parameters."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield from cast(Any, module)._get_fsdp_state()._fsdp_param_groups
