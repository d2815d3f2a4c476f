"""State that is spread over workers, made whole on rank 0.

So that a snapshot is the same file whatever the strategy, and can be resumed with any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.assembly import one_group_each
from dtctl.runtime.snapshot.json_collectives import filled, gathered_json, receive, send, skeleton
from dtctl.runtime.snapshot.state import raw

Tree = dict[str, Any]


def gathered(entries: Mapping[str, Any], worker: Worker) -> Tree | None:
    """Return the entries of all workers, on rank 0; collective.

    Args:
        entries: name -> tensors and plain values, nested as one likes. Sharded tensors (DTensors) are put together;
            entries that rank 0 has are taken from there, others from the first worker that has them.
        worker: this worker.

    Returns:
        On rank 0 everything, with tensors on the CPU where they had to be moved; None elsewhere.
    """
    mine = {name: _whole(entry) for name, entry in entries.items()}
    if worker.is_first:
        for rank in range(1, worker.world_size):
            theirs = json.loads(receive(rank))
            wanted = [name for name in theirs if name not in mine]
            send(json.dumps(wanted).encode(), rank)
            for name in wanted:
                header = json.loads(receive(rank))
                tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in header["tensors"]]
                for tensor in tensors:
                    if tensor.numel():
                        dist.recv(raw(tensor), src=rank)
                mine[name] = filled(header["skeleton"], tensors)
        return mine
    # None stands for a DTensor that another worker of its mesh has as a whole.
    ready = {name: entry for name, entry in mine.items() if entry is not None}
    send(json.dumps(list(ready)).encode(), 0)
    for name in json.loads(receive(0)):
        tensors = []
        header = skeleton(ready[name], tensors)
        shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        send(json.dumps({"skeleton": header, "tensors": shapes}).encode(), 0)
        for tensor in tensors:
            if tensor.numel():
                dist.send(raw(tensor), dst=0)
    return None


def gathered_optimizer(tree: Tree, worker: Worker) -> Tree:
    """The optimizer trees (`state.optimizer_tree`) of all workers as one on rank 0, empty elsewhere; collective."""
    states = gathered(tree["state"], worker)
    groups = gathered({f"{worker.rank}.{index}": group for index, group in enumerate(tree["groups"])}, worker)
    on_cpu = gathered_json(tree.get("on_cpu", {}), worker)
    rest = gathered({name: tree[name] for name in ("own", "other") if name in tree}, worker)
    if states is None or groups is None or rest is None:
        return {}
    whole = {**tree, **rest, "state": states, "groups": one_group_each(groups.values())}
    everywhere = {name: values for each in on_cpu for name, values in each.items()}
    return whole | ({"on_cpu": everywhere} if everywhere else {})


def _whole(entry: Any) -> Any:
    """An entry with every DTensor put together; None if it has one and this worker is not the first of its mesh."""
    if hasattr(entry, "full_tensor"):  # a DTensor; to import the class costs every training half a second
        whole = entry.full_tensor()
        first = not any(entry.device_mesh.get_coordinate() or ())
        return whole.cpu() if first else None
    if isinstance(entry, Mapping):
        parts = {key: _whole(value) for key, value in entry.items()}
        gone = any(parts[key] is None and value is not None for key, value in entry.items())
        return None if gone else parts
    if isinstance(entry, list | tuple):
        items = [_whole(value) for value in entry]
        gone = any(item is None and value is not None for item, value in zip(items, entry, strict=True))
        return None if gone else items
    return entry
