"""Errors for the messages of OpenSSH: a message determines class and hint, and is always shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dtctl import shell
from dtctl.errors import AuthError, ConnectError, HostKeyError, TransportError
from dtctl.transport import hostkeys, sshconfig
from dtctl.transport.base import Target

_LOGGED_IN: Final = re.compile(r"^Authenticated to .*\n", re.MULTILINE)
_DEBUG: Final = re.compile(r"debug\d: ")
# Lines that ssh logs at each login and at each end, with or without an error.
_USUAL: Final = re.compile(rf"Authenticated |Transferred: |Bytes per second: |{_DEBUG.pattern}")
_BUSY: Final = re.compile(r"kex_exchange_identification|banner exchange|Connection reset by|Connection closed by")
_HOST_KEY: Final = re.compile(r"Host key verification failed|HOST IDENTIFICATION HAS CHANGED|REVOKED HOST KEY")
_REFUSED: Final = re.compile(r"Permission denied|Too many authentication failures|No more authentication methods")
_FINGERPRINT: Final = re.compile(r"Server host (?:key|certificate): (\S+) (SHA256:\S+)")
_CHANGED: Final = re.compile(r"Offending \S+ key in (?P<file>.+):(?P<line>\d+)")
_CHANGED_NAME: Final = re.compile(r"ost key for (\S+) has changed")
_OFFERED: Final = re.compile(r"Offering (?:\S+ )?public key: (.+?)(?: explicit)?\s*$", re.MULTILINE)
_ACCEPTED: Final = re.compile(r"Server accepts key: (.+?)(?: explicit)?\s*$", re.MULTILINE)
# Reasons why a key was not offered or was not accepted.
_UNUSABLE: Final = re.compile(
    r"Load key |signing failed|no mutual signature|Identity file .* not accessible|no such identity"
)
_SECOND_FACTOR: Final = re.compile(r"partial success")
_NO_SESSION: Final = re.compile(r"channel \d+: open failed")


@dataclass(slots=True)
class SshMessages:
    """Messages of ssh in one login."""

    log: str = ""
    """Log of this ssh."""
    stderr: str = ""
    """Output of the ssh that it started for a jump host, and of a proxy command."""

    def lines(self) -> list[str]:
        """Return the informative lines, those of a jump host first, since it comes first."""
        return [*_find_informative_lines(self.stderr), *_find_informative_lines(self.log)]

    def after_login(self) -> str:
        """Return the messages of ssh since it logged in, other than at each end; empty if there are none."""
        _, *after = _LOGGED_IN.split(self.log, maxsplit=1)
        return "; ".join(_find_informative_lines("".join(after)))

    def forget_debug(self) -> None:
        """Drop the debugging lines of ssh; the last line may be incomplete."""
        *lines, last = self.log.splitlines(keepends=True) or [""]
        self.log = "".join([*(line for line in lines if not _DEBUG.match(line)), last])


def _find_informative_lines(text: str) -> list[str]:
    """Return the informative lines of a log."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("@") and not _USUAL.match(line)]


def is_busy(words: SshMessages) -> bool:
    """Return whether a server ended the connection before its first line, as one does with too many logins."""
    text = "\n".join(words.lines())
    return _BUSY.search(text) is not None and not _HOST_KEY.search(text) and not _REFUSED.search(text)


def explain_missing_session(words: SshMessages) -> str:
    """Return the message of ssh about a server that has accepted a login and opens no session; empty without one."""
    return next((line for line in words.lines() if _NO_SESSION.search(line)), "")


def explain_failed_login(
    words: SshMessages, target: Target, debug: Callable[[], str], jump: Callable[[], str]
) -> TransportError:
    """Return the error of a login that failed.

    Args:
        words: of ssh.
        target: the node.
        debug: returns the output of `ssh -v`, for the fingerprint of a jump host's key that was refused.
        jump: the jump hosts of the node, as its configuration names them; empty without.
    """
    lines = words.lines()
    text = "\n".join(lines)
    # The ssh of a jump host prints first; the messages of this one about its end are a consequence.
    hop = jump() if words.stderr.strip() else ""
    if _HOST_KEY.search(text):
        return _explain_host_key(words, target, debug, hop)
    if _REFUSED.search(text):
        return _explain_refusal(words, target, hop)
    return _explain_connection(lines, target, hop)


def format_login_command(target: Target, *, batch: bool = True) -> str:
    """Return the command with which a user can try the login."""
    argv = ["ssh"]
    if batch:
        argv += ["-o", "BatchMode=yes"]
    if target.ssh_config:
        argv += ["-F", target.ssh_config]
    if target.known_hosts:
        argv += ["-o", f"UserKnownHostsFile={target.known_hosts}"]
    if target.identity_file:
        argv += ["-i", target.identity_file]
    if target.port:
        argv += ["-p", str(target.port)]
    argv.append(f"{target.user}@{target.address}" if target.user else target.address)
    return shell.join_command([*argv, "true"])


def _find_record_file(target: Target) -> str:
    """Return the file of known host keys that ssh reads for a node."""
    try:
        return hostkeys.choose_record_file(sshconfig.resolve_ssh_settings(target).known_hosts)
    except ConnectError:  # The configuration has another mistake, too.
        return target.known_hosts or hostkeys.choose_record_file(())


def _explain_host_key(words: SshMessages, target: Target, debug: Callable[[], str], hop: str) -> HostKeyError:
    at_jump_host = bool(hop) and _HOST_KEY.search(words.stderr) is not None
    said = "\n".join(_find_informative_lines(words.stderr if at_jump_host else words.log))
    debugged = debug() if at_jump_host else words.log
    node = f"{target.name} (jump host {hop})" if at_jump_host else target.name
    # The last key counts: the key of a jump host comes before that of the node, and the node is not reached if the jump
    # host's key is refused.
    keys = _FINGERPRINT.findall(debugged)
    key_type, fingerprint = keys[-1] if keys else ("a key", "")
    presented = f"{key_type} {fingerprint}".rstrip()
    record_file = _find_record_file(target)
    log_in = f"log in once by hand: {format_login_command(target, batch=False)}"
    if "revoked" in said.lower():
        return HostKeyError(
            f"{node}: it presents {presented}, which is marked as revoked",
            node=target.name,
            fingerprint=fingerprint,
            hint="do not connect; ask the administrator who revoked it",
        )
    if found := _CHANGED.search(said):
        file, line = found["file"], int(found["line"])
        named = _CHANGED_NAME.search(said)
        remedy = hostkeys.remove_command(named[1], file) if named else f"remove line {line} of {file}"
        message, hint = hostkeys.describe_change(presented, hostkeys.read_recorded_fingerprint(file, line), remedy)
        return HostKeyError(
            f"{node}: {message}",
            node=target.name,
            fingerprint=fingerprint,
            where=f"{file}:{line}",
            hint=f"{hint}, then {log_in}",
        )
    named = re.search(r"host key is known for (\S+)", said)
    is_direct = not at_jump_host and "Connecting to " in debugged and "proxy" not in debugged.lower()
    accept = f"{hostkeys.scan_command(named[1])} >> {record_file}" if named and is_direct else log_in
    return HostKeyError(
        f"{node}: its host key is unknown: it presents {presented}",
        node=target.name,
        fingerprint=fingerprint,
        where=record_file,
        hint=f"compare the fingerprint with its administrator's, then {accept}",
    )


def _explain_refusal(words: SshMessages, target: Target, hop: str) -> AuthError:
    at_jump_host = bool(hop) and _REFUSED.search(words.stderr) is not None
    said = words.stderr if at_jump_host else words.log or words.stderr
    last = next(line for line in reversed(_find_informative_lines(said)) if _REFUSED.search(line))
    name = f"its jump host {hop}" if at_jump_host else "it"
    # The ssh of a jump host does not log which keys it offers.
    tried = "" if at_jump_host else f"; tried: {', '.join(_OFFERED.findall(said)) or 'none'}"
    unusable = [line for line in words.lines() if _UNUSABLE.search(line)]
    message = f"{name} accepted no key{tried}: {'; '.join([*unusable, last])}"
    if _SECOND_FACTOR.search(said):
        by_hand = format_login_command(target, batch=False).replace("ssh", "ssh -M", 1).removesuffix(" true")
        hint = (
            "it wants a second factor: set ControlPath for it in ~/.ssh/config, open a connection by hand "
            f"(`{by_hand}`), and launch while that is open"
        )
    elif accepted := _ACCEPTED.findall(said):
        message = f"it accepts {accepted[-1]}, and ssh cannot sign with that key: {'; '.join([*unusable, last])}"
        hint = "unlock the key with `ssh-add` before the launch; an agent that has it must sign without a question"
    elif "password" in last or "keyboard-interactive" in last:
        arguments = format_login_command(target, batch=False).removeprefix("ssh ").removesuffix(" true")
        hint = f"dtctl never asks for passwords: `ssh-copy-id {arguments}` lets your key in there"
    elif "Too many" in last:
        hint = "the agent has more keys than the server tries: name one with `cluster.identity_file`"
    else:
        hint = (
            f"try `{format_login_command(target)}`; `cluster.user` and `cluster.identity_file` name another login, and "
            "a key with a passphrase has to be in the agent (`ssh-add`)"
        )
    return AuthError(message, node=target.name, hint=hint)


def build_silent_server_error(node: str, at: str = "") -> ConnectError:
    """Return the error of a node that accepts a connection and sends nothing: its kernel runs, its SSH server does not.

    Args:
        node: name of the node.
        at: text in front of the message, such as the jump host's name.
    """
    return ConnectError(
        f"{at}it accepts connections, but its SSH server sends nothing",
        node=node,
        hint="its programs may hang, or wait for memory or a disk: look at its console (top, dmesg), and restart sshd "
        "or the machine",
    )


def _explain_connection(lines: Sequence[str], target: Target, hop: str) -> ConnectError:
    text = "\n".join(lines)
    at = f"jump host {hop}: " if hop else ""
    first = lines[0 if hop else -1] if lines else "ssh ended with status 255 and said nothing"
    address = f"{target.address}" + (f" port {target.port}" if target.port else "")
    if found := re.search(r"Could not resolve hostname (\S+?): (.*)", text):
        return ConnectError(
            f"{at}its name cannot be resolved: {found[2]} ({found[1]})",
            node=target.name,
            hint="check the spelling, or give `address` in `cluster.nodes`",
        )
    if "Connection refused" in text:
        hint = "is its SSH server running, and is `port` right?"
        return ConnectError(f"{at}its SSH port refuses connections: {first}", node=target.name, hint=hint)
    if "during banner exchange" in text:
        return build_silent_server_error(target.name, at)
    if re.search(r"timed out|Operation timed|Timeout", text, re.IGNORECASE):
        hint = "is it up, and does a firewall drop the packets?"
        return ConnectError(f"{at}no answer while connecting to {address}: {first}", node=target.name, hint=hint)
    hint = f"does `{format_login_command(target)}` work?"
    if "Bad configuration option" in text or "bad configuration" in text or "terminating" in text:
        return ConnectError(f"OpenSSH refuses its configuration: {lines[0]}", node=target.name, hint=hint)
    return ConnectError(f"{at}connecting to {address} failed: {first}", node=target.name, hint=hint)
