"""Known host keys of a node in the user's and the system's files, compared with the key that the node shows.

Reads the format of sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT": lists, wildcards, negation, `[host]:port`, hashed names,
`@revoked`. Certificates are not checked here; `find_authority` finds the lines of those who sign them. Only the lines
of the node are decoded, so a file with thousands of lines costs a scan.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from dtctl import shell
from dtctl.errors import HostKeyError


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """A line of a known_hosts file for the node."""

    key_type: str
    blob: bytes
    revoked: bool
    place: str
    """Place of the line: `file:line`."""
    confirms_only: bool = False
    """Found under the name without its port: another key is not a changed key."""


def compute_key_fingerprint(blob: bytes) -> str:
    """`SHA256:...`, as OpenSSH prints it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode()
    return "SHA256:" + digest.rstrip("=")


def lookup_name(host: str, port: int, alias: str | None = None) -> str:
    """The name under which OpenSSH files the key of `host` at `port`; a HostKeyAlias is used without the port."""
    name = alias or (host if port == 22 else f"[{host}]:{port}")
    return name.lower()


@lru_cache(maxsize=8)
def _read_host_lines(path: str) -> tuple[tuple[int, str], ...]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return tuple((number, line) for number, line in lines if line and not line.startswith("#"))


def list_known_keys(name: str, files: Sequence[str]) -> list[KnownKey]:
    """Return the keys on record for `name`, in the order of the files.

    As in OpenSSH, a name with a port that has no record is looked up without its port. A key found then may confirm the
    node's key but not refuse it, because another server may answer at another port.
    """
    keys = _find_recorded_keys(name.lower(), files)
    host, _, port = name.partition("]:")
    if port and not any(not key.revoked for key in keys):
        keys += [replace(key, confirms_only=True) for key in _find_recorded_keys(host[1:].lower(), files)]
    return keys


def find_authority(name: str, files: Sequence[str]) -> str | None:
    """Return the place of a line that lets an authority vouch for a name, as `file:line`; None if there is none."""
    for path in files:
        for number, line in _read_host_lines(path):
            fields = line.split()
            if fields[0] == "@cert-authority" and len(fields) > 3 and _is_host_match(fields[1], name.lower()):
                return f"{path}:{number}"
    return None


def _find_recorded_keys(name: str, files: Iterable[str]) -> list[KnownKey]:
    keys = []
    for path in files:
        for number, line in _read_host_lines(path):
            fields = line.split()
            marker = fields.pop(0) if fields[0].startswith("@") else ""
            if len(fields) < 3 or marker == "@cert-authority" or not _is_host_match(fields[0], name):
                continue
            try:
                blob = base64.b64decode(fields[2], validate=True)
            except binascii.Error:
                continue
            place = f"{path}:{number}"
            keys.append(KnownKey(key_type=fields[1], blob=blob, revoked=marker == "@revoked", place=place))
    return keys


def _is_host_match(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        return _matches_hash(patterns, name)
    matched = False
    for pattern in patterns.split(","):
        negated = pattern.startswith("!")
        if _matches_one(pattern.lstrip("!").lower(), name):
            if negated:
                return False
            matched = True
    return matched


def _matches_one(pattern: str, name: str) -> bool:
    if pattern == name:
        return True
    if "*" not in pattern and "?" not in pattern:
        return False
    return fnmatchcase(name, pattern.replace("[", "[[]"))  # brackets have no special meaning in host patterns


def _matches_hash(entry: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(field) for field in entry.split("|")[2:4])
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)


def choose_record_file(files: Sequence[str]) -> str:
    """Return the file of known host keys to which a new key can be added."""
    return next((file for file in files if file not in ("/dev/null", "none")), "~/.ssh/known_hosts")


def scan_command(name: str) -> str:
    """Return the command that prints the host keys of a name as `lookup_name` gives it."""
    host, _, port = name.partition("]:")
    return f"ssh-keyscan -p {port} {host[1:]}" if port else f"ssh-keyscan {name}"


def remove_command(name: str, file: str) -> str:
    """Return the command that takes the host keys of a name out of a file."""
    return shell.join_command(["ssh-keygen", "-R", name, "-f", file])


def read_recorded_fingerprint(file: str, number: int) -> str:
    """Return the fingerprint of the key in a line of a known_hosts file; empty where there is none."""
    line = dict(_read_host_lines(file)).get(number, "")
    fields = [field for field in line.split() if not field.startswith("@")]
    try:
        return compute_key_fingerprint(base64.b64decode(fields[2], validate=True))
    except (IndexError, binascii.Error):
        return ""


def describe_change(presented: str, recorded: str, remedy: str) -> tuple[str, str]:
    """Return the fact and the hint of a host key that is not the one on record.

    Args:
        presented: type and fingerprint of the key that the node has shown.
        recorded: fingerprint on record; empty if it is not known.
        remedy: what takes the old key out of the record.
    """
    record = f"the recorded key is {recorded}" if recorded else "not the key on record"
    return (
        f"its host key has changed: it presents {presented}, {record}",
        "either the node was reinstalled or another machine answers in its place. If its administrator confirms the "
        f"new fingerprint: {remedy}",
    )


def check_host_key(
    name: str, key_type: str, blob: bytes, recorded_keys: Sequence[KnownKey], *, node: str, files: Sequence[str]
) -> None:
    """Refuse a key that is not the one on record.

    Args:
        name: as `lookup_name` gives it.
        key_type: of the key that the node showed.
        blob: that key.
        recorded_keys: the keys on record for the name.
        node: name in the spec.
        files: where the record was looked up; the first is where a new key belongs.

    Raises:
        HostKeyError: the key is unknown, another one, or revoked.
    """
    node_fingerprint = compute_key_fingerprint(blob)
    for key in recorded_keys:
        if key.blob == blob and key.revoked:
            raise HostKeyError(
                f"{node}: it presents host key {node_fingerprint}, which is marked as revoked",
                node=node,
                fingerprint=node_fingerprint,
                where=key.place,
                hint="do not connect; ask the administrator who revoked it",
            )
    if any(key.blob == blob for key in recorded_keys if not key.revoked):
        return
    valid = [key for key in recorded_keys if not key.revoked and not key.confirms_only]
    record_file = choose_record_file(files)
    if valid:
        recorded = next((key for key in valid if key.key_type == key_type), valid[0])
        message, hint = describe_change(
            f"{key_type} {node_fingerprint}", compute_key_fingerprint(recorded.blob), remove_command(name, record_file)
        )
        raise HostKeyError(
            f"{node}: {message}",
            node=node,
            fingerprint=node_fingerprint,
            where=recorded.place,
            hint=f"{hint}, then connect once with ssh",
        )
    raise HostKeyError(
        f"{node}: its host key is unknown: it presents {key_type} {node_fingerprint}",
        node=node,
        fingerprint=node_fingerprint,
        where=record_file,
        hint=f"compare the fingerprint with its administrator's, then: {scan_command(name)} >> {record_file}",
    )
