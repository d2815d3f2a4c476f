"""Exchange of JSON between workers, without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker

_TENSOR = "$tensor"


def gather_json(value: Any, worker: Worker, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all workers, in the order of ranks, on every worker; collective.

    Args:
        value: JSON.
        worker: this worker; if there is only one worker, the result has only its value.
        group: process group of all workers. None: the worker's.
    """
    text = json.dumps(value).encode()
    if worker.backend is None:
        return [json.loads(text)]
    group = group or worker.group
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(worker.world_size)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(worker.world_size)]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(text.numpy().tobytes()) for text in texts]


def spread_json(value: Any, worker: Worker, source: int) -> Any:
    """Return one worker's JSON value on every worker; collective."""
    if worker.backend is None:
        return value
    text = json.dumps(value).encode() if worker.rank == source else b""
    length = torch.tensor([len(text)])
    dist.broadcast(length, src=source, group=worker.group)
    packed = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
    dist.broadcast(packed, src=source, group=worker.group)
    return json.loads(packed.numpy().tobytes())


def send_bytes_to_rank(text: bytes, rank: int, group: dist.ProcessGroup | None = None) -> None:
    """Send one or more bytes to a worker, which calls `receive_bytes_from_rank`."""
    dist.send(torch.tensor([len(text)]), dst=rank, group=group)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), dst=rank, group=group)


def receive_bytes_from_rank(rank: int, group: dist.ProcessGroup | None = None) -> bytes:
    """Return the bytes that a worker sends with `send_bytes_to_rank`."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src=rank, group=group)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(text, src=rank, group=group)
    return text.numpy().tobytes()


def split_tree_tensors(tree: Any, found: list[torch.Tensor]) -> Any:
    """Return the tree with every tensor replaced by its number in `found`."""
    if isinstance(tree, torch.Tensor):
        found.append(tree)
        return {_TENSOR: len(found) - 1}
    if isinstance(tree, dict):
        return {key: split_tree_tensors(value, found) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [split_tree_tensors(value, found) for value in tree]
    return tree


def merge_tree_tensors(skeleton: Any, found: list[torch.Tensor]) -> Any:
    """Return a tree from `split_tree_tensors` with its tensors put back."""
    if isinstance(skeleton, dict):
        if skeleton.keys() == {_TENSOR}:
            return found[skeleton[_TENSOR]]
        return {key: merge_tree_tensors(value, found) for key, value in skeleton.items()}
    if isinstance(skeleton, list):
        return [merge_tree_tensors(value, found) for value in skeleton]
    return skeleton
