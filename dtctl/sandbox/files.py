"""The files of a sandbox: keys, configuration of the SSH servers, and the files of each host's own /etc."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtctl.sandbox.layout import SandboxNode

SSHD_CONFIG = """\
# A throwaway server of a dtctl sandbox; reachable only from this machine.
Port 22
ListenAddress 0.0.0.0
HostKey {folder}/host_key
AuthorizedKeysFile {state}/id.pub
PidFile none
UsePAM no
StrictModes no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
X11Forwarding no
# Fan-out from one client opens many connections at once.
MaxStartups 500
MaxSessions 500
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256
Subsystem sftp internal-sftp
{more}
"""


def write_host_files(
    state: Path, nodes: Sequence[SandboxNode], *, uid: int, bridge_address: str, environ: Mapping[str, str]
) -> None:
    """Write everything that the hosts need before they come up.

    Args:
        state: the sandbox's folder, which exists.
        nodes: its hosts.
        uid: of the login user.
        bridge_address: this machine's address on the hosts' network.
        environ: variables for logins.
    """
    (state / "self").mkdir(exist_ok=True)
    public = _write_key(state / "id")
    (state / "id.pub").write_text(public + " dtctl-sandbox\n", encoding="ascii")
    (state / "id.pub").chmod(0o600)
    passwd = _build_passwd_text(uid, state / "self" / "home")
    hosts = "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.name}\n" for node in nodes)
    hosts += f"{bridge_address} control\n"
    # A server on an IPv6 socket sees IPv4 clients under these addresses, and torch looks up their names.
    hosts += "".join(f"::ffff:{node.address} {node.name}\n" for node in nodes) + "::ffff:127.0.0.1 localhost\n"
    known_hosts = []
    set_env = "".join(f"SetEnv {key}={value}\n" for key, value in environ.items())
    for node in nodes:
        folder = state / "hosts" / node.name
        for name in ("home", "ssh", "etc"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "home").chmod(0o700)
        known_hosts.append(f"{node.address},{node.name} {_write_key(folder / 'ssh' / 'host_key')}\n")
        config = SSHD_CONFIG.format(folder=state / "self" / "ssh", state=state, more=set_env)
        (folder / "ssh" / "sshd_config").write_text(config, encoding="utf-8")
        etc = folder / "etc"
        (etc / "passwd").write_text(passwd, encoding="utf-8")
        (etc / "hosts").write_text(hosts, encoding="utf-8")
        (etc / "hostname").write_text(node.name + "\n", encoding="utf-8")
        # No server listens at this address, so a name that is not in /etc/hosts is refused without a wait.
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n", encoding="utf-8")
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n", encoding="utf-8")
    (state / "known_hosts").write_text("".join(known_hosts), encoding="ascii")


def _write_key(path: Path) -> str:
    """Write a new ed25519 key; return its public half in the form of authorized_keys."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(private)
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")


def _build_passwd_text(uid: int, home: Path) -> str:
    """Return the machine's /etc/passwd with a plain shell and another home for the login user.

    A shell that reads start-up files (pyenv, conda) would cost more than the SSH connection, on every command.
    """
    name = pwd.getpwuid(uid).pw_name
    lines = []
    for line in Path("/etc/passwd").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) == 7:
            fields[5], fields[6] = str(home), "/bin/sh"
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"
