"""Binding to the cores near a worker's GPU, since memory and PCIe lanes of another processor are slower to reach."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import torch

PCI: Final = Path("/sys/bus/pci/devices")


def find_cores_near_gpu(device: torch.device) -> frozenset[int]:
    """Return the cores of the processor to which a GPU is attached; empty if the system does not report them."""
    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:  # an older version of torch
        return frozenset()
    domain, bus, slot = numbers
    try:
        text = (PCI / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return frozenset()
    return parse_core_list(text)


def parse_core_list(text: str) -> frozenset[int]:
    """Return the numbers in a list in the kernel's format: `0-31,64-95`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return frozenset()
        cores |= {*range(int(first), int(last or first) + 1)}
    return frozenset(cores)


def bind_process_to_cores(cores: Collection[int]) -> frozenset[int]:
    """Bind this process, and all that it starts from now on, to those of its cores that are in `cores`.

    Returns:
        Cores of the process afterwards; unchanged if none of its cores is in `cores`.
    """
    allowed = os.sched_getaffinity(0)
    chosen = allowed & {*cores}
    if chosen and chosen != allowed:
        os.sched_setaffinity(0, chosen)
    return frozenset(os.sched_getaffinity(0))
