"""The state of every generator that training may draw from, one per worker, as tensors of fixed size."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.state import raw

State = dict[str, torch.Tensor]
_STRIDE: Final = 0x9E3779B97F4A7C15
_FACTOR: Final = 0xBF58476D1CE4E5B9
_WORD: Final = 2**64 - 1


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (those of all GPUs too)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture(device: torch.device) -> State:
    """Return the states of Python's, NumPy's and torch's generators; drawing nothing from them."""
    _, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    words_np = [*numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"]]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0, dtype=torch.uint8),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor(words_np, dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy["gauss"]], dtype=torch.float64),
    }


def random_state(device: torch.device | str = "cpu") -> State:
    """The states of Python's, NumPy's and torch's generators, for a loop of one's own to keep in its snapshots."""
    return capture(torch.device(device))


def load_random_state(state: State, device: torch.device | str = "cpu") -> None:
    """Put back what `random_state` returned; call it last, since making things draws random numbers."""
    restore({name: tensor.clone() for name, tensor in state.items()}, torch.device(device))


def restore(state: State, device: torch.device) -> None:
    """Put back what `capture` returned."""
    gauss = float(state["python_gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(state["numpy_gauss"])))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"].numel():
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def preserved(device: torch.device, seed: int) -> Iterator[None]:
    """The context of what draws random numbers of its own, the same each time, and leaves those of training alone."""
    kept = capture(device)
    seed_all(seed)
    try:
        yield
    finally:
        restore(kept, device)


def gather(worker: Worker) -> State | None:
    """Return the states of all workers, stacked in rank order, on rank 0; None elsewhere."""
    mine = capture(worker.device)
    if worker.backend is None:
        return {name: tensor[None] for name, tensor in mine.items()}
    packed = torch.cat([raw(tensor) for tensor in mine.values()])
    everyone = [torch.empty_like(packed) for _ in range(worker.world_size)] if worker.is_first else None
    dist.gather(packed, everyone, dst=0)
    if everyone is None:
        return None
    stacked = {}
    sizes = [raw(tensor).numel() for tensor in mine.values()]
    parts = [torch.split_with_sizes(packed, sizes) for packed in everyone]
    for (name, tensor), columns in zip(mine.items(), zip(*parts, strict=True), strict=True):
        # A copy of its own, since a slice of the pack need not be aligned for a wider type.
        stacked[name] = torch.stack([column.clone().view(tensor.dtype) for column in columns])
    return stacked


def of_rank(everyone: State, rank: int) -> State | None:
    """Return one worker's part of a gathered state; None if there were fewer workers then."""
    if rank >= len(everyone["torch"]):
        return None
    return {name: tensor[rank].clone() for name, tensor in everyone.items()}


def begin(seed: int, rank: int, *, step: int = 0) -> None:
    """Give a worker its own stream, unlike that of any other rank, seed or step it may begin at."""
    mixed = np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)
    seed_all(int(mixed[0]))


class StepStream:
    """Random stream of torch's generators in the steps of a run; it does not depend on earlier draws.

    A worker that replaces a lost one, or repeats a step, thus draws the same numbers again. Python's and NumPy's
    generators are seeded by the position of the batch (data_loading/reading.py).
    """

    __slots__ = ("_base", "_on_gpu", "_seed")

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        """Make the stream of a worker.

        Args:
            seed: of the training.
            rank: of the worker.
            device: of the worker.
        """
        self._base = int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])
        self._seed, self._on_gpu = torch.default_generator.manual_seed, device.type == "cuda"

    def begin(self, step: int) -> None:
        """The step after so many begins; a microsecond."""
        mixed = (self._base + step * _STRIDE) & _WORD  # as in SplitMix64; one round is enough, since few bits are used
        mixed = ((mixed ^ (mixed >> 30)) * _FACTOR & _WORD) >> 32
        self._seed(mixed)
        if self._on_gpu:
            torch.cuda.manual_seed(mixed)
