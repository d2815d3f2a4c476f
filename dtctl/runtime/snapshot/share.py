"""Giving a tree of tensors to all workers: only the first one's disk has it. No pickle on the way."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from dtctl.runtime.snapshot.state import raw
from dtctl.runtime.worker import Worker

_TENSOR = "$tensor"


def share(tree: Any, worker: Worker) -> Any:
    """Rank 0's tree on every worker: tensors bit for bit and on the CPU, tuples as lists, all else as JSON knows it.

    Args:
        tree: on rank 0; ignored elsewhere.
        worker: this worker; alone, it gets its tree back.
    """
    if worker.backend is None:
        return tree
    found: list[torch.Tensor] = []
    if worker.is_first:
        outline = skeleton(tree, found)
        shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in found]
        _send(json.dumps({"skeleton": outline, "tensors": shapes}).encode())
    else:
        header = json.loads(_receive())
        outline = header["skeleton"]
        found = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in header["tensors"]]
    for tensor in found:
        if tensor.numel():
            dist.broadcast(raw(tensor), src=0)
    return tree if worker.is_first else filled(outline, found)


def _send(text: bytes) -> None:
    dist.broadcast(torch.tensor([len(text)]), src=0)
    dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), src=0)


def _receive() -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, src=0)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, src=0)
    return text.numpy().tobytes()


def send(text: bytes, rank: int) -> None:
    """Give bytes, at least one, to one worker, who calls `receive`."""
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
    """The tree with every tensor replaced by its number in `found`."""
    if isinstance(tree, torch.Tensor):
        found.append(tree)
        return {_TENSOR: len(found) - 1}
    if isinstance(tree, dict):
        return {key: skeleton(value, found) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [skeleton(value, found) for value in tree]
    return tree


def filled(skeleton: Any, found: list[torch.Tensor]) -> Any:
    """The tree of a `skeleton`, with its tensors in their places."""
    if isinstance(skeleton, dict):
        if skeleton.keys() == {_TENSOR}:
            return found[skeleton[_TENSOR]]
        return {key: filled(value, found) for key, value in skeleton.items()}
    if isinstance(skeleton, list):
        return [filled(value, found) for value in skeleton]
    return skeleton
