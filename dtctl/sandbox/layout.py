"""Names, addresses and files of a sandbox. Pure, except that it asks the kernel for the networks in use.

STATE/sandbox.json        the sandbox, while it is up
STATE/id, id.pub          the key that logs in to every host
STATE/known_hosts         the hosts' keys
STATE/keeper.sock         where the keeper takes requests
STATE/hosts/NAME/         a host's own files: home/, ssh/, etc/; no host sees those of another
STATE/slurm/              Slurm's files, if the hosts are a cluster of it
STATE/self/               on every host, its own folder of hosts/
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from dtctl.errors import SandboxError, suggest_node

MAX_NODES = 250
STATE_FILE = "sandbox.json"
CONTROL = "control"
"""Name of this machine where a fault is between a host and something else."""
PREFIX_LENGTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxNode:
    """A virtual host of a sandbox."""

    name: str
    address: str
    index: int
    """Number from 1; the last part of the address."""
    pid: int
    """Process id of the host's init on this machine; 0 before the host was ever switched on."""
    started: int = 0
    """Start of that init, in clock ticks since boot, which distinguishes it from a later process of the same id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A set of virtual hosts that is up."""

    name: str
    state_dir: str
    keeper: int
    """Process id of the keeper."""
    keeper_started: int
    """Start of the keeper's process, in clock ticks since boot, which distinguishes it from a later one of the same
    id."""
    rootless: bool
    """True if the network is in a namespace that only the keeper can reach."""
    user: str
    """Login user on every host."""
    bridge: str
    bridge_address: str
    """This machine's address on the hosts' network."""
    nodes: tuple[SandboxNode, ...]
    slurm: bool = False
    """True if the hosts are a Slurm cluster."""

    @property
    def state(self) -> Path:
        """Folder with the sandbox's files."""
        return Path(self.state_dir)

    @property
    def identity_file(self) -> Path:
        """Private key that every host accepts."""
        return self.state / "id"

    @property
    def known_hosts(self) -> Path:
        """Host keys of all hosts."""
        return self.state / "known_hosts"

    @property
    def home(self) -> Path:
        """Home of the login user, the same path with other contents on every host."""
        return self.state / "self" / "home"

    def peer(self, name: str) -> SandboxNode:
        """Return the other side of a fault: a host, or `control`, which is this machine as the hosts see it.

        Raises:
            SandboxError: there is none of this name.
        """
        if name == CONTROL:
            return SandboxNode(name=CONTROL, address=self.bridge_address, index=0, pid=0)
        return self.node(name)

    def node(self, name: str) -> SandboxNode:
        """Return the host of this name.

        Raises:
            SandboxError: there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        names = [node.name for node in self.nodes]
        hint = suggest_node(name, names, f"its hosts are {', '.join(names)}")
        raise SandboxError(f"the sandbox has no host {name}", where=f"sandbox {self.name}", hint=hint)


def choose_default_name() -> str:
    """Return the sandbox that commands mean when none is named."""
    return os.environ.get("DTCTL_SANDBOX", "default")


def build_state_dir(name: str) -> Path:
    """Folder of the sandbox of this name.

    Raises:
        SandboxError: the name cannot be that of a folder.
    """
    if not name or not all(c.isalnum() or c in "-_" for c in name) or len(name) > 40:
        raise SandboxError(f"{name!r} cannot be the name of a sandbox", hint="use letters, digits, - and _")
    base = os.environ.get("DTCTL_SANDBOX_DIR")
    if base is None:
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        base += "/dtctl/sandbox"
    return Path(base).expanduser().absolute() / name


def compute_sandbox_tag(state: Path) -> str:
    """Return six characters that distinguish this sandbox's interfaces from those of another one."""
    return hashlib.blake2b(os.fsencode(state), digest_size=3).hexdigest()


def build_bridge_name(state: Path) -> str:
    """Return the name of the bridge; interfaces may have 15 characters."""
    return f"dt{compute_sandbox_tag(state)}"


def link_name(state: Path, index: int) -> str:
    """Return the name of the bridge's end of a host's cable."""
    return f"dt{compute_sandbox_tag(state)}n{index}"


def build_mac_address(state: Path, index: int) -> str:
    """Return the MAC address of a host: the same after it was off, since its peers have it in their tables."""
    octets = bytes.fromhex(compute_sandbox_tag(state)) + bytes([index])
    return "02:dc:" + ":".join(f"{octet:02x}" for octet in octets)


def choose_network(state: Path, taken: Iterable[str]) -> ipaddress.IPv4Network:
    """Return a /24 of 10.0.0.0/8 that overlaps none of `taken`; the same for the same sandbox if it is free.

    Raises:
        SandboxError: all networks are in use.
    """
    used = [ipaddress.ip_network(text, strict=False) for text in taken]
    start = int(compute_sandbox_tag(state)[:4], 16)
    for offset in range(65_536):
        number = (start + offset) % 65_536
        candidate = ipaddress.IPv4Network(((10 << 24) | (number << 8), PREFIX_LENGTH))
        if not any(candidate.overlaps(network) for network in used if network.version == 4):
            return candidate
    raise SandboxError("no private network is free for the sandbox", hint="see `ip route`")


def parse_routes(output: str) -> list[str]:
    """Return the networks in the output of `ip -json route`, without the default route."""
    return [row["dst"] for row in json.loads(output or "[]") if row.get("dst") not in (None, "default")]


def write_sandbox_state(sandbox: Sandbox) -> None:
    """Write the record of the sandbox in one step."""
    path = sandbox.state / STATE_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(sandbox), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load(state: Path) -> Sandbox | None:
    """Return the sandbox from its record; None if there is no complete record."""
    try:
        data = json.loads((state / STATE_FILE).read_text(encoding="utf-8"))
        return Sandbox(**{**data, "nodes": tuple(SandboxNode(**node) for node in data["nodes"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
