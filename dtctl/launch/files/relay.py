"""Plan of a relay: the node from which each node fetches blocks, so that each block leaves the control machine once.

Nodes are ordered by the time when they first needed the tree. Each node fetches from an earlier one, so that there is
no cycle; the first node gets the blocks from the control machine. When a node fails, the nodes that fetched from it get
another
earlier one, and the first remaining node gets the blocks from here. Every node checks every block.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dtctl.launch.control.link import quote_node_value
from dtctl.supervisor.messages.setup import PushState

MIN_NODES = 5
MIN_BYTES = 8 << 20
"""Number of bytes and of nodes below which a push is faster without blocks and certificates."""
CHILDREN = 2
"""Most nodes that fetch from one node, as long as there are other sources."""
MAX_SOURCES_FAILED = 3
"""Number of failed sources after which a node gets the rest from the control machine."""
UNREACHABLE_PAIRS = 2
"""Number of nodes that could not reach another one after which no node is assumed to, if none could so far."""


@dataclass(eq=False, slots=True, kw_only=True)
class RelayMember:
    """A node that gets blocks, and serves them if it has a port."""

    number: int
    node: str
    address: str
    port: int
    has_ssl: bool = True
    """False if the node uses an HMAC in place of TLS, and so exchanges blocks only with nodes that do the same."""
    depth: int = 0
    source: RelayMember | None = None
    avoid: set[RelayMember] = field(default_factory=set)
    """Nodes that have failed as sources of this one."""
    is_dead: bool = False
    children: int = 0
    is_reported: bool = False
    """True if a note has reported that this node no longer serves; one note is enough for all that fetched from it."""

    def can_serve(self, other: RelayMember) -> bool:
        """Return whether another, later node may fetch from this one."""
        is_there = bool(self.port and self.address) and not self.is_dead
        return is_there and self.has_ssl == other.has_ssl and self not in other.avoid


class BlockRelay:
    """The nodes that fetch the blocks of one tree from each other."""

    def __init__(self, nodes: int) -> None:
        """Create a relay without members; `nodes` is the number of nodes that will need the tree."""
        self._nodes = nodes
        self._lock = threading.Lock()
        self._members: list[RelayMember] = []
        self._pair: tuple[str, str] | None = None
        self._reached = False
        self._is_hmac_reported = False
        self._unreachable: set[RelayMember] = set()

    def is_worthwhile(self, size_bytes: int) -> bool:
        """Return whether so many bytes are sent faster in blocks from node to node."""
        return self._nodes >= MIN_NODES and size_bytes >= MIN_BYTES

    def key_pair(self) -> tuple[str, str]:
        """Return the certificate and the private key of this push as PEM, made at the first call."""
        with self._lock:
            if self._pair is None:
                self._pair = make_key_pair()
            return self._pair

    def join(self, node: str, answer: PushState, note: Callable[[str], None]) -> RelayMember:
        """Add a node that is ready to fetch."""
        has_ssl = answer.code != "no-ssl"
        if answer.code and has_ssl:
            note(f"{node} gets the files from here and not from other nodes: it cannot serve: {answer.message}")
        with self._lock:
            is_news = not has_ssl and not self._is_hmac_reported
            self._is_hmac_reported |= is_news
            member = RelayMember(
                number=len(self._members), node=node, address=answer.address, port=answer.port, has_ssl=has_ssl
            )
            self._members.append(member)
        if is_news:
            note(
                f"{node} has a Python without ssl: such nodes pass files on to each other unencrypted, with an HMAC of "
                "each piece"
            )
        return member

    def choose_source(self, member: RelayMember) -> RelayMember | None:
        """Return the node from which to fetch; None for the control machine."""
        with self._lock:
            self._leave_source(member)
            if not member.port or len(member.avoid) >= MAX_SOURCES_FAILED or self._cannot_reach():
                return None
            earlier = [other for other in self._members[: member.number] if other.can_serve(member)]
            if not earlier:
                return None
            # Nodes with fewer than CHILDREN children come first, and of these the nearest to this machine.
            source = min(earlier, key=lambda other: (max(other.children, CHILDREN - 1), other.depth))
            source.children += 1
            member.source, member.depth = source, source.depth + 1
            return source

    def count_relayed_block(self) -> None:
        """Record that a block has come from another node."""
        self._reached = True

    def fail(self, member: RelayMember, answer: PushState, note: Callable[[str], None]) -> None:
        """Record that a node did not get a block from its source."""
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
            note(
                f"{source.node} sent {member.node} a wrong block, which was dropped: {quote_node_value(answer.message)}"
            )
        elif is_new:
            note("the nodes cannot reach each other: each gets the files from here")
        elif answer.code != "unreachable" and is_first:
            note(f"{member.node} no longer gets blocks from {source.node}: {quote_node_value(answer.message)}")

    def remove_member(self, member: RelayMember, *, is_dead: bool) -> None:
        """Remove a node that has all blocks, or whose link is gone (`is_dead`)."""
        with self._lock:
            self._leave_source(member)
            member.is_dead = is_dead

    def _leave_source(self, member: RelayMember) -> None:
        if member.source is not None:
            member.source.children -= 1
            member.source = None

    def _cannot_reach(self) -> bool:
        return not self._reached and len(self._unreachable) >= UNREACHABLE_PAIRS


def make_key_pair() -> tuple[str, str]:
    """Return a certificate and its private key as PEM.

    The key is never written to a disk, and exists as long as a push. The dates in the certificate are not checked,
    since clocks of nodes may be wrong.
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
