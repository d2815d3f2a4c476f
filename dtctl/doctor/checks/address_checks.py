"""Checks of the addresses in a plan: interfaces, the rendezvous, and a node's own address. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from dtctl.doctor.findings import Finding
from dtctl.doctor.node_report import REACHED, NodeReport
from dtctl.doctor.planned_addresses import UsedInterface, find_route_interface, is_loopback

RAN = ("interface", "rendezvous-address")
Used = Mapping[str, Sequence[UsedInterface]]


def check_named_interfaces(reports: Sequence[NodeReport], used: Used) -> Iterator[Finding]:
    """Yield findings about interfaces that the spec names and that workers cannot use to connect."""
    wrong: dict[str, str] = {}
    origins: dict[str, None] = {}
    for node in reports:
        for one in used[node.name]:
            why = explain_unusable_interface(node, one, reports, used)
            if why:
                wrong.setdefault(node.name, f"{one.origin}: {why}")
                origins[one.origin.partition("=")[0].partition(":")[0]] = None
    if not wrong:
        return
    routes = {node.name: find_route_interface(node, reports) for node in reports if node.name in wrong}
    better = sorted({name for name in routes.values() if name})
    instead = f", or name {better[0]}, by which the nodes reach each other" if len(better) == 1 else ""
    keys = [name for name in origins if name != "network.interface"]
    yield Finding(
        check="interface",
        status="fail",
        nodes=tuple(wrong),
        summary="; ".join(f"{node}: {text}" for node, text in list(wrong.items())[:3])
        + (" ..." if len(wrong) > 3 else ""),
        fix=f"{f'take {chr(32).join(keys)} out of job.env and cluster.nodes[].env, and ' if keys else ''}leave it to "
        f"dtctl (network.interface: auto){instead}",
        evidence=tuple(
            f"{node.name}: {wrong[node.name]}; it has "
            + ", ".join(f"{one['name']} {one['address'] or 'without address'}" for one in node.facts["interfaces"])
            for node in reports
            if node.name in wrong
        ),
    )


def explain_unusable_interface(node: NodeReport, one: UsedInterface, reports: Sequence[NodeReport], used: Used) -> str:
    """Return why other nodes' workers cannot connect to this node's through an interface; empty if they can."""
    if not one.name:
        return "the node has no such interface"
    if not one.up:
        return f"{one.name} is down"
    if not one.address:
        return f"{one.name} has no IPv4 address"
    if len(reports) < 2:
        return ""
    if is_loopback(one.address):
        return f"{one.name} has the address {one.address}, under which every node reaches only itself"
    twins = [
        other.name
        for other in reports
        if other is not node and any(it.address == one.address for it in used[other.name])
    ]
    if twins:
        return f"{one.name} has the address {one.address} on {', '.join(twins)}, too"
    if one.address == node.address:
        return ""
    if one.address != node.data_address:  # this is NCCL's interface, which no call has tested
        return ""
    if _is_reached_elsewhere_only(node, reports):
        return f"the others do not reach it at {one.address} ({one.name}), and do at {node.address}"
    return ""


def _is_reached_elsewhere_only(node: NodeReport, reports: Sequence[NodeReport]) -> bool:
    """Return whether other nodes reach a node at the address that dtctl uses, and none at that of its workers."""
    calls = [call for other in reports if other is not node for call in other.answers if call["node"] == node.name]
    to_workers = [call["result"] == "ok" for call in calls if call["kind"].startswith("data")]
    to_node = [call["result"] == "ok" for call in calls if call["kind"] == REACHED]
    return bool(to_workers) and not any(to_workers) and any(to_node)


def check_rendezvous_address(reports: Sequence[NodeReport], wanted: str | None) -> Iterator[Finding]:
    """Yield a finding if the rendezvous address of the spec is wrong.

    Args:
        reports: reports of the nodes without errors, the head node first.
        wanted: value of `network.rendezvous_address`.
    """
    if wanted is None:
        return
    why = _explain_wrong_address(reports, wanted)
    if not why:
        return
    head, others = reports[0], reports[1:]
    address = head.address if _is_ip_address(head.address) else f"the address of {head.name}"
    yield Finding(
        check="rendezvous-address",
        status="fail",
        nodes=(head.name,),
        peers=tuple(node.name for node in others),
        summary=f"network.rendezvous_address: {why}",
        fix=f"remove network.rendezvous_address, or set it to {address}, an address of {head.name} that the "
        "others reach",
        evidence=tuple(f"{node.name}: {wanted} is {node.meeting or 'unknown'}" for node in reports),
    )


def _explain_wrong_address(reports: Sequence[NodeReport], wanted: str) -> str:
    """Return why workers do not meet at the rendezvous address; empty if they do."""
    head, others = reports[0], reports[1:]
    unresolved = [node.name for node in reports if not node.meeting]
    if unresolved:
        return f"{wanted} cannot be resolved on {', '.join(unresolved)}"
    if others and any(is_loopback(node.meeting) for node in reports):
        return f"{wanted} is a loopback address, so every node would look for the others on itself"
    foreign = [node.meeting for node in reports if node.meeting not in head.facts["addresses"]]
    if foreign:
        owners = [node.name for node in others if foreign[0] in node.facts["addresses"]]
        of_another = f" but of {', '.join(owners)}" if owners else ""
        return f"{foreign[0]} is not an address of {head.name}{of_another}"
    twins = [node.name for node in others if node.meeting in node.facts["addresses"]]
    if twins:
        return f"{wanted} is an address of {', '.join(twins)}, too; these nodes would connect to themselves"
    unconnected = _list_unconnected_nodes(head, others)
    if head.meeting != head.address and unconnected:
        return f"{', '.join(unconnected)} cannot reach {head.name} at {wanted}"
    return ""


def _list_unconnected_nodes(head: NodeReport, others: Sequence[NodeReport]) -> list[str]:
    nodes = []
    for node in others:
        calls = [one for one in node.answers if one["node"] == head.name]
        met = [one["result"] == "ok" for one in calls if one["kind"] == "rendezvous"]
        other = [one["result"] == "ok" for one in calls if one["kind"] != "rendezvous"]
        if met and not all(met) and any(other):
            nodes.append(node.name)
    return nodes if len(nodes) == len(others) else []


def _is_ip_address(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
