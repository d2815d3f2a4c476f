"""Connections to the hosts of a sandbox, also into its network namespace."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

from dtctl.sandbox.keeper import SOCKET
from dtctl.sandbox.layout import Sandbox


def make_socket_opener(sandbox: Sandbox) -> Callable[[str, int, float], socket.socket]:
    """Return a function (address, port, time-out in seconds) -> connected socket, for a transport."""

    def open_socket(address: str, port: int, timeout_s: float) -> socket.socket:
        return connect_to_host(sandbox, address, port, timeout_s)

    return open_socket


def connect_to_host(sandbox: Sandbox, address: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to a host.

    Raises:
        OSError: the error of a direct connection.
    """
    if not sandbox.rootless:
        connection = socket.create_connection((address, port), timeout=timeout_s)
    else:
        connection = _through_keeper(sandbox, address, port, timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _through_keeper(sandbox: Sandbox, address: str, port: int, timeout_s: float) -> socket.socket:
    answer, fds = send_keeper_request(
        sandbox, {"op": "connect", "address": address, "port": port, "timeout_s": timeout_s}, timeout_s
    )
    if fds:
        return socket.socket(fileno=fds[0])
    number = answer.get("errno")
    if number is None:
        raise TimeoutError(str(answer.get("error")))
    raise OSError(number, os.strerror(number))


def send_keeper_request(
    sandbox: Sandbox, request: dict[str, object], timeout_s: float
) -> tuple[dict[str, int], list[int]]:
    """Send the keeper a request; return its answer, and the descriptors that came with it.

    Raises:
        OSError: the keeper does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s + 2)
        folder = os.open(sandbox.state, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Through /proc, because the folder's path may be longer than the address of a unix socket may be.
            sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        finally:
            os.close(folder)
        sock.sendall(json.dumps(request).encode())
        data, fds, _, _ = socket.recv_fds(sock, 65_536, 1)
    return json.loads(data or b"{}"), fds
