r"""Diagnosis of a run that does not learn, or learns too slowly; the functions work in any training loop.

    print("\n".join(diagnose.find_misplaced_tensors(model)))
    loss.backward()
    print("\n".join(diagnose.find_parameters_without_grad(model)))
    print("\n".join(diagnose.find_differing_gradients(model) + diagnose.find_differing_parameters(model)))

Functions that compare workers are collective: every worker calls them, and gets the same result. Without a process
group they find nothing. An empty list means that no problem was found.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

Named = Iterable[tuple[str, torch.Tensor]]


def find_misplaced_tensors(model: nn.Module, batch: object = None) -> list[str]:
    """Return tensors on another device than most of the model, and a model on the CPU next to GPUs, a phrase each.

    Args:
        model: any module.
        batch: tensors in tuples, lists and dicts with which the model is called.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if not tensors:
        return []
    usual, _ = Counter(tensor.device for _, tensor in tensors).most_common(1)[0]
    problems = [f"{name} is on {tensor.device}, and most of the model on {usual}" for name, tensor in tensors
             if tensor.device != usual]  # fmt: skip
    problems += [
        f"{path} of the batch is on {tensor.device}, and the model on {usual}"
        for path, tensor in _list_tensor_leaves(batch, "[]")
        if tensor.device != usual
    ]
    if usual.type == "cpu" and torch.cuda.is_available():
        problems.append(f"the model is on the CPU, and there are {torch.cuda.device_count()} GPUs")
    return problems


def find_parameters_without_grad(model: nn.Module) -> list[str]:
    """Return parameters that require a gradient and have none after a backward pass.

    DDP would wait forever for such a gradient.
    """
    return [
        f"{name} was not used in the forward pass, or does not contribute to the loss"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]


def find_differing_gradients(model: nn.Module) -> list[str]:
    """Return the parameters whose gradients differ between workers after a backward pass; collective.

    Sharded parameters are left out, since every worker has a different part of them.
    """
    return _compare_tensor_checksums(
        "gradient",
        [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None],
        [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    )


def find_differing_parameters(model: nn.Module) -> list[str]:
    """Return parameters and buffers that differ between workers, except sharded ones; collective."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return _compare_tensor_checksums("value", tensors, [name for name, _ in tensors])


def _compare_tensor_checksums(what: str, tensors: Named, all_names: list[str]) -> list[str]:
    """Compare a checksum of each tensor over all workers; a missing tensor counts as another value."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    sums = dict.fromkeys(all_names, -1)
    for name, tensor in tensors:
        sums[name] = 0 if hasattr(tensor, "to_local") else _compute_tensor_checksum(tensor)
    mine = torch.tensor(list(sums.values()), dtype=torch.int64)
    if dist.get_backend() == "nccl":
        mine = mine.cuda()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone).cpu()
    problems = []
    for index, name in enumerate(sums):
        column = table[:, index].tolist()
        usual, _ = Counter(column).most_common(1)[0]
        others = [rank for rank, value in enumerate(column) if value != usual]
        if others:
            missing = [rank for rank in range(len(column)) if column[rank] == -1]
            detail = (
                f"none on rank {_join_rank_numbers(missing)}"
                if missing
                else f"rank {_join_rank_numbers(others)} differs from most"
            )
            problems.append(f"the {what} of {name} is not the same on all workers: {detail}")
    return problems


def _compute_tensor_checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def _join_rank_numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _list_tensor_leaves(tree: object, path: str) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _list_tensor_leaves(value, f"{path.removesuffix('[]')}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from _list_tensor_leaves(value, f"{path.removesuffix('[]')}[{index}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Cost of the exchange of gradients."""

    with_s: float
    """Median seconds of a step's passes with exchange."""
    without_s: float
    """Median seconds of a step's passes without exchange."""

    @property
    def share(self) -> float:
        """Return the share of the passes' time for exchange that computation does not hide."""
        return max(0.0, 1 - self.without_s / self.with_s)

    def describe(self) -> str:
        """Return the cost as a sentence."""
        return (
            f"communication is {self.share:.0%} of a step's passes: {self.with_s * 1e3:.2f} ms with exchange of "
            f"gradients, {self.without_s * 1e3:.2f} ms without"
        )


def measure_gradient_exchange(passes: Callable[[], object], module: nn.Module, *, pairs: int = 5) -> Communication:
    """Measure a step's passes with and without exchange of gradients, alternately; collective.

    Profilers count collectives that wait for a slow peer or overlap with computation as communication. The time that is
    saved without collectives is their actual cost.

    Args:
        passes: runs the forward and backward passes of a step on `module`; the gradients are not cleared.
        module: the model as DDP wraps it; a module without `no_sync` exchanges nothing.
        pairs: number of measurements of each kind; one more runs first and is not counted.
    """
    no_sync: Callable[[], AbstractContextManager[None]] = getattr(module, "no_sync", nullcontext)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs + 1):
        for exchange in (True, False):
            _synchronize_workers()
            began_s = time.perf_counter()
            with nullcontext() if exchange else no_sync():
                passes()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                times_s[exchange].append(time.perf_counter() - began_s)
    return Communication(with_s=statistics.median(times_s[True]), without_s=statistics.median(times_s[False]))


def _synchronize_workers() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
