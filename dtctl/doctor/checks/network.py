"""Checks between nodes: names, addresses, interfaces, and every ordered pair of nodes. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from dtctl.doctor.findings import Finding, cover, odd_ones
from dtctl.doctor.node_report import NodeReport

RAN = ("duplicate-address", "loopback-name", "names", "data-ports", "rendezvous-port", "large-packets", "nat", "mtu")
_WORDS = {
    "dropped": "are dropped silently",
    "refused": "are rejected (the port is open on the node, something between says no)",
    "unreachable": "are answered with `unreachable`",
    "silent": "are accepted and never answered",
    "error": "fail",
}


def _loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def names(seen: Sequence[NodeReport]) -> Iterator[Finding]:
    """Host names: no node may take its own for a loopback address, and all have to mean the same by each."""
    looped = {}
    for node in seen:
        own = node.facts["looked_up"].get(node.facts["hostname"])
        if own and all(_loopback(address) for address in own):
            looped[node.name] = own[0]
    if looped:
        lines = tuple(f"{name}: its host name means {address} there" for name, address in looped.items())
        yield Finding(
            check="loopback-name",
            status="fail",
            nodes=tuple(looped),
            summary=f"{', '.join(looped)}: the host name means {next(iter(looped.values()))} on the node itself, so "
            "torchrun and gloo tell the other nodes a loopback address",
            fix="sudo sed -i '/^127\\.0\\.1\\.1/d' /etc/hosts and add the real address, or set GLOO_SOCKET_IFNAME and "
            "torchrun --local-addr (dtctl launch does)",
            evidence=lines,
        )
    every = dict.fromkeys(name for node in seen for name in node.facts["looked_up"])
    for name in every:
        said = {
            node.name: ", ".join(sorted(found))
            for node in seen
            if (found := node.facts["looked_up"].get(name)) is not None and not all(_loopback(one) for one in found)
        }
        odd, usual = odd_ones(said)
        if odd:
            told = "; ".join(f"{node}: {said[node] or 'unknown'}" for node in said)
            yield Finding(
                check="names",
                status="fail",
                nodes=odd,
                summary=f"{name} does not mean the same address everywhere ({told})",
                fix=f"give {name} the address {usual or 'it really has'} in /etc/hosts of {', '.join(odd)}",
                evidence=tuple(f"{node}: {name} is {address or 'unknown'}" for node, address in said.items()),
            )


def addresses(seen: Sequence[NodeReport]) -> Iterator[Finding]:
    """Addresses that several nodes have, and interfaces whose packets have different sizes.

    An address that is on every node and that no traffic uses (docker0) is no trouble.
    """
    used = {node.address for node in seen}
    owners: dict[str, list[str]] = {}
    for node in seen:
        for address in node.facts["addresses"]:
            if address in used and not _loopback(address):
                owners.setdefault(address, []).append(node.name)
    for address, who in owners.items():
        if len(who) > 1:
            yield Finding(
                check="duplicate-address",
                status="fail",
                nodes=tuple(who),
                summary=f"{address} is the address of several nodes: {', '.join(who)}",
                fix=f"take it from all but one: sudo ip addr del {address}/PREFIX dev INTERFACE",
                evidence=tuple(f"{owner} has {address}" for owner in who),
            )
    mtu = {node.name: size for node in seen if (size := _mtu(node, seen))}
    odd, usual = odd_ones(mtu)
    if odd:
        yield Finding(
            check="mtu",
            status="warn",
            nodes=odd,
            summary="the MTU differs between nodes: " + ", ".join(f"{node} {size}" for node, size in mtu.items()),
            fix=f"sudo ip link set INTERFACE mtu {usual or 1500} on {', '.join(odd)}",
            evidence=tuple(f"{node}: mtu {size}" for node, size in mtu.items()),
        )


def _mtu(node: NodeReport, seen: Sequence[NodeReport]) -> int:
    """MTU of the interface towards the other nodes; 0 when not known."""
    sizes = {interface["name"]: int(interface["mtu"]) for interface in node.facts["interfaces"]}
    ways = [node.facts["ways"].get(other.address, "") for other in seen if other is not node]
    return next((sizes[way] for way in ways if way in sizes), 0)


def pairs(seen: Sequence[NodeReport], *, rendezvous: Sequence[int], fixed: bool) -> Iterator[Finding]:
    """What the calls between all ordered pairs of nodes have told.

    Args:
        seen: the nodes that took part, the head node first.
        rendezvous: the rendezvous port, or candidates for it.
        fixed: whether the spec demands that port.
    """
    head = seen[0]
    port = head.ports.get("rendezvous", 1)
    if port < 0:
        yield _taken(head, rendezvous[0], -port, fixed=fixed)
    failed: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {"data": [], "rendezvous": []}
    alive = {node.name for node in seen}
    for node in seen:
        for answer in node.answers:
            # A node that has gone in the meantime answers nobody, which is told already.
            if answer["result"] in _WORDS and answer["node"] in alive:
                kind = "rendezvous" if answer["kind"] == "rendezvous" else "data"
                failed[kind].append((node.name, answer["node"], answer))
    # Where the data ports fail too, the rendezvous port is only one more of them.
    also = {(caller, called) for caller, called, _ in failed["data"]}
    failed["rendezvous"] = [one for one in failed["rendezvous"] if one[:2] not in also]
    for kind, calls in failed.items():
        if calls:
            yield _blocked(kind, calls)
    yield from _through(seen)


def _taken(head: NodeReport, port: int, number: int, *, fixed: bool) -> Finding:
    hint = "or let dtctl choose: network.rendezvous_port: auto" if fixed else "or end what uses it"
    return Finding(
        check="rendezvous-port",
        status="fail",
        nodes=(head.name,),
        summary=f"{head.name}: the rendezvous port {port} cannot be used: {os.strerror(number)}",
        fix=f"find its owner with ss -ltnp 'sport = :{port}', {hint}",
        evidence=(f"bind to port {port}: {os.strerror(number)}",),
    )


def _blocked(kind: str, failed: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Finding:
    ways = list(dict.fromkeys((caller, called) for caller, called, _ in failed))
    nodes = cover(ways)
    peers = tuple(dict.fromkeys(name for way in ways for name in way if name not in nodes))
    ports = sorted({int(answer["port"]) for _, _, answer in failed})
    which = f"the rendezvous port {ports[0]}" if kind == "rendezvous" else "random ports, as workers use them,"
    by_result: dict[str, list[tuple[str, str]]] = {}
    for caller, called, answer in failed:
        by_result.setdefault(str(answer["result"]), []).append((caller, called))
    # A refusal says more than silence: a filter that knows no connections drops the answers to the way out as well.
    told = "; ".join(f"{_WORDS[word]}: {_ways(by_result[word])}" for word in reversed(_WORDS) if word in by_result)
    open_ = f"port {ports[0]}" if kind == "rendezvous" else "ports 32768-60999 (net.ipv4.ip_local_port_range)"
    return Finding(
        check="rendezvous-port" if kind == "rendezvous" else "data-ports",
        status="fail",
        nodes=nodes,
        peers=peers,
        summary=f"connections to {which} {told}",
        fix=f"on {', '.join(nodes)}: let TCP {open_} in from the other nodes (sudo nft list ruleset; sudo iptables -S; "
        "security group)",
        evidence=tuple(
            f"{caller} -> {called}:{answer['port']}: {answer['result']} ({answer.get('said', '')})"
            for caller, called, answer in failed[:8]
        ),
    )


def _ways(ways: Sequence[tuple[str, str]]) -> str:
    told = list(dict.fromkeys(f"{caller} to {called}" for caller, called in ways))
    return ", ".join(told[:6]) + (" ..." if len(told) > 6 else "")


def _through(seen: Sequence[NodeReport]) -> Iterator[Finding]:
    """Calls that were answered, and yet: large packets lost, another node answered, addresses translated."""
    large, strange, seen_as = [], [], []
    for node in seen:
        for answer in node.answers:
            way = (node.name, str(answer["node"]))
            if answer["result"] == "large-lost":
                large.append(way)
            elif answer["result"] == "stranger":
                strange.append((*way, str(answer["said"])))
            if answer.get("seen") and answer["seen"] != answer["own"]:
                seen_as.append((*way, str(answer["seen"]), str(answer["own"])))
    if large:
        nodes = cover(large)
        ways = list(dict.fromkeys(large))
        yield Finding(
            check="large-packets",
            status="fail",
            nodes=nodes,
            peers=tuple(dict.fromkeys(name for way in ways for name in way if name not in nodes)),
            summary=f"large packets are lost, small ones arrive: {_ways(ways)}",
            fix="set the same MTU everywhere on the way (ip link; switch, tunnel), let ICMP `fragmentation needed` "
            "pass, or sudo sysctl net.ipv4.tcp_mtu_probing=1",
            evidence=tuple(f"{caller} -> {called}: connected, 256 KiB did not arrive" for caller, called in ways[:8]),
        )
    if strange:
        yield Finding(
            check="duplicate-address",
            status="fail",
            nodes=tuple(dict.fromkeys(called for _, called, _ in strange)),
            peers=tuple(dict.fromkeys(caller for caller, _, _ in strange)),
            summary="; ".join(f"{caller} called {called}, and {who} answered" for caller, called, who in strange[:4]),
            fix="find who else has that address: arping -D -I INTERFACE ADDRESS",
            evidence=tuple(f"{caller} -> {called}: answered by {who}" for caller, called, who in strange[:8]),
        )
    if seen_as:
        yield Finding(
            check="nat",
            status="fail",
            nodes=tuple(dict.fromkeys(caller for caller, _, _, _ in seen_as)),
            peers=tuple(dict.fromkeys(called for _, called, _, _ in seen_as)),
            summary="addresses are translated on the way: "
            + "; ".join(
                f"{called} sees {caller} ({own}) come from {other}" for caller, called, other, own in seen_as[:4]
            ),
            fix="use the host's network in containers (--network host), and take the translation (SNAT, masquerade) "
            "off between the nodes: sudo iptables -t nat -S",
            evidence=tuple(f"{caller} -> {called}: {own} became {other}" for caller, called, other, own in seen_as[:8]),
        )
