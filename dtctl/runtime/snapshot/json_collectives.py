"""Exchange between workers besides tensors: JSON, no pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker

_TENSOR = "$tensor"


def gathered_json(value: Any, worker: Worker, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Everyone's value, in the order of ranks, on every worker; collective.

    Args:
        value: JSON.
        worker: this worker; alone, it gets what it gave.
        group: of all workers. None: the usual one.
    """
    text = json.dumps(value).encode()
    if worker.backend is None:
        return [json.loads(text)]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(worker.world_size)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(worker.world_size)]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(text.numpy().tobytes()) for text in texts]


def spread_json(value: Any, worker: Worker, source: int) -> Any:
    """Return one worker's value, JSON, on every worker; collective."""
    if worker.backend is None:
        return value
    text = json.dumps(value).encode() if worker.rank == source else b""
    length = torch.tensor([len(text)])
    dist.broadcast(length, src=source)
    packed = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
    dist.broadcast(packed, src=source)
    return json.loads(packed.numpy().tobytes())


def send(text: bytes, rank: int) -> None:
    """Send bytes, at least one, to one worker, which calls `receive`."""
    dist.send(torch.tensor([len(text)]), dst=rank)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), dst=rank)


def receive(rank: int) -> bytes:
    """Take the bytes that one worker sends."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src=rank)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(text, src=rank)
    return text.numpy().tobytes()


def skeleton(tree: Any, found: list[torch.Tensor]) -> Any:
    """Return the tree with every tensor replaced by its number in `found`."""
    if isinstance(tree, torch.Tensor):
        found.append(tree)
        return {_TENSOR: len(found) - 1}
    if isinstance(tree, dict):
        return {key: skeleton(value, found) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [skeleton(value, found) for value in tree]
    return tree


def filled(skeleton: Any, found: list[torch.Tensor]) -> Any:
    """Return the tree of a `skeleton`, with its tensors in their places."""
    if isinstance(skeleton, dict):
        if skeleton.keys() == {_TENSOR}:
            return found[skeleton[_TENSOR]]
        return {key: filled(value, found) for key, value in skeleton.items()}
    if isinstance(skeleton, list):
        return [filled(value, found) for value in skeleton]
    return skeleton
