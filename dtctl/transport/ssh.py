"""SSH by paramiko, which is imported here and nowhere else.

Behaves as OpenSSH in batch mode: host keys are checked and never learnt, no password is asked for, no agent is
forwarded. Connections are kept open; every command is a channel of its own without a terminal.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

# paramiko.config imports `invoke` if it is there, for a feature of its configuration parser that is not used here; that
# takes longer than all the rest of paramiko.
_HIDDEN = "invoke" not in sys.modules
if _HIDDEN:
    sys.modules["invoke"] = None  # type: ignore[assignment]  # the documented way to make an import fail
import paramiko  # noqa: E402

if _HIDDEN:
    del sys.modules["invoke"]

from dtctl.errors import AuthError, ConnectError, HostKeyError, TransportError  # noqa: E402
from dtctl.transport import hostkeys, sshconfig  # noqa: E402
from dtctl.transport.base import Target  # noqa: E402
from dtctl.transport.dial import EarlyConnections, OpenSocket, PendingConnection, open_socket  # noqa: E402
from dtctl.transport.openssh_errors import build_silent_server_error  # noqa: E402

CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
"""Ciphers in order of preference: GCM needs no separate MAC, which halves the cost of a push."""
KEX = ("curve25519-sha256", "curve25519-sha256@libssh.org", "ecdh-sha2-nistp256")
"""Preferred key exchanges; the others that paramiko offers follow. curve25519 costs the least on both sides."""
KEEPALIVE_S = 5
TRIES = 3
MAX_JUMPS = 4
WINDOW_BYTES = 4 << 20
STDERR_BYTES = 1 << 20
"""Bytes of standard error that are read at a time; a node could send more as fast as it is read."""

logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


@contextmanager
def translate_ssh_errors(node: str, *, doing: str) -> Iterator[None]:
    """Convert the errors of paramiko and of sockets to those of dtctl.

    Raises:
        TransportError: of the class for the reason.
    """
    try:
        yield
    except TransportError:
        raise
    except paramiko.PasswordRequiredException as exc:
        raise AuthError(
            "the private key is locked by a passphrase", node=node, hint="unlock it with `ssh-add` before the launch"
        ) from exc
    except paramiko.AuthenticationException as exc:
        raise AuthError(
            f"the node refused the login: {_one_line(exc)}",
            node=node,
            hint="set `cluster.user` and `cluster.identity_file` to what `ssh` logs in with",
        ) from exc
    except paramiko.BadHostKeyException as exc:
        fingerprint = hostkeys.compute_key_fingerprint(exc.key.asbytes())
        raise HostKeyError(
            f"the node's host key has changed: {fingerprint}",
            node=node,
            fingerprint=fingerprint,
            hint="compare the fingerprint with its administrator's",
        ) from exc
    except socket.gaierror as exc:
        raise ConnectError(
            f"its name cannot be resolved: {exc.strerror}",
            node=node,
            hint="check the spelling, or give `address` in `cluster.nodes`",
        ) from exc
    except _SilentServerError as exc:
        raise build_silent_server_error(node) from exc
    except TimeoutError as exc:
        raise ConnectError(
            f"no answer while {doing}", node=node, hint="is it up, and does a firewall drop the packets?"
        ) from exc
    except ConnectionRefusedError as exc:
        raise ConnectError(
            "its SSH port refuses connections", node=node, hint="is its SSH server running, and is `port` right?"
        ) from exc
    except Exception as exc:
        # Not only SSHException, EOFError and OSError: paramiko's thread passes on any error that a malformed packet
        # has caused (Transport.run, "Unknown exception").
        raise ConnectError(
            f"{doing} failed: {_one_line(exc)}", node=node, hint="does `ssh` with the same user, address and port work?"
        ) from exc


def _one_line(exc: BaseException) -> str:
    """Return the message of an exception, without the line ends that a server may have put in."""
    return " ".join(str(exc).split()) or type(exc).__name__


class _SilentServerError(TimeoutError):
    """A connection was opened, and the server has not answered in it."""


class SshStream:
    """A command on a node: one channel."""

    def __init__(self, channel: paramiko.Channel, *, node: str) -> None:
        self._channel = channel
        self._node = node

    def read(self, size: int) -> bytes:
        """See `dtctl.transport.base.ByteStream`."""
        try:
            return self._channel.recv(size)
        except (OSError, EOFError, paramiko.SSHException):
            return b""

    def read_stderr(self) -> bytes:
        """See `dtctl.transport.base.ByteStream`."""
        data = b""
        while self._channel.recv_stderr_ready() and len(data) < STDERR_BYTES:
            data += self._channel.recv_stderr(1 << 16)
        return data

    def write(self, data: bytes) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        with translate_ssh_errors(self._node, doing="sending"):
            self._channel.sendall(data)

    def close_stdin(self) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        with translate_ssh_errors(self._node, doing="closing"):
            self._channel.shutdown_write()

    def exit_status(self, timeout_s: float) -> int | None:
        """See `dtctl.transport.base.ByteStream`."""
        if not self._channel.status_event.wait(timeout_s):
            return None
        status = self._channel.recv_exit_status()
        return status if status >= 0 else None  # paramiko does not pass on which signal it was

    def close(self) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        self._channel.close()


class SshConnection:
    """Authenticated connection to a node, with those to its jump hosts."""

    def __init__(self, target: Target, transport: paramiko.Transport, hops: tuple[SshConnection, ...]) -> None:
        self._target = target
        self.transport = transport
        self._hops = hops

    @property
    def target(self) -> Target:
        """See `dtctl.transport.base.Connection`."""
        return self._target

    def peer_address(self) -> str:
        """See `dtctl.transport.base.Connection`."""
        direct = isinstance(self.transport.sock, socket.socket) and self.transport.sock.family != socket.AF_UNIX
        return str(self.transport.getpeername()[0]) if direct else ""

    def open(self, command: str) -> SshStream:
        """See `dtctl.transport.base.Connection`."""
        with translate_ssh_errors(self._target.name, doing="opening a channel"):
            channel = self.transport.open_session(window_size=WINDOW_BYTES, timeout=self._target.connect_timeout_s)
            channel.exec_command(command)
            return SshStream(channel, node=self._target.name)

    def alive(self) -> bool:
        """See `dtctl.transport.base.Connection`."""
        return self.transport.is_active()

    def close(self) -> None:
        """See `dtctl.transport.base.Connection`."""
        # Transport.close() waits for its thread to notice; with the socket gone that takes no time.
        with contextlib.suppress(OSError):
            self.transport.sock.shutdown(socket.SHUT_RDWR)
        self.transport.close()
        for hop in self._hops:
            hop.close()


class SshTransport:
    """Connects to nodes over SSH; keys are read once for all of them."""

    def __init__(self, *, open_socket: OpenSocket = open_socket, early_calls: EarlyConnections | None = None) -> None:
        """Prepare to connect.

        Args:
            open_socket: makes the TCP connection.
            early_calls: connections to nodes that are already being opened.
        """
        self._open_socket = open_socket
        self._early_calls = early_calls
        self._lock = threading.Lock()
        self._keys: dict[str, paramiko.PKey | str] = {}
        self._agent: tuple[paramiko.AgentKey, ...] | None = None

    def connect(self, target: Target) -> SshConnection:
        """See `dtctl.transport.base.Transport`."""
        return self._connect_target(target, via=None, depth=0)

    def _connect_target(self, target: Target, *, via: SshConnection | None, depth: int) -> SshConnection:
        call = self._early_calls.pop_connection(target) if self._early_calls is not None and depth == 0 else None
        settings = call.settings if call else sshconfig.resolve_ssh_settings(target)
        if via is not None:  # the list of jump hosts defines how this host is reached
            settings = replace(settings, proxy_jump=(), proxy_command=None)
        hops: list[SshConnection] = []
        try:
            for text in settings.proxy_jump:
                hops.append(self._connect_jump_host(text, target, hops[-1] if hops else None, depth))
            transport = self._log_in(target, call or PendingConnection(settings=settings), hops[-1] if hops else via)
        except BaseException:
            for hop in hops:
                hop.close()
            raise
        transport.set_keepalive(KEEPALIVE_S)
        return SshConnection(target, transport, tuple(hops))

    def _connect_jump_host(self, text: str, target: Target, before: SshConnection | None, depth: int) -> SshConnection:
        """Return a connection to a jump host, through the one before it; the first may have jump hosts of its own."""
        user, host, port = sshconfig.parse_jump_host(text)
        if depth == MAX_JUMPS:
            raise ConnectError(
                f"jump host {host} is reached through itself, or through more than {MAX_JUMPS} others",
                node=target.name,
                hint="see ProxyJump in the OpenSSH configuration",
            )
        hop = Target(
            name=f"{target.name} (jump host {host})",
            address=host,
            user=user,
            port=port,
            known_hosts=target.known_hosts,
            ssh_config=target.ssh_config,
            connect_timeout_s=target.connect_timeout_s,
        )
        return self._connect_target(hop, via=before, depth=depth + 1)

    def _log_in(self, target: Target, call: PendingConnection, via: SshConnection | None) -> paramiko.Transport:
        """Return a connection to a node that has the host key on record and has accepted one of our keys."""
        settings = call.settings
        name = hostkeys.lookup_name(settings.host, settings.port, settings.host_key_alias)
        host_keys = hostkeys.list_known_keys(name, settings.known_hosts)
        if not host_keys and (place := hostkeys.find_authority(name, settings.known_hosts)):
            raise ConnectError(
                "its host key is signed by a certificate authority, which paramiko cannot check",
                node=target.name,
                where=place,
                hint="install OpenSSH's client and set `cluster.ssh: openssh`",
            )
        transport = self._perform_handshake(target, call, via, [key.key_type for key in host_keys if not key.revoked])
        try:
            key = transport.get_remote_server_key()
            hostkeys.check_host_key(
                name, key.get_name(), key.asbytes(), host_keys, node=target.name, files=settings.known_hosts
            )
            with translate_ssh_errors(target.name, doing="logging in"):
                self._offer_keys(transport, target, settings)
        except BaseException:
            transport.close()
            raise
        return transport

    def _perform_handshake(
        self, target: Target, call: PendingConnection, via: SshConnection | None, key_types: list[str]
    ) -> paramiko.Transport:
        """Return a connection after the key exchange; only the connecting is tried again."""
        settings = call.settings
        deadline = time.monotonic() + target.connect_timeout_s
        for attempt in range(TRIES):
            left_s = max(0.1, deadline - time.monotonic())
            try:
                with translate_ssh_errors(target.name, doing=f"connecting to {settings.host} port {settings.port}"):
                    if attempt == 0 and call.error is not None:
                        raise call.error
                    early = call.connection if attempt == 0 else None
                    return self._try_handshake(settings, early, via, key_types, left_s)
            except ConnectError as exc:
                # A server with too many logins under way drops new ones before it sends its first line (MaxStartups).
                busy = isinstance(exc.__cause__, ConnectionResetError | EOFError | paramiko.SSHException)
                if not busy or attempt == TRIES - 1 or time.monotonic() + 0.2 > deadline:
                    raise
                time.sleep(0.1 * (attempt + 1))
        raise ConnectError("it could not be reached", node=target.name)

    def _try_handshake(
        self,
        settings: sshconfig.SshSettings,
        early: socket.socket | None,
        via: SshConnection | None,
        key_types: list[str],
        timeout_s: float,
    ) -> paramiko.Transport:
        sock: socket.socket | paramiko.Channel
        if early is not None:
            sock = early
        elif via is not None:
            sock = _make_channel_opener(via)(settings.host, settings.port, timeout_s)
        elif settings.proxy_command:
            sock = _proxy_command(settings)
        else:
            sock = self._open_socket(settings.host, settings.port, timeout_s)
        transport = paramiko.Transport(sock)
        try:
            options = transport.get_security_options()
            options.ciphers = [name for name in CIPHERS if name in options.ciphers]
            options.kex = [*(name for name in KEX if name in options.kex), *(n for n in options.kex if n not in KEX)]
            options.key_types = _prefer_recorded_types(key_types, list(options.key_types))
            transport.auth_timeout = timeout_s
            # Later than the limit of start_client, so that silence is reported as such and not as a wrong first line.
            transport.banner_timeout = transport.handshake_timeout = timeout_s + 5
            transport.start_client(timeout=timeout_s)
            if not transport.initial_kex_done:  # after the time-out it returns without an error
                raise TimeoutError if settings.proxy_command else _SilentServerError
        except BaseException:
            transport.close()
            raise
        return transport

    def _offer_keys(self, transport: paramiko.Transport, target: Target, settings: sshconfig.SshSettings) -> None:
        """Offer keys until one is accepted.

        Raises:
            AuthError: none was; lists what was tried.
        """
        tried = []
        for label, key in self._list_offered_keys(settings):
            if isinstance(key, str):
                tried.append(f"{label} ({key})")
                continue
            try:
                transport.auth_publickey(settings.user, key)
            except paramiko.AuthenticationException:
                tried.append(f"{label} (refused)")
                continue
            return
        raise AuthError(
            f"{settings.user}@{settings.host} accepted no key; tried: {', '.join(tried) or 'none, there is no key'}",
            node=target.name,
            hint=_hint_of_refusal(transport, settings),
        )

    def _list_offered_keys(self, settings: sshconfig.SshSettings) -> Iterator[tuple[str, paramiko.PKey | str]]:
        """Yield keys in the order of OpenSSH: the agent's, then the files'; a text in place of a key is an error."""
        named = [blob for file in settings.identity_files if (blob := _public_blob(file)) is not None]
        agent_keys = [key for key in self._agent_keys() if not settings.identities_only or key.asbytes() in named]
        for agent_key in agent_keys:
            yield f"agent key {agent_key.comment or agent_key.get_name()}", agent_key
        unlocked = {key.asbytes() for key in agent_keys}
        for file in settings.identity_files:
            if _public_blob(file) in unlocked:
                continue
            key = self._load_private_key(file)
            if key is not None:
                yield file, key

    def _agent_keys(self) -> tuple[paramiko.AgentKey, ...]:
        with self._lock:
            if self._agent is None:
                try:
                    self._agent = paramiko.Agent().get_keys()
                except (paramiko.SSHException, OSError):
                    self._agent = ()
            return self._agent

    def _load_private_key(self, file: str) -> paramiko.PKey | str | None:
        """Return the key in a file, the reason why it cannot be used, or None if there is no such file."""
        with self._lock:
            if file not in self._keys:
                try:
                    info = Path(file).stat()
                    if info.st_uid == os.getuid() and info.st_mode & 0o077:  # ssh refuses such a file, too
                        self._keys[file] = f"others can read it; chmod 600 {file}"
                        return self._keys[file]
                    self._keys[file] = paramiko.PKey.from_path(file)
                except FileNotFoundError:
                    return None
                except (paramiko.PasswordRequiredException, TypeError):
                    self._keys[file] = "locked by a passphrase; unlock it with ssh-add"
                except Exception as exc:  # noqa: BLE001 - cryptography has errors of its own for keys of unknown kinds
                    self._keys[file] = f"unreadable: {exc}"
            return self._keys[file]


def _public_blob(file: str) -> bytes | None:
    """Return the public half of an identity file, which may itself be the one that is named; None if there is none."""
    path = Path(file if file.endswith(".pub") else f"{file}.pub")
    try:
        return base64.b64decode(path.read_text(encoding="ascii").split()[1], validate=True)
    except (OSError, ValueError, IndexError):
        return None


def _hint_of_refusal(transport: paramiko.Transport, settings: sshconfig.SshSettings) -> str:
    """Return the hint for a login without an accepted key, by the methods that the server accepts."""
    login = f"-p {settings.port} {settings.user}@{settings.host}"
    methods: Sequence[str] = ()
    try:
        transport.auth_none(settings.user)
    except paramiko.BadAuthenticationType as exc:
        methods = exc.allowed_types
    except (paramiko.SSHException, OSError, EOFError):  # the server has closed the connection after too many attempts
        pass
    if {"password", "keyboard-interactive"} & {*methods}:
        return f"dtctl never asks for passwords: `ssh-copy-id {login}` lets your key in there"
    return f"set `cluster.user` and `cluster.identity_file`, or try `ssh -o BatchMode=yes {login} true`"


def _prefer_recorded_types(first: list[str], offered: list[str]) -> list[str]:
    """Return `offered` with the key types on record first, so that the server sends a key that can be checked."""
    names = []
    for name in first:
        # A recorded RSA key is requested by the names of its signature algorithms.
        names += ["rsa-sha2-512", "rsa-sha2-256"] if name == "ssh-rsa" else [name]
    preferred = [name for name in names if name in offered]
    return [*dict.fromkeys([*preferred, *offered])]


def _make_channel_opener(via: SshConnection) -> OpenSocket:
    """Opens connections from a jump host."""

    def open_channel(address: str, port: int, timeout_s: float) -> paramiko.Channel:
        return via.transport.open_channel("direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=timeout_s)

    return open_channel


def _proxy_command(settings: sshconfig.SshSettings) -> socket.socket:
    """Return one end of a socket; a process that the user's configuration names has the other end."""
    parent_end, child_end = socket.socketpair()
    # This is the user's ProxyCommand, which a shell runs as for OpenSSH. It ends when this end of the socket is closed.
    line = f"exec {settings.proxy_command}"
    process = subprocess.Popen(line, shell=True, stdin=child_end.fileno(), stdout=child_end.fileno())  # noqa: S602
    threading.Thread(target=process.wait, daemon=True).start()
    child_end.close()
    return parent_end
