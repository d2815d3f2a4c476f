"""TCP connections to nodes, opened before paramiko is loaded.

An SSH server needs some milliseconds before it sends its banner, and loading paramiko takes ten times as long. So the
connections are opened first: once the library is loaded, the banners have arrived.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dtctl.transport import sshconfig
from dtctl.transport.base import Target

OpenSocket = Callable[[str, int, float], Any]
"""Function (address, port, timeout in seconds) -> connected socket, or an object with the same methods."""


def open_socket(address: str, port: int, timeout_s: float) -> socket.socket:
    """Return an ordinary connection, without Nagle's delay.

    Raises:
        OSError: it cannot be made.
    """
    connection = socket.create_connection((address, port), timeout=timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingConnection:
    """The connection to one node, or why there is none."""

    settings: sshconfig.SshSettings
    connection: Any = None
    """The connected socket; None where the way leads through another host or program."""
    error: Exception | None = None
    """Reason why there is no connection, although the way is direct."""


class EarlyConnections:
    """Connections that are being opened in the background, one per node; each is handed out once."""

    def __init__(self, targets: Iterable[Target], connect: OpenSocket = open_socket) -> None:
        """Start connecting to all of them.

        Args:
            targets: the nodes.
            connect: makes a connection.
        """
        self._lock = threading.Lock()
        self._calls: dict[str, Future[PendingConnection]] = {}
        for target in targets:
            future = self._calls[target.name] = Future()
            thread = threading.Thread(
                target=_open_pending_connection, args=(target, connect, future), name=f"call {target.name}", daemon=True
            )
            thread.start()

    def pop_connection(self, target: Target) -> PendingConnection | None:
        """The connection to this node, once it is open or has failed; None if none was started or it was already taken.

        Raises:
            ConnectError: OpenSSH does not accept the configuration.
        """
        with self._lock:
            future = self._calls.pop(target.name, None)
        return future.result() if future is not None else None


def _open_pending_connection(target: Target, connect: OpenSocket, future: Future[PendingConnection]) -> None:
    try:
        settings = sshconfig.resolve_ssh_settings(target)
        if settings.proxy_jump or settings.proxy_command:
            future.set_result(PendingConnection(settings=settings))
            return
        try:
            connection = connect(settings.host, settings.port, target.connect_timeout_s)
            future.set_result(PendingConnection(settings=settings, connection=connection))
        except OSError as exc:
            future.set_result(PendingConnection(settings=settings, error=exc))
    except Exception as exc:  # noqa: BLE001 - raised again by `pop_connection`
        future.set_exception(exc)
