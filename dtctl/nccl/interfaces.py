"""Interface that NCCL selects for a value of NCCL_SOCKET_IFNAME."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def choose_interface(value: str, interfaces: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the first interface with an address that NCCL takes; empty if there is none.

    Args:
        value: of NCCL_SOCKET_IFNAME: prefixes by commas, `=` before exact names, `^` before those to leave out.
        interfaces: `name`, `address` and `up` of each, in the kernel's order.
    """
    exclude, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = [word.partition(":")[0] for word in value.lstrip("^").lstrip("=").split(",") if word]

    def fits(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    able = [str(interface["name"]) for interface in interfaces if fits(str(interface["name"])) != exclude]
    with_address = [
        str(interface["name"])
        for interface in interfaces
        if interface["name"] in able and interface["address"] and interface["up"]
    ]
    return (with_address or ([] if exclude else able) or [""])[0]
