"""GPUs and networks, read from hardware.yaml, and the cluster that is made of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from dtctl.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A kind of GPU; hardware.yaml has the units."""

    name: str
    memory: float
    half: float
    single: float
    hbm: float
    products: float
    """Share of `half` that large matrix products reach."""
    attention: float
    """Share of `half` that fused attention reaches."""
    link: float
    host: float
    nvlinks: int = 0
    bf16: bool = True
    """True if it computes in bf16."""
    fp8: bool = False
    """True if it has products in fp8."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A cluster of equal nodes."""

    gpu: Gpu
    gpus: int
    """GPUs of all nodes."""
    per_node: int
    network: float
    """GB/s in one direction for each node."""
    host_memory: float | None = None
    """Memory of a node in GiB. None: twice that of its GPUs, as such nodes usually have."""

    @property
    def nodes(self) -> int:
        """Number of nodes with these GPUs."""
        return -(-self.gpus // self.per_node)

    @property
    def network_per_gpu(self) -> float:
        """GB/s of the network for each GPU of a node when all of them use it."""
        return self.network / min(self.per_node, self.gpus)

    @property
    def host_per_gpu(self) -> float:
        """GiB of a node's memory for each of its GPUs."""
        if self.host_memory is None:
            return 2 * self.gpu.memory
        return self.host_memory / min(self.per_node, self.gpus)


@functools.cache
def _read_hardware_file() -> dict[str, dict[str, dict[str, Any]]]:
    import yaml

    text = resources.files("dtctl.advise").joinpath("hardware.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: dict[str, dict[str, dict[str, Any]]] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader
    return entries


def read_gpu_table() -> dict[str, Gpu]:
    """Return all known GPUs by name."""
    return {name: Gpu(name=name, **entry) for name, entry in _read_hardware_file()["gpus"].items()}


def read_network_table() -> dict[str, float]:
    """Return all known networks: name -> GB/s of a node."""
    return {name: float(entry["node"]) for name, entry in _read_hardware_file()["networks"].items()}


def find_gpu_by_name(name: str, memory_gib: float | None = None) -> Gpu:
    """Return a GPU by name, with another memory if that is given.

    Raises:
        UsageError: it is not known.
    """
    by_name = {model_name.casefold(): value for model_name, value in read_gpu_table().items()}
    match = by_name.get(name.casefold().replace(" ", "-"))
    if match is None:
        raise UsageError(
            f"GPU {name} is not known",
            hint=f"there are {', '.join(read_gpu_table())}; take the nearest, with --gpu-memory",
        )
    return replace(match, memory=memory_gib) if memory_gib is not None else match


def parse_network_bandwidth(text: str) -> float:
    """GB/s of a node's network, from a name or a number.

    Raises:
        UsageError: neither of the two, or not above 0.
    """
    try:
        value = float(text)
    except ValueError:
        if text not in read_network_table():
            raise UsageError(
                f"network {text} is not known", hint=f"there are {', '.join(read_network_table())}; or GB/s of a node"
            ) from None
        return read_network_table()[text]
    if not 0 < value < float("inf"):
        raise UsageError(f"a network has more than 0 GB/s, and not {text}")
    return value
