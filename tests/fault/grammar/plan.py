# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""What the spec names and the nodes do not have: interfaces, addresses, slots, paths."""

from __future__ import annotations

from tests.fault.grammar.fault import ALL, NODES, Collection, nodes_with

BRIDGE = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up"
"""What an installation of Docker leaves on every node: one address for all."""
STORAGE = "ip link add st0 type veth peer name st1; ip link set st1 up; ip link set st0 up; ip addr add 192.168.50.${HERE##*.}/24 dev st0"
"""A network card of each node whose cable ends nowhere."""


def add(made: Collection) -> None:
    everywhere = tuple((node, BRIDGE) for node in NODES)
    apart = tuple((node, STORAGE) for node in NODES)
    key = r"network\.interface|_SOCKET_IFNAME"
    for name, do in (("lo", ()), ("docker0", everywhere), ("st0", apart)):
        made.add(
            f"plan: network.interface {name}", "plan", "interface", ALL, key, *do, spec={"network.interface": name}
        )
        made.add(
            f"plan: GLOO_SOCKET_IFNAME={name} for all",
            "plan",
            "interface",
            ALL,
            key,
            *do,
            spec={"job.env": {"GLOO_SOCKET_IFNAME": name}},
        )
        node = made.host()
        made.add(f"plan: GLOO_SOCKET_IFNAME={name} on one node", "plan", "interface", [node], key, *do,
             spec=nodes_with(node, env={"GLOO_SOCKET_IFNAME": name}))  # fmt: skip
        made.add(f"plan: network.interface {name} on one node", "plan", "interface", [node], key, *do,
             spec={"network.interface": {one: name if one == node else "eth0" for one in NODES}})  # fmt: skip
    made.add(
        "plan: network.interface that no node has", "plan", "interface", ALL, key, spec={"network.interface": "ib0"}
    )
    node = made.host()
    made.add("plan: network.interface that one node lacks", "plan", "interface", [node], key,
         spec={"network.interface": {one: "ens9f1" if one == node else "eth0" for one in NODES}})  # fmt: skip
    made.add(
        "plan: NCCL_SOCKET_IFNAME=lo for all",
        "plan",
        "interface",
        ALL,
        key,
        spec={"job.env": {"NCCL_SOCKET_IFNAME": "lo"}},
    )
    made.add(
        "plan: NCCL_SOCKET_IFNAME=^eth for all",
        "plan",
        "interface",
        ALL,
        key,
        spec={"job.env": {"NCCL_SOCKET_IFNAME": "^eth"}},
    )
    made.add(
        "plan: NCCL_SOCKET_IFNAME=docker0 for all",
        "plan",
        "interface",
        ALL,
        key,
        *everywhere,
        spec={"job.env": {"NCCL_SOCKET_IFNAME": "=docker0"}},
    )
    where = r"network\.rendezvous_address"
    for word, address in (
        ("a loopback address", "127.0.0.1"),
        ("a loopback name", "localhost"),
        ("an address of nobody", "{prefix}.250"),
        ("the address of another node", "{node2}"),
        ("an unknown name", "head.example.invalid"),
    ):
        made.add(f"plan: rendezvous_address is {word}", "plan", "rendezvous-address rendezvous-port", ["node1"], where,
             spec={"network.rendezvous_address": address})  # fmt: skip
    made.add("plan: rendezvous_address is on a network without a cable", "plan", "rendezvous-address rendezvous-port", ["node1"], where,
         *apart, spec={"network.rendezvous_address": "192.168.50.{last1}"})  # fmt: skip
    made.add("plan: rendezvous_address is the bridge of every node", "plan", "rendezvous-address rendezvous-port", ["node1"], where,
         *everywhere, spec={"network.rendezvous_address": "172.17.0.1"})  # fmt: skip
    for index in range(2):
        node = made.host()
        made.add(f"plan: several slots, no way of a node to itself, {index}", "plan", "data-ports", [node], r"\blo\b|loopback|itself",
             (node, "iptables -A INPUT -i lo -p tcp --syn -s $HERE -j DROP"), spec={"cluster.slots": 2})  # fmt: skip
    node = made.host()
    made.add(
        "plan: several slots, lo is down",
        "plan",
        "data-ports interface",
        [node],
        r"ip link set lo up",
        (node, "ip link set lo down"),
        spec={"cluster.slots": 2},
    )
    made.add(
        "plan: gloo's transport does not exist",
        "plan",
        "collective env-unknown",
        ALL,
        r"GLOO_DEVICE_TRANSPORT",
        spec={"job.env": {"GLOO_DEVICE_TRANSPORT": "RDMA"}},
    )
    made.add(
        "plan: TORCH_DISTRIBUTED_DEBUG has no such value",
        "plan",
        "collective env-unknown",
        ALL,
        r"TORCH_DISTRIBUTED_DEBUG",
        spec={"job.env": {"TORCH_DISTRIBUTED_DEBUG": "VERBOSE"}},
    )
