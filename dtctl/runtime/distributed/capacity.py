"""Memory that each worker can use, the same at each start: it does not depend on the memory that is free then."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dtctl.runtime.distributed.worker import Worker


def compute_worker_capacity(worker: Worker) -> int:
    """Return the bytes of a worker's GPU, or its share of the node's memory."""
    if worker.device.type == "cuda":
        return int(torch.cuda.get_device_properties(worker.device).total_memory)
    return compute_node_memory_bytes() // worker.local_world_size


def compute_node_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of this machine's memory, or of the limit that control groups set for this process.

    Args:
        root: folder that contains `proc` and `sys`.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _list_cgroup_limit_files(root):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():  # a group without a limit has the text `max`
            limits.append(int(text))
    return min(limits)


def _list_cgroup_limit_files(root: Path) -> list[Path]:
    """Return files that may hold a limit, of this process's control group and all above it.

    They have different names in the two versions of control groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # the system is not Linux
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
