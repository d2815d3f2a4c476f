# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""What looks odd and keeps nobody from training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.fault.grammar.fault import NODES, Fault
from tests.fault.grammar.plan import BRIDGE, STORAGE


def faults() -> Iterator[Fault]:
    def one(name: str, *do: tuple[str, str], **more: Any) -> Fault:
        return Fault(name=f"harmless: {name}", layer="harmless", do=do, **more)

    yield one("Docker's bridge on every node", *((node, BRIDGE) for node in NODES))
    yield one("a network for storage", *((node, STORAGE) for node in NODES))
    yield one("no ICMP", *((node, "iptables -A INPUT -p icmp -j DROP") for node in NODES))
    yield one("no UDP", *((node, "iptables -A INPUT -i eth0 -p udp -j DROP") for node in NODES))
    yield one("a smaller MTU everywhere", *((node, "ip link set eth0 mtu 1400") for node in NODES))
    yield one("a start-up file that is silent", *((node, "rc 'export EDITOR=vi; umask 022'") for node in NODES))
    yield one("a message on standard error", ("node2", "rc 'echo stty: not a terminal >&2'"))
    yield one("a banner of sshd", ("node3", "echo Welcome >/tmp/banner; conf 'Banner /tmp/banner'"))
    yield one("the job's own modules", files={"model.py": "x = 1\n", "utils.py": "x = 1\n", "data/__init__.py": "\n"})
    yield one("interface named", spec={"network.interface": "eth0"})
    yield one("rendezvous address named", spec={"network.rendezvous_address": "{node1}"})
    yield one("two slots", spec={"cluster.slots": 2})
    yield one(
        "caches that are not there yet", spec={"job.env": {"HF_HOME": "/tmp/hf/new", "TRITON_CACHE_DIR": "/tmp/tr"}}
    )
    yield one(
        "verbose",
        spec={"job.env": {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PYTHONFAULTHANDLER": "1"}},
    )
    yield one("a firewall that lets the nodes in", *((node, "for p in $P1 $P2 $P3; do iptables -A INPUT -s $p -j ACCEPT; done; iptables -A INPUT -i lo -j ACCEPT; iptables -A INPUT -p tcp --dport 22 -j ACCEPT; iptables -A INPUT -j DROP") for node in NODES))  # fmt: skip
