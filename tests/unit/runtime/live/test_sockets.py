"""Who waits at a socket of a group is woken, and nobody else."""

from __future__ import annotations

import socket
import threading

from dtctl.runtime.live import sockets


def connected() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listening socket, and both ends of a connection to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server


def test_who_waits_is_woken_and_listeners_and_others_are_left_alone() -> None:
    others = connected()
    before = sockets.list_open_sockets()
    listener, client, server = connected()
    pipe = socket.socketpair()
    group = sockets.list_open_sockets() - before
    assert {number for number, _ in group} == {each.fileno() for each in (listener, client, server, *pipe)}
    received: list[bytes] = []
    waiting = threading.Thread(target=lambda: received.append(client.recv(1)), daemon=True)
    waiting.start()
    sockets.shut_down(group)
    waiting.join(60)
    assert received == [b""]
    with socket.create_connection(listener.getsockname()):
        pass
    for one, other in (others[1:], pipe):
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    for each in (listener, client, server, *pipe, *others):
        each.close()


def test_a_number_that_is_another_file_by_now_is_left_alone() -> None:
    before = sockets.list_open_sockets()
    first = connected()
    group = sockets.list_open_sockets() - before
    for each in first:
        each.close()
    listener, client, server = connected()
    assert {number for number, _ in group} & {each.fileno() for each in (listener, client, server)}
    sockets.shut_down(group)
    client.sendall(b"x")
    assert server.recv(1) == b"x"
    for each in (listener, client, server):
        each.close()
