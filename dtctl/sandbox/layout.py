"""Names, addresses and files of a sandbox. Pure, but for asking the kernel which networks are taken.

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

from dtctl.errors import SandboxError

MAX_NODES = 250
STATE_FILE = "sandbox.json"
CONTROL = "control"
"""Name of this machine where a fault is between a host and something else."""
PREFIX_LENGTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxNode:
    """One virtual host."""

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
    """Its start, in clock ticks since boot, which distinguishes it from a later process of the same id."""
    rootless: bool
    """True if the network is in a private world that only the keeper can reach."""
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
        names = ", ".join(node.name for node in self.nodes)
        raise SandboxError(f"the sandbox has no host {name}", hint=f"its hosts are {names}")


def default_name() -> str:
    """Return the sandbox that commands mean when none is named."""
    return os.environ.get("DTCTL_SANDBOX", "default")


def state_dir(name: str) -> Path:
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


def tag(state: Path) -> str:
    """Return six characters that distinguish this sandbox's interfaces from those of another one."""
    return hashlib.blake2b(os.fsencode(state), digest_size=3).hexdigest()


def bridge_name(state: Path) -> str:
    """Return the name of the bridge; interfaces may have 15 characters."""
    return f"dt{tag(state)}"


def link_name(state: Path, index: int) -> str:
    """Return the name of the bridge's end of a host's cable."""
    return f"dt{tag(state)}n{index}"


def mac_address(state: Path, index: int) -> str:
    """Address of a host's network card: the same after it was off, or its peers would look for the old one."""
    octets = bytes.fromhex(tag(state)) + bytes([index])
    return "02:dc:" + ":".join(f"{octet:02x}" for octet in octets)


def choose_network(state: Path, taken: Iterable[str]) -> ipaddress.IPv4Network:
    """Return a /24 of 10.0.0.0/8 that overlaps none of `taken`; the same for the same sandbox if it is free.

    Raises:
        SandboxError: everything is taken.
    """
    used = [ipaddress.ip_network(text, strict=False) for text in taken]
    start = int(tag(state)[:4], 16)
    for offset in range(65_536):
        number = (start + offset) % 65_536
        candidate = ipaddress.IPv4Network(((10 << 24) | (number << 8), PREFIX_LENGTH))
        if not any(candidate.overlaps(network) for network in used if network.version == 4):
            return candidate
    raise SandboxError("no private network is free for the sandbox", hint="see `ip route`")


def routes_of(output: str) -> list[str]:
    """Networks in the output of `ip -json route`, the default route aside."""
    return [row["dst"] for row in json.loads(output or "[]") if row.get("dst") not in (None, "default")]


def save(sandbox: Sandbox) -> None:
    """Write the sandbox down, in one step."""
    path = sandbox.state / STATE_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(sandbox), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load(state: Path) -> Sandbox | None:
    """Return the sandbox as it was written down; None when there is none, or not wholly."""
    try:
        data = json.loads((state / STATE_FILE).read_text(encoding="utf-8"))
        return Sandbox(**{**data, "nodes": tuple(SandboxNode(**node) for node in data["nodes"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
