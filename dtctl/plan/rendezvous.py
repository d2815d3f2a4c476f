"""Rendezvous of the workers of an attempt: a numeric address, and an id and a port that no other attempt uses.

A port can only be tried on the head node, at launch. This module chooses, without any node, the ports to try and their
order, so that a dry run shows the port that a launch takes unless another program uses it.
"""

from __future__ import annotations

import socket
from ipaddress import ip_address

from dtctl import node_facts
from dtctl.errors import PlanError
from dtctl.plan.model import Rendezvous


def build_rendezvous_id(run: str, attempt: int) -> str:
    """Id of one attempt's rendezvous."""
    return f"{run}.{attempt}"


def list_rendezvous_ports(run: str, attempt: int, fixed: int | None) -> tuple[int, ...]:
    """Ports to try on the head node, in order of preference; the same for the same run and attempt.

    Args:
        run: run id.
        attempt: how often the gang was started before.
        fixed: the port that the spec demands; None for a free choice.
    """
    if fixed is not None:
        return (fixed,)
    return tuple(node_facts.compute_port_candidates(f"{run}/{attempt}"))


def is_numeric(address: str) -> bool:
    """Return whether `address` needs no look-up."""
    try:
        ip_address(address)
    except ValueError:
        return False
    return True


def resolve_numeric_address(address: str) -> str:
    """`address` as a numeric address, looked up here if it is a name; unchanged when it cannot be looked up."""
    if is_numeric(address):
        return address
    # As bytes, since Python loads the tables of international names to look up a `str`.
    host = address.encode() if address.isascii() else address
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: the name is not ASCII and has an empty or too long label
        return address
    return str(addresses[0][4][0])


def check_reachable(address: str, *, node: str, nodes: int) -> None:
    """Refuse an address at which only the head node can reach itself.

    Raises:
        PlanError: the job has several nodes and the head node's address is a loopback address.
    """
    if nodes > 1 and is_numeric(address) and ip_address(address).is_loopback:
        raise PlanError(
            f"the head node's address is {address}, under which every other node reaches only itself",
            where=f"node {node}",
            hint="give its address on the network between the nodes: `cluster.nodes: [{name: ..., address: ...}]`",
        )


def build_rendezvous(run: str, attempt: int, *, address: str, port: int) -> Rendezvous:
    """Return the meeting point of one attempt."""
    return Rendezvous(run_id=build_rendezvous_id(run, attempt), address=address, port=port)
