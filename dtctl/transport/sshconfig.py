"""Login of a node by the user's OpenSSH configuration, as `ssh NODE` would do it.

`ssh -G` of OpenSSH reads the configuration, so Include, Match and all other keys have their meaning there. Only the
tokens of IdentityFile and ProxyCommand (`%h`), which it prints unchanged, are filled in here. It runs only if there is
a configuration, since a process per node takes time.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtctl.errors import ConnectError
from dtctl.transport.base import Target

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
NO_CONFIG = "none"
"""Value of `ssh_config` that means: read no configuration (as `ssh -F none`)."""

# Keywords that change neither the host nor the user of a connection; Debian's own ssh_config has only these.
_HARMLESS = re.compile(
    r"(?i)((sendenv|hashknownhosts|gssapi\w*|forwardx11\w*|setenv|serveralive\w*|visualhostkey)[\s=]|host\s+\*\s*$)"
)
# Keywords for logins that only OpenSSH itself supports, each with the values that have no effect.
_OPENSSH_ONLY: Mapping[str, tuple[str, ...]] = {
    "CertificateFile": (),
    "IdentityAgent": ("SSH_AUTH_SOCK",),
    "KnownHostsCommand": ("none",),
    "PKCS11Provider": ("none",),
}
_INCLUDE = re.compile(r"(?i)include(?:\s*=\s*|\s+)(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """Everything that is needed to connect to a node."""

    host: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    known_hosts: tuple[str, ...]
    host_key_alias: str | None = None
    proxy_jump: tuple[str, ...] = field(default=())
    """`[user@]host[:port]`, in the order in which they are passed; `parse_jump_host` takes them apart."""
    proxy_command: str | None = None
    identities_only: bool = False
    """Offer only the identity files, not all keys of the agent."""


def resolve_ssh_settings(target: Target) -> SshSettings:
    """Return the spec's settings of a node, with missing ones from the OpenSSH configuration.

    Raises:
        ConnectError: OpenSSH does not accept the configuration.
    """
    options = _ask_openssh(target) if _has_config(target.ssh_config) else {}
    require_supported_options(target, options)
    jump = _first_value(options, "proxyjump")
    command = _first_value(options, "proxycommand")
    host = _first_value(options, "hostname") or target.address
    port = target.port or int(_first_value(options, "port") or 22)
    user = target.user or _first_value(options, "user") or getpass.getuser()
    alias = _first_value(options, "hostkeyalias")
    tokens = {"h": host, "n": target.address, "p": str(port), "r": user, "k": alias or target.address}
    known_hosts = [target.known_hosts] if target.known_hosts else _known_hosts_files(options)
    files: list[str] = list(DEFAULT_KEYS)
    if target.identity_file:
        files = [target.identity_file]
    elif options:
        files = [_fill_in(_expand_variables(file), tokens) for file in options.get("identityfile", files)]
    return SshSettings(
        host=host,
        port=port,
        user=user,
        identity_files=tuple(str(Path(file).expanduser()) for file in files),
        known_hosts=tuple(str(Path(file).expanduser()) for file in known_hosts),
        host_key_alias=alias,
        proxy_jump=tuple(jump.split(",")) if jump and jump != "none" else (),
        proxy_command=_fill_in(command, tokens) if command and command != "none" else None,
        identities_only=_first_value(options, "identitiesonly") == "yes" or target.identity_file is not None,
    )


def require_supported_options(target: Target, options: Mapping[str, Sequence[str]]) -> None:
    """Refuse a configuration that only OpenSSH itself can follow.

    Args:
        target: the node.
        options: of `ssh -G`.

    Raises:
        ConnectError: it has such a key.
    """
    for key, harmless in _OPENSSH_ONLY.items():
        asked = [value for value in options.get(key.lower(), ()) if value not in harmless]
        if asked:
            raise ConnectError(
                f"the OpenSSH configuration has `{key} {asked[0]}` for it, which paramiko cannot follow",
                node=target.name,
                hint="install OpenSSH's client and set `cluster.ssh: openssh`, or take the line out",
            )


def parse_jump_host(text: str) -> tuple[str | None, str, int | None]:
    """Return user, host and port of a jump host from `[user@]host[:port]`, with numeric addresses in brackets."""
    user, _, place = text.rpartition("@")
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        port = port.lstrip(":")
    elif place.count(":") > 1:  # an IPv6 address
        host, port = place, ""
    else:
        host, _, port = place.partition(":")
    return user or None, host, int(port) if port else None


def _fill_in(text: str, tokens: Mapping[str, str]) -> str:
    """Return `text` with the tokens of ssh_config(5) replaced; unknown ones stay unchanged."""
    system = {"%": "%", "d": str(Path.home()), "u": getpass.getuser(), "i": str(os.getuid()), "l": os.uname().nodename}
    values = {**system, "L": system["l"].partition(".")[0], **tokens}
    return re.sub("%(.)", lambda match: values.get(match[1], match[0]), text)


def _expand_variables(text: str) -> str:
    """Return `text` with `${NAME}` replaced by environment variables, as OpenSSH does in names of files."""
    return re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), text)


def _first_value(options: Mapping[str, Sequence[str]], key: str) -> str | None:
    values = options.get(key)
    return values[0] if values else None


def _known_hosts_files(options: Mapping[str, Sequence[str]]) -> list[str]:
    # `ssh -G` prints several files on one line without quotes, so a blank separates two files only if a path begins
    # after it.
    user = re.split(r"\s+(?=[/~])", _first_value(options, "userknownhostsfile") or " ".join(USER_KNOWN_HOSTS))
    system = re.split(r"\s+(?=[/~])", _first_value(options, "globalknownhostsfile") or " ".join(SYSTEM_KNOWN_HOSTS))
    return [*user, *system]


def _has_config(named: str | None) -> bool:
    """Return whether there is a configuration that could have settings of a node."""
    if named == NO_CONFIG:
        return False
    if named is not None:
        return True
    files = [Path("~/.ssh/config").expanduser(), SYSTEM_CONFIG]
    return any(_says_something(path, path.parent) for path in files)


def _says_something(path: Path, folder: Path) -> bool:
    """Return whether a file has lines that may have an effect; relative includes begin in `folder`."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#") or _HARMLESS.match(text):
            continue
        include = _INCLUDE.match(text)
        if include is None or any(
            _says_something(Path(file), folder) for file in _list_included_files(include[1], folder)
        ):
            return True
    return False


def _list_included_files(patterns: str, folder: Path) -> list[str]:
    names = [str(folder / Path(pattern.strip('"')).expanduser()) for pattern in patterns.split()]
    return [path for name in names for path in glob.glob(name)]  # noqa: PTH207 - Path.glob takes no absolute pattern


def _ask_openssh(target: Target) -> dict[str, list[str]]:
    """Return the output of `ssh -G`, key -> values in order; empty without OpenSSH on this machine."""
    argv = ["ssh", "-G"]
    if target.ssh_config:
        argv += ["-F", str(Path(target.ssh_config).expanduser())]
    if target.user:
        argv += ["-l", target.user]
    if target.port:
        argv += ["-p", str(target.port)]
    argv += ["--", target.address]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return {}
    except subprocess.TimeoutExpired:
        raise ConnectError(
            "`ssh -G` did not answer within 10 s", node=target.name, hint="does a `Match exec` of ~/.ssh/config hang?"
        ) from None
    if done.returncode != 0:
        text = done.stderr.strip().splitlines()
        raise ConnectError(
            f"OpenSSH refuses its configuration: {text[-1] if text else 'unknown error'}",
            node=target.name,
            hint=f"try `ssh -G {target.address}`",
        )
    options: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value)
    return options
