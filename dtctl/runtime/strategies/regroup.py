"""Move of a sharded model to new process groups; the shards stay in place, and nothing is wrapped once more.

fully_shard (torch 2.13) keeps its groups in the mesh and in its copy for each group of parameters, and can reset what
an interrupted pass has left. DTensors have no groups of their own: they use those of their mesh, which is often derived
from another mesh (a slice, or two joined axes) and has the names of that mesh's groups.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


def reset_interrupted_pass(root: nn.Module) -> None:
    """Discard the pass under way: gradients, gathered parameters, and data in transfer; local."""
    if not hasattr(root, "reset_iter_state"):  # exists since torch 2.13, which callers check
        return
    if cast(Any, root)._get_fsdp_state()._is_root is None:  # no pass has reached fully_shard yet
        return
    for _ in root.modules():
        try:
            cast(FSDPModule, root).reset_iter_state()
            break
        except RuntimeError:  # parameters of one group were in transfer from a peer that has ended
            for group in _iter_parameter_groups(root):
                group._all_gather_result = None
    for group in _iter_parameter_groups(root):
        group.reduce_grads = group.all_reduce_grads = True
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def replace_mesh_groups(meshes: Iterable[tuple[DeviceMesh, DeviceMesh]]) -> None:
    """Replace the process groups of meshes, and of all meshes derived from them; local.

    Args:
        meshes: pairs of meshes. The first has groups that have ended, and is changed in place, since DTensors and
            modules refer to it. The second has the same shape, live groups, and the same axes flattened.
    """
    renamed: dict[int, dict[Any, Any]] = {}
    for held, new in meshes:
        names: dict[Any, Any] = dict(zip(held._dim_group_names, new._dim_group_names, strict=True))
        for axis, flat in held._flatten_mapping.items():
            names |= zip(flat._dim_group_names, new._flatten_mapping[axis]._dim_group_names, strict=True)
        renamed[id(held)] = names
        held._pg_registry = new._pg_registry
    # Changed in place, as their users cannot be listed: parameters, fully_shard, optimizer states, DTensor's cache.
    for each in gc.get_objects():
        if type(each) is DeviceMesh and id(each._get_root_mesh()) in renamed:
            names = renamed[id(each._get_root_mesh())]
            each._dim_group_names = [names[name] for name in each._dim_group_names]


def apply_mesh_groups(root: nn.Module) -> None:
    """Use the present process groups of the meshes; local.

    Args:
        root: a sharded module.
    """
    for group in _iter_parameter_groups(root):
        for info in {id(info): info for info in (group.mesh_info, group.post_forward_mesh_info)}.values():
            if info is not None:
                info.__post_init__()


def _iter_parameter_groups(root: nn.Module) -> Iterator[Any]:
    """Yield fully_shard's object for each group of parameters."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield from cast(Any, module)._get_fsdp_state()._fsdp_param_groups
