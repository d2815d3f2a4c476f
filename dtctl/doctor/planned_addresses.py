"""Addresses that a launch of a spec will use on each node: interfaces, and the rendezvous.

The functions are pure, use the facts that the nodes have reported, and follow the rules of `dtctl.plan.build` and of
the supervisor's environment.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtctl.doctor.node_report import NodeReport
from dtctl.nccl.interfaces import choose_interface
from dtctl.spec.model import Spec

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedInterface:
    """Interface that the spec or a variable names for a node's workers."""

    variable: str
    value: str
    origin: str
    """Source of the name: the key of the spec, or the variable and its place."""
    name: str
    """Name of the resulting interface; empty if no interface of the node fits."""
    address: str
    """IPv4 address of the interface; empty if it has none."""
    up: bool


def is_loopback(address: str) -> bool:
    """Return whether an address is that of the machine itself on every machine."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def find_named_interfaces(node: NodeReport, spec: Spec, env: Mapping[str, str]) -> list[UsedInterface]:
    """Return the interfaces that the spec names for a node, at most one each for gloo and NCCL; empty if dtctl chooses.

    Args:
        node: the node.
        spec: the spec.
        env: variables that the spec sets on the node, from `job.env` and the node's own.
    """
    chosen = spec.network.interface
    name = chosen.get(node.name) if isinstance(chosen, Mapping) else chosen
    fixed = None if name in (None, "auto") else name
    interfaces = []
    for variable, exactly in ((GLOO, ""), (NCCL, "=")):
        if variable in env:
            value, origin = env[variable], f"{variable}={env[variable]}"
        elif fixed is not None:
            value, origin = exactly + fixed, f"network.interface: {fixed}"
        else:
            continue
        if not value:
            continue
        picked = (
            _find_gloo_interface(value, node) if variable == GLOO else choose_interface(value, node.facts["interfaces"])
        )
        row = next((interface for interface in node.facts["interfaces"] if interface["name"] == picked), None)
        interfaces.append(
            UsedInterface(
                variable=variable,
                value=value,
                origin=origin,
                name=picked,
                address=row["address"] if row else "",
                up=bool(row and row["up"]),
            )
        )
    return interfaces


def _find_gloo_interface(value: str, node: NodeReport) -> str:
    names = {interface["name"] for interface in node.facts["interfaces"]}
    return next((part for part in value.split(",") if part in names), "")


def find_route_interface(node: NodeReport, reports: Iterable[NodeReport]) -> str:
    """Return the interface of a node's route to the others; empty if there is none."""
    ways: Mapping[str, str] = node.facts["ways"]
    return next((way for other in reports if other.name != node.name and (way := ways.get(other.address))), "")


def choose_data_address(node: NodeReport, used: Sequence[UsedInterface]) -> str:
    """Return the address of a node's workers: that of the named interface, or else the one that dtctl connects to."""
    return next((one.address for one in used if one.address and one.variable == GLOO), node.address)


def resolve_rendezvous_address(spec: Spec, head: NodeReport, caller: NodeReport) -> str:
    """Return the numeric address of the rendezvous on a node; empty if the node cannot resolve the name."""
    wanted = spec.network.rendezvous_address
    if wanted is None:
        return head.address
    try:
        return str(ipaddress.ip_address(wanted))
    except ValueError:
        known: Mapping[str, Any] = caller.facts["looked_up"]
        answers = known.get(wanted) or []
        return next((answer for answer in answers if ":" not in answer), answers[0] if answers else "")
