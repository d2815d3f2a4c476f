"""Ports, addresses, names and large packets between nodes that all answer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
from tests.fault.examining import bad, examine, expect, note, on, placed

pytestmark = pytest.mark.integration


PORTS: list[tuple[str, Callable[[Sandbox], object], str, list[str], list[str]]] = [
    (
        "all random ports dropped on one node",
        lambda s: faults.block_ports(s, s.node("node2"), ports="32768:60999", source=None, reject=False),
        "dropped",
        ["node2"],
        ["node1", "node3"],
    ),
    (
        "random ports dropped from one node to another, one way",
        lambda s: faults.block_ports(s, s.node("node3"), ports="32768:60999", source=s.node("node1"), reject=False),
        "dropped",
        ["node3"],
        ["node1"],
    ),
    (
        "random ports rejected",
        lambda s: faults.block_ports(s, s.node("node1"), ports="32768:60999", source=None, reject=True),
        "rejected",
        ["node1"],
        ["node2", "node3"],
    ),
    (
        "nothing passes between two nodes",
        lambda s: faults.disconnect_host(s, s.node("node1"), s.node("node3")),
        "dropped",
        ["node1"],
        ["node3"],
    ),
]


@pytest.mark.parametrize(("what", "inject", "said", "nodes", "peers"), PORTS, ids=[case[0] for case in PORTS])
def test_data_ports(
    sandbox: Sandbox,
    project: Any,
    what: str,
    inject: Callable[[Sandbox], object],
    said: str,
    nodes: list[str],
    peers: list[str],
) -> None:
    inject(sandbox)
    note(sandbox)
    result = examine(project)
    if what == "nothing passes between two nodes":  # both ends are as good a place to look at
        first = bad(result[1])[0]
        assert sorted([*first["nodes"], *first["peers"]]) == ["node1", "node3"]
        assert first["check"] == "data-ports"
        return
    expect(result, "data-ports", nodes, peers=peers, said=said)


@pytest.mark.parametrize("reject", [False, True], ids=["dropped", "rejected"])
def test_the_rendezvous_port_alone_is_blocked(sandbox: Sandbox, project: Any, reject: bool) -> None:
    faults.block_ports(sandbox, sandbox.node("node1"), ports="29555", source=None, reject=reject)
    note(sandbox)
    result = examine(project, {"network.rendezvous_port": 29555})
    said = "rejected" if reject else "dropped"
    expect(result, "rendezvous-port", ["node1"], peers=["node2", "node3"], said=said)


def test_the_rendezvous_port_is_taken(sandbox: Sandbox, project: Any) -> None:
    hold = "import socket,sys; s=socket.socket(); s.bind(('',29556)); s.listen(); print(1,flush=True); sys.stdin.read()"
    argv = [*faults._build_nsenter_argv(sandbox, sandbox.node("node1")), sys.executable, "-c", hold]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        result = examine(project, {"network.rendezvous_port": 29556})
        expect(result, "rendezvous-port", ["node1"], said=os.strerror(errno.EADDRINUSE))


def test_large_packets_are_lost_on_one_pair(sandbox: Sandbox, project: Any) -> None:
    faults.drop_large_packets(sandbox, sandbox.node("node2"), sandbox.node("node3"))
    note(sandbox)
    expect(examine(project), "large-packets", ["node2"], peers=["node3"])


def test_large_packets_are_lost_towards_one_node(sandbox: Sandbox, project: Any) -> None:
    for other in ("node1", "node3"):
        faults.drop_large_packets(sandbox, sandbox.node("node2"), sandbox.node(other))
    note(sandbox)
    expect(examine(project), "large-packets", ["node2"], peers=["node1", "node3"])


def test_the_mtu_differs(sandbox: Sandbox, project: Any) -> None:
    on(sandbox, "node3", "ip", "link", "set", "eth0", "mtu", "1400")
    try:
        expect(examine(project), "mtu", ["node3"], status="warn", said="1400")
    finally:
        on(sandbox, "node3", "ip", "link", "set", "eth0", "mtu", "1500")


def test_a_node_takes_its_own_name_for_a_loopback_address(sandbox: Sandbox, project: Any) -> None:
    text = on(sandbox, "node2", "cat", "/etc/hosts")
    own = "127.0.0.1 localhost\n127.0.1.1 node2\n" + text.replace(" node2\n", " other\n")
    on(sandbox, "node2", "mount", "--bind", placed(sandbox, "node2", "hosts", own), "/etc/hosts")
    try:
        expect(examine(project), "loopback-name", ["node2"], said="127.0.1.1")
    finally:
        on(sandbox, "node2", "umount", "/etc/hosts")


def test_two_nodes_have_the_same_address(sandbox: Sandbox, project: Any) -> None:
    address = sandbox.node("node1").address
    on(sandbox, "node3", "ip", "addr", "add", f"{address}/32", "dev", "lo")
    try:
        expect(examine(project), "duplicate-address", ["node1", "node3"], said=address)
    finally:
        on(sandbox, "node3", "ip", "addr", "del", f"{address}/32", "dev", "lo")


def test_addresses_are_translated_on_the_way(sandbox: Sandbox, project: Any) -> None:
    host = sandbox.node("node2")
    extra = host.address.rpartition(".")[0] + ".240"
    on(sandbox, "node2", "ip", "addr", "add", f"{extra}/24", "dev", "eth0")
    rule = ["POSTROUTING", "-o", "eth0", "-p", "tcp", "-m", "tcp", "!", "--sport", "22", "-j", "SNAT", "--to", extra]
    try:
        faults.run_in_network(sandbox, host, ["iptables", "-w", "-t", "nat", "-A", *rule])
        expect(examine(project), "nat", ["node2"], peers=["node1", "node3"], said=extra)
    finally:
        faults.run_in_network(sandbox, host, ["iptables", "-w", "-t", "nat", "-F"])
        on(sandbox, "node2", "ip", "addr", "del", f"{extra}/24", "dev", "eth0")
