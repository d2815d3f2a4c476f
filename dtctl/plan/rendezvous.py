"""Rendezvous of the workers of an attempt: a numeric address, and an id and a port that no other attempt uses.

A port can only be tried on the head node, at launch. What is decided here, without any node, is which ports are tried
and in which order, so that a dry run shows the one that a launch takes unless something is in its way.
"""

from __future__ import annotations

import socket
from ipaddress import ip_address

from dtctl import node_facts
from dtctl.errors import PlanError
from dtctl.plan.model import Rendezvous


def rendezvous_id(run: str, attempt: int) -> str:
    """Id of one attempt's rendezvous."""
    return f"{run}.{attempt}"


def port_candidates(run: str, attempt: int, fixed: int | None) -> tuple[int, ...]:
    """Ports to try on the head node, in order of preference; the same for the same run and attempt.

    Args:
        run: run id.
        attempt: how often the gang was started before.
        fixed: the port that the spec demands; None for a free choice.
    """
    if fixed is not None:
        return (fixed,)
    return tuple(node_facts.port_candidates(f"{run}/{attempt}"))


def is_numeric(address: str) -> bool:
    """Return whether `address` needs no look-up."""
    try:
        ip_address(address)
    except ValueError:
        return False
    return True


def numeric(address: str) -> str:
    """`address` as a numeric address, looked up here if it is a name; unchanged when it cannot be looked up."""
    if is_numeric(address):
        return address
    try:
        addresses = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return address
    return str(addresses[0][4][0])


def check_reachable(address: str, *, node: str, nodes: int) -> None:
    """Refuse an address at which only the head node itself can be found.

    Raises:
        PlanError: the job has several nodes and the head node's address is a loopback address.
    """
    if nodes > 1 and is_numeric(address) and ip_address(address).is_loopback:
        raise PlanError(
            f"the head node's address is {address}, which every other node takes to be itself",
            where=f"node {node}",
            hint="give its address on the network between the nodes: `cluster.nodes: [{name: ..., address: ...}]`",
        )


def rendezvous(run: str, attempt: int, *, address: str, port: int) -> Rendezvous:
    """Return the meeting point of one attempt."""
    return Rendezvous(run_id=rendezvous_id(run, attempt), address=address, port=port)
