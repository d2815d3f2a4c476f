"""One training process: which rank it is, on which device, and the process group that it belongs to.

The same script runs as `python train.py` (one worker, no process group), under torchrun, and under dtctl with kind
direct: all three say who a worker is with the same variables.
"""

from __future__ import annotations

import datetime as dt
import faulthandler
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dtctl import names
from dtctl.errors import PlanError, SpecError
from dtctl.runtime import network

ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Set by torchrun: where a worker leaves its exception for the agent's summary."""
TEAR_DOWN_S: Final = 5.0
"""How long a failed worker may spend on leaving its group; its peers may be gone, and NCCL would wait for them."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """This process's place in the job."""

    rank: int
    local_rank: int
    """Position among the workers of this node, from 0."""
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str | None
    """Of the process group; None for a single worker, which has no group."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs and writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every worker is here."""
        if self.backend is not None:
            dist.barrier()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over all workers of a CPU tensor, in place."""
        if self.backend is not None:
            dist.all_reduce(values)
        return values

    def once_per_node(self, action: Callable[[], T]) -> T | None:
        """Run `action` in one worker of each node while the others wait; its result there, None elsewhere.

        For what needs the node's disk: nodes may have no folder in common.
        """
        result = action() if self.local_rank == 0 else None
        self.barrier()
        return result


def identify(environ: Mapping[str, str]) -> Worker:
    """Who this process is, by the variables that a launcher sets; without them a single worker.

    Raises:
        PlanError: the variables are incomplete, are no numbers, contradict each other, or name a GPU that is not there.
    """
    given = {name for name in (names.RANK, names.LOCAL_RANK, names.WORLD_SIZE) if environ.get(name)}
    if given and len(given) < 3:
        absent = sorted({names.RANK, names.LOCAL_RANK, names.WORLD_SIZE} - given)
        raise PlanError(
            f"{', '.join(sorted(given))} set, but not {', '.join(absent)}",
            where="environment of the worker",
            hint="start with torchrun or `dtctl launch`, or with none of them set for a single process",
        )
    rank = _number(environ, names.RANK, 0)
    local_rank = _number(environ, names.LOCAL_RANK, 0)
    world_size = _number(environ, names.WORLD_SIZE, 1)
    local_world_size = _number(environ, names.LOCAL_WORLD_SIZE, 1)
    if not 0 <= rank < world_size or not 0 <= local_rank < world_size:
        raise PlanError(
            f"rank {rank} and local rank {local_rank} do not fit a world of {world_size}",
            where="environment of the worker",
        )
    device = _device(local_rank)
    return Worker(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_number(environ, names.NODE_RANK, 0),
        device=device,
        # The GPU build carries both: collectives on CPU tensors (flags, headers) never wait for the GPU.
        backend=None if world_size == 1 else "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise PlanError(f"{name} is {text!r}, and a number is expected", where="environment of the worker")
    return int(text)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise PlanError(
            f"local rank {local_rank} has no GPU: this node shows {count}",
            where="environment of the worker",
            hint="lower `cluster.slots`, or look at CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", local_rank)


@contextmanager
def start(*, seed: int = 0, timeout_s: float = 600.0) -> Iterator[Worker]:
    """Become a worker: device, seeds, process group; and leave the group at the end, also after an error.

    Variables that workers need to find each other are set if nobody has, each with its reason; see network.py.

    Everything random is seeded alike on all workers, so that they build the same model; the Trainer gives each worker a
    seed of its own once that is done.

    Args:
        seed: of Python's, NumPy's and torch's generators.
        timeout_s: how long a collective waits for the other workers.

    Raises:
        PlanError: the environment does not say who this worker is.
    """
    faulthandler.enable()
    worker = identify(os.environ)
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
    seed_all(seed)
    if worker.backend is not None:
        network.apply(worker, os.environ)
        dist.init_process_group(
            worker.backend,
            timeout=dt.timedelta(seconds=timeout_s),
            device_id=worker.device if worker.device.type == "cuda" else None,
        )
    try:
        yield worker
        # Nobody leaves before all are through: rank 0 may hold the store, and a peer its last message.
        worker.barrier()
    except BaseException as exc:
        if isinstance(exc, Exception):
            record_failure(exc)
            if not isinstance(exc, PlanError | SpecError):
                network.record(worker)
        leave(within_s=TEAR_DOWN_S)
        raise
    leave()


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (those of all GPUs too)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def leave(*, within_s: float | None = None) -> None:
    """Leave the process group, if there is one; with a limit, give up after that many seconds instead of hanging."""
    if not dist.is_initialized():
        return
    if within_s is None:
        dist.destroy_process_group()
        _let_gloo_finish()
        return
    parting = threading.Thread(target=dist.destroy_process_group, daemon=True)
    parting.start()
    parting.join(within_s)


def _let_gloo_finish() -> None:
    """Give gloo's threads the interpreter's lock for a moment.

    They let go of a tensor only after the main thread was told of the result, and need the lock for it; if the
    interpreter is ending by then, the process aborts. Seen with torch 2.13 at 8 of 25 ends of 3 workers on 2 cores, and
    at none of 95 with this. Short naps rather than a long one: each ends only after threads that waited longer had
    their turn.
    """
    for _ in range(10):
        time.sleep(0.005)


def record_failure(error: BaseException) -> None:
    """Leave the exception where torchrun looks for it, so that its summary names the first failure."""
    if os.environ.get(ERROR_FILE):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
