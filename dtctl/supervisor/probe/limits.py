"""Limits of the kernel for a process of this login: cores, memory, processes, ports. Stdlib only, Python 3.8."""

from __future__ import annotations

import os
import resource

from dtctl import node_facts

_RLIMITS = ("nofile", "memlock", "as", "fsize", "cpu", "nproc")
MANY_PORTS = 2048
UNLIMITED = 1 << 60
"""Bytes from which a limit counts as none: version 1 of control groups writes a little less than 2**63 for no limit."""


def gather_process_limits() -> dict:  # type: ignore[type-arg]
    """Return `limits` (soft and hard), and the resources that the control groups leave to this process."""
    return {
        "limits": {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper())) for name in _RLIMITS},
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine_cpus": os.cpu_count() or 0,
        "cpu_quota": node_facts.read_cpu_quota(),
        "memory_limit": int(_find_smallest_limit("memory", _read_memory_limit)),
        "memory_free": _read_meminfo_bytes("MemAvailable"),
        "pids_free": int(_find_smallest_limit("pids", _read_free_pids)),
        "ports": _read_port_range(),
    }


def read_ephemeral_ports() -> list:  # type: ignore[type-arg]
    """Return the first and last port that the kernel assigns; empty if these ports are few, so that each is needed."""
    ports = _read_port_range()
    return ports if len(ports) == 2 and ports[1] - ports[0] >= MANY_PORTS else []


def _read_port_range() -> list:  # type: ignore[type-arg]
    return [int(word) for word in node_facts.read_system_file("/proc/sys/net/ipv4/ip_local_port_range").split()[:2]]


def _find_smallest_limit(controller: str, limit_of) -> float:  # type: ignore[no-untyped-def]
    """Return the smallest limit from this process's control group up to the root; -1 without any."""
    limits = [
        limit for folder in node_facts.list_control_groups(controller) for limit in [limit_of(folder)] if limit >= 0
    ]
    return min(limits) if limits else -1


def _read_cgroup_number(folder: str, *names: str) -> int:
    for name in names:
        text = node_facts.read_system_file(os.path.join(folder, name)).strip()
        if text.lstrip("-").isdigit():
            return int(text)
    return -1


def _read_memory_limit(folder: str) -> int:
    limit = _read_cgroup_number(folder, "memory.max", "memory.limit_in_bytes")
    return limit if 0 <= limit < UNLIMITED else -1


def _read_free_pids(folder: str) -> int:
    limit = _read_cgroup_number(folder, "pids.max")
    return max(0, limit - max(0, _read_cgroup_number(folder, "pids.current"))) if limit >= 0 else -1


def _read_meminfo_bytes(name: str) -> int:
    for line in node_facts.read_system_file("/proc/meminfo").splitlines():
        words = line.split()
        if words[:1] == [name + ":"] and words[1].isdigit():
            return int(words[1]) * 1024
    return -1
