"""Sum of the state in a snapshot, which a resume compares with that of the state it has loaded.

Digests show that the files are unchanged since they were written. The sum shows that model and optimizer have the
values that
they had when the snapshot was made, however the state was divided then and is divided now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import torch

from dtctl.runtime.bits import MODULUS, sum_tensor_part, weigh_name
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.format import headers, layout, packing
from dtctl.runtime.snapshot.format.pieces import Key, PieceAssignment, extract_local_pieces
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.storage.staging import StagedState

FACT: Final = "state_sum"
"""Key of the sum in a manifest."""
PARTS: Final = ("model", "optimizer", "ema")
"""Parts whose tensors are summed; the other parts differ between workers, or have no tensors."""


def sum_staged(staged: StagedState) -> int:
    """Return the sum over the tensors that a worker is about to write.

    The sums of all workers add up to that of the state.
    """
    total = 0
    for file in staged.files:
        part = layout.parse_piece_name(f"{file.name}{layout.PART_SUFFIX}") or file.name
        total += _sum_part_tensors(
            part, file.outline, [packing.view_slot_tensor(file.data, slot) for slot in file.outline.slots]
        )
    return total % MODULUS


@contextmanager
def start_state_sum(staged: StagedState) -> Iterator[Future[int]]:
    """Return a context in which `sum_staged` is computed while the same bytes are written."""
    with ThreadPoolExecutor(1, thread_name_prefix="state-sum") as pool:
        yield pool.submit(sum_staged, staged)


def sum_state(parts: Mapping[str, Any], worker: Worker, firsts: Callable[[Key], bool]) -> int:
    """Return the sum over the state that all workers have; collective.

    Args:
        parts: this worker's part of the state, by part.
        worker: this worker.
        firsts: returns True for keys that may differ between workers, so that the first worker's value counts.
    """
    mine = PieceAssignment(worker, firsts).select_own_pieces(
        extract_local_pieces({name: parts[name] for name in PARTS if name in parts})
    )
    own = sum(_sum_part_tensors(part, *packing.build_part_outline(tree)) for part, tree in mine.items())
    total: int = sum(gather_json(own, worker)) % MODULUS
    return total


def format_sum(total: int) -> str:
    """Return a sum as text for a manifest, since not every JSON parser has integers of 64 bits."""
    return f"{total:016x}"


def _sum_part_tensors(part: str, outline: packing.PartOutline, tensors: Sequence[torch.Tensor]) -> int:
    if part not in PARTS:
        return 0
    held = dict(zip((slot.name for slot in outline.slots), tensors, strict=True))
    total = 0
    for path, leaf in _find_tensors(outline.tree, part):
        tensor = held[leaf[headers.TENSOR]]
        of = leaf.get(headers.OF, {"shape": tensor.shape, "offset": (0,) * tensor.dim()})
        total += weigh_name(path) * sum_tensor_part(tensor, of["shape"], of["offset"])
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
