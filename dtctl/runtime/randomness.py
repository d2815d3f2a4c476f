"""State of every generator that training may draw from, one state per worker, as tensors of fixed size."""

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
from dtctl.runtime.snapshot.state import view_tensor_bytes

State = dict[str, torch.Tensor]
_STRIDE: Final = 0x9E3779B97F4A7C15
_FACTOR: Final = 0xBF58476D1CE4E5B9
_WORD: Final = 2**64 - 1


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, including those of all GPUs."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_rng_states(device: torch.device) -> State:
    """Return the states of the generators of Python, NumPy and torch, without drawing from them."""
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
    """Return the states of the generators of Python, NumPy and torch, for the snapshots of your own loop."""
    return capture_rng_states(torch.device(device))


def load_random_state(state: State, device: torch.device | str = "cpu") -> None:
    """Restore what `random_state` returned; call it last, since constructors may draw random numbers."""
    restore_rng_states({name: tensor.clone() for name, tensor in state.items()}, torch.device(device))


def restore_rng_states(state: State, device: torch.device) -> None:
    """Restore what `capture_rng_states` returned."""
    gauss = float(state["python_gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(state["numpy_gauss"])))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"].numel():
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def preserve_rng_states(device: torch.device, seed: int) -> Iterator[None]:
    """Return a context whose random numbers are the same each time, and which leaves the generators as they were."""
    kept = capture_rng_states(device)
    seed_all(seed)
    try:
        yield
    finally:
        restore_rng_states(kept, device)


def gather_rng_states(worker: Worker, mine: State | None = None) -> State | None:
    """Return the states of all workers, stacked in rank order, on rank 0; None elsewhere.

    Args:
        worker: this worker.
        mine: state of this worker. None: the present state of its generators.
    """
    mine = capture_rng_states(worker.device) if mine is None else mine
    if worker.backend is None:
        return {name: tensor[None] for name, tensor in mine.items()}
    packed = torch.cat([view_tensor_bytes(tensor) for tensor in mine.values()])
    everyone = [torch.empty_like(packed) for _ in range(worker.world_size)] if worker.is_first else None
    dist.gather(packed, everyone, dst=0, group=worker.group)
    if everyone is None:
        return None
    stacked = {}
    sizes = [view_tensor_bytes(tensor).numel() for tensor in mine.values()]
    parts = [torch.split_with_sizes(packed, sizes) for packed in everyone]
    for (name, tensor), columns in zip(mine.items(), zip(*parts, strict=True), strict=True):
        # Copied, since a slice of the pack may not be aligned for a wider type.
        stacked[name] = torch.stack([column.clone().view(tensor.dtype) for column in columns])
    return stacked


def select_rank_state(everyone: State, rank: int) -> State | None:
    """Return one worker's part of a gathered state; None if there were fewer workers when it was made."""
    if rank >= len(everyone["torch"]):
        return None
    return {name: tensor[rank].clone() for name, tensor in everyone.items()}


def seed_worker_generators(seed: int, rank: int, *, step: int = 0) -> None:
    """Seed a worker's generators with a stream that differs from that of any other rank, seed or first step."""
    mixed = np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)
    seed_all(int(mixed[0]))


class StepRandomStream:
    """Random stream of torch's generators that depends on the step of the run, not on earlier draws.

    So a worker that replaces a lost one, or repeats a step, draws the same numbers. Python's and NumPy's generators are
    seeded by the position of the batch (data_loading/reading.py).
    """

    __slots__ = ("_base", "_on_gpu", "_seed")

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        """Make the stream of a worker.

        Args:
            seed: seed of the run.
            rank: rank of the worker.
            device: device of the worker.
        """
        self._base = int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])
        self._seed, self._on_gpu = torch.default_generator.manual_seed, device.type == "cuda"

    def begin(self, step: int) -> None:
        """Seed the generators for the step after `step` others; takes a microsecond."""
        mixed = (self._base + step * _STRIDE) & _WORD  # as in SplitMix64; one round is enough, since few bits are used
        mixed = ((mixed ^ (mixed >> 30)) * _FACTOR & _WORD) >> 32
        self._seed(mixed)
        if self._on_gpu:
            torch.cuda.manual_seed(mixed)
