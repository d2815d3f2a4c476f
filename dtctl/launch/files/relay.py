"""Plan of a relay: the node from which each node fetches the blocks, so that each leaves the control machine once.

Nodes stand in the order in which they came to need the tree. Each fetches from one that came before it, so that there
is no circle; the first has them from the control machine. When a node fails, those that fetched from it get another
one that came before them, and the first that is left gets the blocks from here. Every node checks every block.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dtctl.launch.control.link import quoted
from dtctl.supervisor.messages.setup import PushState

MIN_NODES = 5
MIN_BYTES = 8 << 20
"""Bytes and nodes below which a push is faster without blocks and certificates."""
CHILDREN = 2
"""Nodes that fetch from one node, as long as there are others."""
MAX_SOURCES_FAILED = 3
"""Then a node gets the rest from the control machine."""
UNREACHABLE_PAIRS = 2
"""So many nodes that could not reach another one, with none that could, mean that no node can."""


@dataclass(eq=False, slots=True, kw_only=True)
class Member:
    """A node that takes blocks, and serves them if it has a port."""

    number: int
    node: str
    address: str
    port: int
    depth: int = 0
    source: Member | None = None
    avoid: set[Member] = field(default_factory=set)
    """Nodes that have failed this one."""
    is_dead: bool = False
    children: int = 0
    is_reported: bool = False
    """True if a note has reported that it no longer serves: one is enough, however many nodes fetched from it."""


class Relay:
    """The nodes that fetch one tree's blocks from each other."""

    def __init__(self, nodes: int) -> None:
        """`nodes`: number of nodes that will need the tree."""
        self._nodes = nodes
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._pair: tuple[str, str] | None = None
        self._reached = False
        self._unreachable: set[Member] = set()

    def is_worthwhile(self, size_bytes: int) -> bool:
        """Return whether so much is better sent in blocks from node to node."""
        return self._nodes >= MIN_NODES and size_bytes >= MIN_BYTES

    def key_pair(self) -> tuple[str, str]:
        """Return the certificate and the private key of this push, PEM, made at the first call."""
        with self._lock:
            if self._pair is None:
                self._pair = make_key_pair()
            return self._pair

    def join(self, node: str, answer: PushState, note: Callable[[str], None]) -> Member:
        """Add a node that is ready to fetch."""
        if answer.code:
            reason = "its Python has no ssl" if answer.code == "no-ssl" else f"it cannot serve: {answer.message}"
            note(f"{node} gets the files from here and not from other nodes: {reason}")
        with self._lock:
            member = Member(number=len(self._members), node=node, address=answer.address, port=answer.port)
            self._members.append(member)
            return member

    def choose_source(self, member: Member) -> Member | None:
        """Return the node from which to fetch; None for the control machine."""
        with self._lock:
            self._leave_source(member)
            if not member.port or len(member.avoid) >= MAX_SOURCES_FAILED or self._cannot_reach():
                return None
            earlier = [
                other
                for other in self._members[: member.number]
                if other.port and other.address and not other.is_dead and other not in member.avoid
            ]
            if not earlier:
                return None
            # As long as one has room, the one that is nearest to this machine.
            source = min(earlier, key=lambda other: (max(other.children, CHILDREN - 1), other.depth))
            source.children += 1
            member.source, member.depth = source, source.depth + 1
            return source

    def reached(self) -> None:
        """A block has come from another node."""
        self._reached = True

    def fail(self, member: Member, answer: PushState, note: Callable[[str], None]) -> None:
        """Take note that a node did not get a block from its source."""
        with self._lock:
            source = member.source
            if source is None:
                return
            member.avoid.add(source)
            could_reach = not self._cannot_reach()
            if answer.code == "unreachable":
                self._unreachable.add(member)
            is_new = could_reach and self._cannot_reach()
            is_first = not source.is_reported
            if answer.code not in ("digest", "unreachable"):
                source.is_reported = True
        if answer.code == "digest":
            note(f"{source.node} sent {member.node} a wrong block, which was dropped: {quoted(answer.message)}")
        elif is_new:
            note("the nodes cannot reach each other: each gets the files from here")
        elif answer.code != "unreachable" and is_first:
            note(f"{member.node} no longer gets blocks from {source.node}: {quoted(answer.message)}")

    def leave(self, member: Member, *, is_dead: bool) -> None:
        """A node has all blocks; or its link is gone."""
        with self._lock:
            self._leave_source(member)
            member.is_dead = is_dead

    def _leave_source(self, member: Member) -> None:
        if member.source is not None:
            member.source.children -= 1
            member.source = None

    def _cannot_reach(self) -> bool:
        return not self._reached and len(self._unreachable) >= UNREACHABLE_PAIRS


def make_key_pair() -> tuple[str, str]:
    """Return a certificate and its private key, PEM.

    The key is never written to a disk, and lives as long as a push. The certificate's dates have no meaning, since
    clocks of nodes may be wrong.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dtctl push")])
    utc = dt.timezone.utc
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime(2000, 1, 1, tzinfo=utc))
        .not_valid_after(dt.datetime(2100, 1, 1, tzinfo=utc))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem).decode(), private.decode()
