"""Network interfaces that NCCL and gloo report, and the interface of an address that failed. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_USED = re.compile(
    r"(?<![\w.@-])(?P<name>[A-Za-z][\w.@-]*):(?P<address>(?:\d{1,3}\.){3}\d{1,3}|[0-9a-fA-F:]*::[0-9a-fA-F:]*)(?:%\w+)?<\d+>"
)
_ANNOUNCES = (
    "Bootstrap : Using",
    "NET/Socket : Using",
    "Bootstrap: Using",
    "NET/Socket: Using",
    "NET : Using interface",
    "Using interface",
)
_SET = re.compile(
    r"(?P<variable>(?:NCCL|GLOO|TP|UCX)_(?:SOCKET_IFNAME|NET_DEVICES))(?: set (?:by environment )?to |=| ?: "
    r"?)(?P<value>[\w.^,=:-]+)"
)
_ADDRESS = re.compile(r"(?<![\d.])(?P<address>(?:\d{1,3}\.){3}\d{1,3}|fe80::[0-9a-fA-F:]+)(?![\w.]*\.\w)")
VIRTUAL = re.compile(
    r"^(?:lo|docker|br-|veth|virbr|cni|flannel|cali|tunl|vmnet|kube|podman|lxc|lxd|dummy|ovs|tailscale|zt|wg|tun|tap|usb|incusbr|nerdctl)"
)
"""Pattern of interfaces that lead to no other node, or only to containers."""


@dataclass(slots=True)
class ReportedInterfaces:
    """Network interfaces in the lines that were read."""

    address_of: dict[str, set[str]] = field(default_factory=dict)
    """Interface -> its addresses on all nodes."""
    settings: dict[str, str] = field(default_factory=dict)
    """Variable that names interfaces -> its value."""

    def record_interfaces(self, text: str) -> None:
        """Record the interfaces in a line."""
        if any(word in text for word in _ANNOUNCES):
            for found in _USED.finditer(text):
                self.address_of.setdefault(found["name"], set()).add(found["address"])
        if "IFNAME" in text and (setting := _SET.search(text)) is not None:
            self.settings.setdefault(setting["variable"], setting["value"])

    def find_interface_of(self, address: str) -> str:
        """Return the interface with this address, or with one of the same network; empty if none is known."""
        for name, addresses in self.address_of.items():
            if address in addresses:
                return name
        for name, addresses in self.address_of.items():
            if any(_is_same_subnet(address, own) for own in addresses):
                return name
        return ""

    @property
    def usable(self) -> list[str]:
        """Return interfaces that may lead to other nodes."""
        return [
            name
            for name, addresses in self.address_of.items()
            if not VIRTUAL.match(name) and not all(map(_is_unroutable_address, addresses))
        ]

    @property
    def virtual(self) -> list[str]:
        """Return interfaces that lead to no other node."""
        return [name for name in self.address_of if VIRTUAL.match(name)]


def _is_same_subnet(one: str, other: str) -> bool:
    return one.count(".") == 3 and one.rsplit(".", 1)[0] == other.rsplit(".", 1)[0]


def _is_unroutable_address(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_link_local


def what_is(address: str, interfaces: ReportedInterfaces) -> tuple[str, str]:
    """Return the problem with an address that could not be reached, and its interface; both may be empty."""
    name = interfaces.find_interface_of(address)
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return "", name
    if address.startswith("0."):
        return "not an address of a node: a name or a number was read as an address", name
    if parsed.is_loopback:
        return "a loopback address, which every node has for itself", name or "lo"
    if name and VIRTUAL.match(name):
        return f"of {name}, an interface of containers or tunnels, which other nodes cannot reach", name
    if parsed.is_link_local:
        return "a link-local address, which is valid on one cable only", name
    if parsed.version == 4 and address.startswith(("172.17.", "172.18.")) and not name:
        return "of the network that Docker gives to containers", "docker0"
    if parsed.version == 4 and address.startswith("192.168.122.") and not name:
        return "of the network that libvirt gives to virtual machines", "virbr0"
    return "", name


def addresses_in(texts: Iterable[str]) -> list[str]:
    """Return IPv4 and link-local addresses in texts in order, without repetitions."""
    found: dict[str, None] = {}
    for text in texts:
        for match in _ADDRESS.finditer(text):
            if not match["address"].startswith(("0.0.0.", "255.")):
                found[match["address"]] = None
    return list(found)


def format_interface_advice(interfaces: ReportedInterfaces) -> str:
    """Return the variables to set, with the name of an interface if one is known."""
    usable = interfaces.usable
    if usable:
        return f"export NCCL_SOCKET_IFNAME={usable[0]} GLOO_SOCKET_IFNAME={usable[0]} on every node"
    return (
        "export NCCL_SOCKET_IFNAME=NAME GLOO_SOCKET_IFNAME=NAME, the interface that leads to the other "
        "nodes (ip -br addr)"
    )
