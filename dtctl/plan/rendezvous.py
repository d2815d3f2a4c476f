"""Where the workers of an attempt meet: a numeric address, and an id and a port that no other attempt uses.

A port can only be tried on the head node, at launch. What is decided here, without any node, is which ports are tried
and in which order, so that a dry run shows the one that a launch takes unless something is in its way.
"""

from __future__ import annotations

import hashlib
import socket
from ipaddress import ip_address

from dtctl.errors import PlanError
from dtctl.plan.model import Rendezvous

FIRST_PORT = 20_000
LAST_PORT = 32_767
"""Below Linux's ephemeral range (net.ipv4.ip_local_port_range, 32768-60999 by default): the kernel does not give these
out by itself, so a port found free stays free unless a program asks for exactly this one."""
AVOIDED = frozenset({29_400, 29_500})
"""Defaults of torchrun's rendezvous and of MASTER_PORT: most likely taken, or about to be."""
CANDIDATES = 16


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
    ports: list[int] = []
    counter = 0
    while len(ports) < CANDIDATES:
        digest = hashlib.blake2b(f"{run}/{attempt}/{counter}".encode(), digest_size=8).digest()
        port = FIRST_PORT + int.from_bytes(digest, "big") % (LAST_PORT - FIRST_PORT + 1)
        if port not in AVOIDED and port not in ports:
            ports.append(port)
        counter += 1
    return tuple(ports)


def is_numeric(address: str) -> bool:
    """Whether `address` needs no look-up."""
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
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return address
    return str(found[0][4][0])


def check_reachable(address: str, *, node: str, nodes: int) -> None:
    """Refuse an address at which only the head node itself can be found.

    Raises:
        PlanError: the job has several nodes and the head node's address is a loopback address.
    """
    if nodes > 1 and is_numeric(address) and ip_address(address).is_loopback:
        raise PlanError(
            f"the head node's address is {address}, which every other node takes for itself",
            where=f"node {node}",
            hint="give its address on the network between the nodes: `cluster.nodes: [{name: ..., address: ...}]`",
        )


def rendezvous(run: str, attempt: int, *, address: str, port: int) -> Rendezvous:
    """The meeting point of one attempt."""
    return Rendezvous(run_id=rendezvous_id(run, attempt), address=address, port=port)
