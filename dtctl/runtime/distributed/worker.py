"""Training process: its rank, its device, and its process group.

The same script runs as `python train.py` (one worker, no process group), under torchrun, and under dtctl with kind
direct. All three launchers identify a worker by the same variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

import torch
import torch.distributed as dist

from dtctl import names, node_facts
from dtctl.errors import PlanError

if TYPE_CHECKING:
    from dtctl.runtime.live.control import SupervisorLink

T = TypeVar("T")
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Position of this process in the job."""

    rank: int
    local_rank: int
    """Position among the workers of this node, from 0."""
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str | None
    """Backend of the process group; None for a single worker, which has no group, and until a replacement has
    joined."""
    live: SupervisorLink | None = field(default=None, compare=False, repr=False)
    """Control of the replacement of lost peers; None if they are not replaced."""
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    """Process group of all workers for CPU tensors. None: the default group, which `start` makes."""

    @property
    def is_replacement(self) -> bool:
        """Return whether this worker replaces a lost one and has not joined the others yet."""
        return self.live is not None and self.live.newcomer

    def making_groups(self) -> AbstractContextManager[None]:
        """Return the context for making process groups in addition to that of all workers.

        If a peer is lost, waits in these groups end as well.
        """
        return nullcontext() if self.live is None else self.live.making_groups()

    def complete_join(self, backend: str | None) -> None:
        """Set the backend after the group was made; no other attribute of a worker changes."""
        object.__setattr__(self, "backend", backend)

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which logs and writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every worker has arrived.

        The exchange runs on CPUs: NCCL's barrier is a sum on the GPU, and if a peer is late, its watchdog ends the
        process without an exception that could be caught.
        """
        self.sum(torch.zeros(1))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over all workers of a CPU tensor, in place."""
        if self.backend is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def once_per_node(self, action: Callable[[], T]) -> T | None:
        """Run `action` in one worker of each node while the others wait; return its result there, None elsewhere.

        It is meant for work on the node's disk, since nodes may have no shared folder.
        """
        result = action() if self.local_rank == 0 else None
        self.barrier()
        return result


def resolve_worker_from_env(environ: Mapping[str, str]) -> Worker:
    """Return the worker of this process from the variables that a launcher sets; a single worker if there are none.

    Raises:
        PlanError: the variables are incomplete, are not numbers, contradict each other, or name a GPU that does not
            exist.
    """
    given = {name for name in (names.RANK, names.LOCAL_RANK, names.WORLD_SIZE) if environ.get(name)}
    if given and len(given) < 3:
        absent = sorted({names.RANK, names.LOCAL_RANK, names.WORLD_SIZE} - given)
        raise PlanError(
            f"{', '.join(sorted(given))} set, but not {', '.join(absent)}",
            where="environment of the worker",
            hint="start with torchrun or `dtctl launch`, or with none of them set for a single process",
        )
    rank = _parse_env_number(environ, names.RANK, 0)
    local_rank = _parse_env_number(environ, names.LOCAL_RANK, 0)
    world_size = _parse_env_number(environ, names.WORLD_SIZE, 1)
    local_world_size = _parse_env_number(environ, names.LOCAL_WORLD_SIZE, 1)
    if not 0 <= rank < world_size or not 0 <= local_rank < world_size:
        raise PlanError(
            f"rank {rank} and local rank {local_rank} do not fit a world of {world_size}",
            where="environment of the worker",
        )
    device = _choose_worker_device(local_rank, environ)
    # Workers with a GPU have both, so that collectives on CPU tensors (flags, headers) never wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    return Worker(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_parse_env_number(environ, names.GROUP_RANK, 0),
        device=device,
        backend=backend if world_size > 1 else None,
    )


def _parse_env_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise PlanError(f"{name} is {text!r}, and a number is expected", where="environment of the worker")
    return int(text)


def _choose_worker_device(local_rank: int, environ: Mapping[str, str]) -> torch.device:
    shown = environ.get(VISIBLE)
    if not torch.cuda.is_available():
        if node_facts.count_gpus(environ):
            raise PlanError(
                f"this node has GPUs, and torch cannot use them: {_describe_cuda_failure()}",
                where="environment of the worker",
                hint="install a torch for these GPUs and their driver, and look at `dtctl doctor --gpu`; to train on "
                f'the CPU, set {VISIBLE} to "" in `job.env`',
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and local_rank >= 1 and shown and "," not in shown:
        return torch.device("cuda", 0)  # each worker sees only its own GPU, as with srun --gpus-per-task
    if local_rank >= count:
        raise PlanError(
            f"local rank {local_rank} has no GPU: this node shows {count}",
            where="environment of the worker",
            hint="lower `cluster.slots`, or look at CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", local_rank)


def _describe_cuda_failure() -> str:
    """Return the reason in torch's words why CUDA does not start."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as exc:
        return str(exc).strip().partition("\n")[0]
    return "it sees none"
