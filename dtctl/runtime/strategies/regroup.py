"""A sharded model in new process groups: the shards stay where they are, and nothing is wrapped anew.

fully_shard (torch 2.13) keeps its groups in the mesh and in what it notes of the mesh for each group of parameters, and
resets what an interrupted pass has left. DTensors have no groups of their own: they ask their mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


def interrupt(root: nn.Module) -> None:
    """Forget the pass that is under way: gradients, gathered parameters, what was on its way; local."""
    if not hasattr(root, "reset_iter_state"):  # since torch 2.13; who needs it asks before
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


def join(root: nn.Module, held: DeviceMesh, new: DeviceMesh) -> None:
    """Use the process groups of another mesh from now on; local.

    Args:
        root: a module that is sharded over the mesh.
        held: its mesh, with groups that are gone; changed in place, since every DTensor refers to it.
        new: of the same shape, with groups that are there.
    """
    held._dim_group_names = new._dim_group_names
    held._pg_registry = new._pg_registry
    held._flatten_mapping = new._flatten_mapping
    for group in _groups(root):
        for info in {id(info): info for info in (group.mesh_info, group.post_forward_mesh_info)}.values():
            if info is not None:
                info.__post_init__()


def _groups(root: nn.Module) -> Iterator[Any]:
    """What fully_shard keeps of each group of parameters."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield from cast(Any, module)._get_fsdp_state()._fsdp_param_groups
