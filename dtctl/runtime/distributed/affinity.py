"""Cores near a worker's GPU: memory and PCIe lanes of the other processor take a way around."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import torch

PCI: Final = Path("/sys/bus/pci/devices")


def near(device: torch.device) -> frozenset[int]:
    """Return the cores of the processor that a GPU is attached to; empty where the system does not report them."""
    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:  # an older torch
        return frozenset()
    domain, bus, slot = numbers
    try:
        text = (PCI / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return frozenset()
    return parsed(text)


def parsed(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it: `0-31,64-95`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return frozenset()
        cores |= {*range(int(first), int(last or first) + 1)}
    return frozenset(cores)


def bind(cores: Collection[int]) -> frozenset[int]:
    """Keep this process, and all that it starts from now on, on those of its cores that are among these.

    Returns:
        The cores that it has then: as before if none of them are.
    """
    allowed = os.sched_getaffinity(0)
    chosen = allowed & {*cores}
    if chosen and chosen != allowed:
        os.sched_setaffinity(0, chosen)
    return frozenset(os.sched_getaffinity(0))
