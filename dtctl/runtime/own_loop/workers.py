"""Worker of a program that has made its process group itself."""

from __future__ import annotations

import atexit
import datetime as dt
import os
import socket
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from dtctl import names, node_facts
from dtctl.errors import PlanError
from dtctl.runtime.distributed import network
from dtctl.runtime.distributed.process_group import keep_gloo_groups, let_gloo_finish
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.json_collectives import gather_json


def join_own_group(model: nn.Module, *, timeout_s: float) -> Worker:
    """Return this process's position among the workers of the default process group; collective over all workers.

    The worker gets a separate group for CPU tensors, since the default group may have NCCL only.

    Args:
        model: the model that is trained here; its device is the worker's.
        timeout_s: seconds that an exchange waits for the other workers.

    Raises:
        PlanError: there are several workers, and no process group.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    alone = Worker(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, device=device, backend=None
    )  # fmt: skip
    if world_size == 1:
        started = os.environ.get(names.WORLD_SIZE) or "1"
        if not dist.is_initialized() and started != "1":
            raise PlanError(
                f"{started} workers were started, and this one has no process group",
                where="dtctl.runtime.session",
                hint="call torch.distributed.init_process_group() before the session begins",
            )
        return alone
    rank = dist.get_rank()
    on_node = int(os.environ.get(names.LOCAL_WORLD_SIZE) or world_size)
    worker = replace(alone, rank=rank, world_size=world_size, local_world_size=on_node)
    # Only gloo's variables are set: NCCL has read its variables when the program made its group.
    network.set_network_variables(replace(worker, device=torch.device("cpu"), backend="gloo"), os.environ)
    group = dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=timeout_s))
    keep_gloo_groups()
    atexit.register(let_gloo_finish)  # the program leaves its group itself, maybe right before the interpreter's end
    worker = replace(worker, backend="gloo", group=group)
    numbers = [os.environ.get(name, "") for name in (names.LOCAL_RANK, names.LOCAL_WORLD_SIZE, names.GROUP_RANK)]
    nodes = gather_json([numbers[2] or _identify_node(), all(number.isdecimal() for number in numbers)], worker)
    if all(is_told for _, is_told in nodes):
        local_rank, on_node, node_rank = map(int, numbers)
        return replace(worker, local_rank=local_rank, local_world_size=on_node, node_rank=node_rank)
    places = [place for place, _ in nodes]
    ranks = [other for other, place in enumerate(places) if place == places[rank]]
    node_rank = list(dict.fromkeys(places)).index(places[rank])
    return replace(worker, local_rank=ranks.index(rank), local_world_size=len(ranks), node_rank=node_rank)


def _identify_node() -> str:
    try:
        boot = node_facts.read_boot_id()
    except OSError:
        boot = ""
    # Containers on one machine have the same boot id, but different folders.
    return f"{socket.gethostname()} {boot}"
