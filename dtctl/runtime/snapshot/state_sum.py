"""One number for the state in a snapshot, which a resume compares with that of the state it has loaded.

Digests show that the files are those that were written; the sum shows that what was put into model and optimizer is
what was taken from them, however it was divided then and is now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import torch

from dtctl.runtime.bits import MODULUS, sum_part, weigh_name
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.format import headers, layout, packing
from dtctl.runtime.snapshot.format.pieces import Division, Key, local
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.snapshot.storage.staging import Staged

FACT: Final = "state_sum"
"""Key of the sum in a manifest."""
PARTS: Final = ("model", "optimizer", "ema")
"""Parts whose tensors count; the other parts belong to each worker, or have no tensors."""


def sum_staged(staged: Staged) -> int:
    """Return the sum over the tensors that a worker is about to write; those of all workers add up to the state's."""
    total = 0
    for file in staged.files:
        part = layout.part_of_piece(f"{file.name}{layout.PART_SUFFIX}") or file.name
        total += _sum_part(part, file.outline, [packing.view(file.data, slot) for slot in file.outline.slots])
    return total % MODULUS


@contextmanager
def summing(staged: Staged) -> Iterator[Future[int]]:
    """The context in which `sum_staged` is computed beside the writing of the same bytes."""
    with ThreadPoolExecutor(1, thread_name_prefix="state-sum") as pool:
        yield pool.submit(sum_staged, staged)


def sum_state(parts: Mapping[str, Any], worker: Worker, firsts: Callable[[Key], bool]) -> int:
    """Return the sum over the state that all workers have; collective.

    Args:
        parts: what this worker has of it, by part.
        worker: this worker.
        firsts: what may differ between workers, so that the first one's counts.
    """
    mine = Division(worker, firsts).mine(local({name: parts[name] for name in PARTS if name in parts}))
    own = sum(_sum_part(part, *packing.outline(tree)) for part, tree in mine.items())
    total: int = sum(gathered_json(own, worker)) % MODULUS
    return total


def to_fact(total: int) -> str:
    """Return a sum as manifests have it: text, since not every reader of JSON has integers of 64 bits."""
    return f"{total:016x}"


def _sum_part(part: str, outline: packing.Outline, tensors: Sequence[torch.Tensor]) -> int:
    if part not in PARTS:
        return 0
    held = dict(zip((slot.name for slot in outline.slots), tensors, strict=True))
    total = 0
    for path, leaf in _find_tensors(outline.tree, part):
        tensor = held[leaf[headers.TENSOR]]
        of = leaf.get(headers.OF, {"shape": tensor.shape, "offset": (0,) * tensor.dim()})
        total += weigh_name(path) * sum_part(tensor, of["shape"], of["offset"])
    return total


def _find_tensors(tree: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(tree, Mapping):
        if headers.TENSOR in tree:
            yield path, tree
            return
        for key, value in tree.items():
            yield from _find_tensors(value, f"{path}\0{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _find_tensors(value, f"{path}\0{index}")
