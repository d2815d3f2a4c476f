"""Memory that each worker has for itself; never what is free right now, so that it is the same at each start."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dtctl.runtime.distributed.worker import Worker


def of_worker(worker: Worker) -> int:
    """Return the bytes of a worker's GPU, or its share of the node's memory."""
    if worker.device.type == "cuda":
        return int(torch.cuda.get_device_properties(worker.device).total_memory)
    return of_node() // worker.local_world_size


def of_node(root: Path = Path("/")) -> int:
    """Return the bytes of this machine, or of what its control groups let this process have.

    Args:
        root: where `proc` and `sys` are.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _limits(root):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():  # or `max`
            limits.append(int(text))
    return min(limits)


def _limits(root: Path) -> list[Path]:
    """Files that may hold a limit: of the group of this process and of all above it, in both versions of the kernel."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    paths = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, name = rest.partition(":")
        if not colon or (controllers and "memory" not in controllers.split(",")):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        group = top / name.lstrip("/")
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        paths += [folder / file for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return paths
