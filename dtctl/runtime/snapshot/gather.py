"""Gathering of state that is spread over workers on rank 0.

So a snapshot is the same file with every strategy, and any other strategy can resume from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.assembly import drop_repeated_parameters
from dtctl.runtime.snapshot.json_collectives import (
    gather_json,
    merge_tree_tensors,
    receive_bytes_from_rank,
    send_bytes_to_rank,
    split_tree_tensors,
)
from dtctl.runtime.snapshot.state import view_tensor_bytes

Tree = dict[str, Any]


def gather_entries_on_first(entries: Mapping[str, Any], worker: Worker) -> Tree | None:
    """Return the entries of all workers on rank 0; collective.

    Args:
        entries: name -> tensors and plain values, nested in any way. Sharded tensors (DTensors) are put together.
            Entries that rank 0 has are taken from there, others from the first worker that has them.
        worker: this worker.

    Returns:
        On rank 0 all entries, with tensors on the CPU if they had to be moved; None elsewhere.
    """
    mine = {name: _gather_full_tensors(entry) for name, entry in entries.items()}
    if worker.is_first:
        for rank in range(1, worker.world_size):
            theirs = json.loads(receive_bytes_from_rank(rank, worker.group))
            wanted = [name for name in theirs if name not in mine]
            send_bytes_to_rank(json.dumps(wanted).encode(), rank, worker.group)
            for name in wanted:
                header = json.loads(receive_bytes_from_rank(rank, worker.group))
                tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in header["tensors"]]
                for tensor in tensors:
                    if tensor.numel():
                        dist.recv(view_tensor_bytes(tensor), src=rank, group=worker.group)
                mine[name] = merge_tree_tensors(header["skeleton"], tensors)
        return mine
    # None stands for a DTensor that another worker of its mesh gathers.
    ready = {name: entry for name, entry in mine.items() if entry is not None}
    send_bytes_to_rank(json.dumps(list(ready)).encode(), 0, worker.group)
    for name in json.loads(receive_bytes_from_rank(0, worker.group)):
        tensors = []
        header = split_tree_tensors(ready[name], tensors)
        shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        send_bytes_to_rank(json.dumps({"skeleton": header, "tensors": shapes}).encode(), 0, worker.group)
        for tensor in tensors:
            if tensor.numel():
                dist.send(view_tensor_bytes(tensor), dst=0, group=worker.group)
    return None


def gather_optimizer(tree: Tree, worker: Worker) -> Tree:
    """Return the optimizer trees (`state.optimizer_tree`) of all workers as one on rank 0; collective.

    The result is empty on other ranks.
    """
    states = gather_entries_on_first(tree["state"], worker)
    groups = gather_entries_on_first(
        {f"{worker.rank}.{index}": group for index, group in enumerate(tree["groups"])}, worker
    )
    on_cpu = gather_json(tree.get("on_cpu", {}), worker)
    rest = gather_entries_on_first({name: tree[name] for name in ("own", "other") if name in tree}, worker)
    if states is None or groups is None or rest is None:
        return {}
    whole = {**tree, **rest, "state": states, "groups": drop_repeated_parameters(groups.values())}
    everywhere = {name: values for each in on_cpu for name, values in each.items()}
    return whole | ({"on_cpu": everywhere} if everywhere else {})


def _gather_full_tensors(entry: Any) -> Any:
    """Return an entry with all DTensors gathered; None if it has one and this worker is not the first of its mesh."""
    if hasattr(entry, "full_tensor"):  # a DTensor, recognized without its class, whose import costs half a second
        whole = entry.full_tensor()
        first = not any(entry.device_mesh.get_coordinate() or ())
        return whole.cpu() if first else None
    if isinstance(entry, Mapping):
        parts = {key: _gather_full_tensors(value) for key, value in entry.items()}
        gone = any(parts[key] is None and value is not None for key, value in entry.items())
        return None if gone else parts
    if isinstance(entry, list | tuple):
        items = [_gather_full_tensors(value) for value in entry]
        gone = any(item is None and value is not None for item, value in zip(items, entry, strict=True))
        return None if gone else items
    return entry
