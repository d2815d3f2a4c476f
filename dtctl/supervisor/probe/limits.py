"""Limits of the kernel for a process of this login: cores, memory, processes, ports. Stdlib only, Python 3.8."""

from __future__ import annotations

import os
import resource

from dtctl import node_facts

_RLIMITS = ("nofile", "memlock", "as", "fsize", "cpu", "nproc")
MANY_PORTS = 2048
UNLIMITED = 1 << 60
"""Bytes; what version 1 of control groups writes for no limit is a little less than 2**63."""


def limits() -> dict:  # type: ignore[type-arg]
    """`limits` (soft and hard), and what the control groups of this process leave it."""
    return {
        "limits": {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper())) for name in _RLIMITS},
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine_cpus": os.cpu_count() or 0,
        "cpu_quota": node_facts.cpu_quota(),
        "memory_limit": int(_least("memory", _memory)),
        "memory_free": _meminfo("MemAvailable"),
        "pids_free": int(_least("pids", _pids)),
        "ports": _range(),
    }


def given_out() -> list:  # type: ignore[type-arg]
    """First and last of the ports that the kernel gives out; empty where there are few, and each is needed."""
    ports = _range()
    return ports if len(ports) == 2 and ports[1] - ports[0] >= MANY_PORTS else []


def _range() -> list:  # type: ignore[type-arg]
    return [int(word) for word in node_facts.read("/proc/sys/net/ipv4/ip_local_port_range").split()[:2]]


def _least(controller: str, limit_of) -> float:  # type: ignore[no-untyped-def]
    """Return the smallest limit from this process's control group up to the root; -1 without any."""
    limits = [limit for folder in node_facts.control_groups(controller) for limit in [limit_of(folder)] if limit >= 0]
    return min(limits) if limits else -1


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


def _meminfo(name: str) -> int:
    for line in node_facts.read("/proc/meminfo").splitlines():
        words = line.split()
        if words[:1] == [name + ":"] and words[1].isdigit():
            return int(words[1]) * 1024
    return -1
