"""Entry and exit of the process group of all workers; a training process uses no others."""

from __future__ import annotations

import ctypes
import datetime as dt
import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dtctl import names
from dtctl.errors import PlanError, SpecError
from dtctl.runtime import determinism
from dtctl.runtime.distributed import affinity, network
from dtctl.runtime.distributed.worker import Worker, resolve_worker_from_env
from dtctl.runtime.live.control import SupervisorLink
from dtctl.runtime.randomness import seed_all

DEVICE_KEY: Final = "dtctl/device"
KINDS: Final = {"cpu": "CPU", "cuda": "GPU"}
_KEPT: Final[list[dist.ProcessGroup]] = []
TEAR_DOWN_S: Final = 5.0
"""Seconds that a failed worker may take to leave its group; its peers may have ended, and NCCL would wait for them."""


@contextmanager
def start(
    *, seed: int = 0, timeout_s: float = 600.0, deterministic: bool = False, bind_cores: bool = False
) -> Iterator[Worker]:
    """Set up this process as a worker: device, seeds, process group; leave the group at the end, also after an error.

    Variables that workers need to find each other are set if they are missing; see network.py.

    All random generators have the same seed on all workers, so that they build the same model. After that the Trainer
    gives each worker a seed of its own.

    Args:
        seed: seed of Python's, NumPy's and torch's generators.
        timeout_s: seconds that a collective waits for the other workers.
        deterministic: True if kernels must give the same bits each time; see determinism.py.
        bind_cores: True if this process stays on the cores near its GPU.

    Raises:
        PlanError: the environment does not identify this worker.
    """
    faulthandler.enable()
    if deterministic:  # must come before CUDA is initialized
        determinism.use_deterministic_kernels()
    worker = resolve_worker_from_env(os.environ)
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
        if bind_cores:  # must come before threads are started, since they inherit the binding
            affinity.bind_process_to_cores(affinity.find_cores_near_gpu(worker.device))
    seed_all(seed)
    if worker.backend is not None:
        network.set_network_variables(worker, os.environ)
        live = SupervisorLink.build_from_environ(os.environ, worker.rank, worker.world_size)
        worker = replace(worker, live=live, backend=None if live is not None and live.newcomer else worker.backend)
    if worker.backend is not None:
        if worker.live is not None:
            worker.live.joining()
        limit = dt.timedelta(seconds=timeout_s)
        shared, _, _ = next(rendezvous("env://", worker.rank, worker.world_size, timeout=limit))
        require_same_device(shared, worker)
        dist.init_process_group(
            worker.backend,
            timeout=limit,
            store=PrefixStore("default_pg", shared),
            rank=worker.rank,
            world_size=worker.world_size,
            device_id=worker.device if _can_be_bound(worker.backend) else None,
        )
        del shared  # the sockets of the store belong to the group
        if worker.live is not None:
            worker.live.is_joined()
    try:
        yield worker
        # No worker leaves before all have finished: rank 0 may host the store, and a peer may wait for a last message.
        worker.barrier()
    except BaseException as exc:
        if isinstance(exc, Exception):
            record_failure(exc)
            if not isinstance(exc, PlanError | SpecError):
                network.write_flight_record(worker)
        leave_process_group(within_s=TEAR_DOWN_S)
        raise
    leave_process_group()


def require_same_device(shared: Store, worker: Worker) -> None:
    """Refuse a worker on another kind of device than rank 0's, since gloo would wait for NCCL forever.

    Args:
        shared: store that all workers can read.
        worker: this worker.

    Raises:
        PlanError: the worker has another kind of device.
    """
    if worker.is_first:
        shared.set(DEVICE_KEY, worker.device.type)
        return
    first = shared.get(DEVICE_KEY).decode()
    if first != worker.device.type:
        raise PlanError(
            f"rank {worker.rank} computes on the {KINDS[worker.device.type]}, and rank 0 on the {KINDS[first]}",
            where="environment of the worker",
            hint="`dtctl doctor --gpu` names the node that has no GPU, or whose driver does not answer",
        )


def _can_be_bound(backend: str) -> bool:
    """Return whether groups can be bound to a GPU; older torch cannot split such groups (pytorch#159200)."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return "nccl" in backend and release >= (2, 13)


def leave_process_group(*, within_s: float | None = None) -> None:
    """Leave the process group, if there is one; with `within_s`, give up after that many seconds instead of hanging."""
    if not dist.is_initialized():
        return
    keep_gloo_groups()
    if within_s is None:
        dist.destroy_process_group()
        let_gloo_finish()
        return
    # NCCL's groups are aborted, since destroying them waits for peers that have ended.
    gpu = "nccl" in str(dist.get_backend_config())
    part = dist.distributed_c10d._abort_process_group if gpu else dist.destroy_process_group
    parting = threading.Thread(target=part, daemon=True)
    parting.start()
    parting.join(within_s)


def keep_gloo_groups() -> None:
    """Keep each of gloo's groups until the process ends, whoever leaves it.

    DDP's reducer has the last reference to a group if the model outlives it. Its destructor then waits for gloo's
    threads with the interpreter's lock held, and a thread that still releases a tensor needs this lock: the process
    never ends. Seen with torch 2.13 at 8 of 1,500 ends of 3 workers on 2 cores; related: pytorch#56297.
    """
    if not dist.is_initialized():
        return
    for group in dist.distributed_c10d._world.pg_map:
        if "gloo" in str(dist.get_backend_config(group)) and group not in _KEPT:
            _KEPT.append(group)
            # Not released by the interpreter's end either, which would wait for a message of a peer that has ended.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def let_gloo_finish() -> None:
    """Release the interpreter's lock for gloo's threads for a moment, before the interpreter shuts down.

    These threads release a tensor only after the main thread has received the result, and need the lock for that. If
    the interpreter is already shutting down, the process aborts. Seen with torch 2.13 at 8 of 25 ends of 3 workers on
    2 cores, and at none of 95 with this function. It sleeps several times for a short time: each sleep ends only after
    the threads that waited longer have had the lock.
    """
    for _ in range(10):
        time.sleep(0.005)


def record_failure(error: BaseException) -> None:
    """Write the exception to the file that torchrun reads, so that its summary names the first failure."""
    if os.environ.get(names.ERROR_FILE):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
