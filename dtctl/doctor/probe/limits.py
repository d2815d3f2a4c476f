"""What the kernel lets a process of this login have: cores, memory, processes, ports. Stdlib only, Python 3.8."""

from __future__ import annotations

import os
import resource

from dtctl import node_facts

_RLIMITS = ("nofile", "memlock", "as", "fsize", "cpu", "nproc")
UNLIMITED = 1 << 60
"""Bytes; what version 1 of control groups writes for no limit is a little less than 2**63."""


def limits() -> dict:  # type: ignore[type-arg]
    """`limits` (soft and hard), and what the control groups of this process leave it."""
    return {
        "limits": {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper())) for name in _RLIMITS},
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine_cpus": os.cpu_count() or 0,
        "cpu_quota": _least("cpu", _quota),
        "memory_limit": int(_least("memory", _memory)),
        "memory_free": _meminfo("MemAvailable"),
        "pids_free": int(_least("pids", _pids)),
        "ports": [int(word) for word in node_facts.read("/proc/sys/net/ipv4/ip_local_port_range").split()[:2]],
    }


def _least(controller: str, limit_of) -> float:  # type: ignore[no-untyped-def]
    """The smallest limit from this process's control group up to the root; -1 without any."""
    found = [limit for folder in _groups(controller) for limit in [limit_of(folder)] if limit >= 0]
    return min(found) if found else -1


def _groups(controller: str) -> list:  # type: ignore[type-arg]
    """Folders of the control groups that hold this process, innermost first, of both versions."""
    found = []
    for line in node_facts.read("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            roots = ["/sys/fs/cgroup/" + controller, "/sys/fs/cgroup/" + names]
        else:
            continue
        # In a container the path may be that of the machine outside, and the group itself lies at the root.
        parts = path.strip("/").split("/") if path.strip("/") else []
        for root in roots:
            found += [os.path.join(root, *parts[:count]) for count in range(len(parts), -1, -1)]
    return found


def _number(folder: str, *names: str) -> int:
    for name in names:
        text = node_facts.read(os.path.join(folder, name)).strip()
        if text.lstrip("-").isdigit():
            return int(text)
    return -1


def _memory(folder: str) -> int:
    limit = _number(folder, "memory.max", "memory.limit_in_bytes")
    return limit if 0 <= limit < UNLIMITED else -1


def _pids(folder: str) -> int:
    limit = _number(folder, "pids.max")
    return max(0, limit - max(0, _number(folder, "pids.current"))) if limit >= 0 else -1


def _quota(folder: str) -> float:
    words = node_facts.read(os.path.join(folder, "cpu.max")).split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = _number(folder, "cpu.cfs_quota_us"), _number(folder, "cpu.cfs_period_us")
    return quota / period if quota > 0 and period > 0 else -1


def _meminfo(name: str) -> int:
    for line in node_facts.read("/proc/meminfo").splitlines():
        words = line.split()
        if words[:1] == [name + ":"] and words[1].isdigit():
            return int(words[1]) * 1024
    return -1
