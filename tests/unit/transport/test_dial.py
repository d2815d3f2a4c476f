"""Calls that go out before the SSH library is loaded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from dtctl.errors import ConnectError
from dtctl.transport.base import Target
from dtctl.transport.dial import EarlyConnections
from tests.facts import raises


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


def target(name: str, port: int, *, ssh_config: str = "none") -> Target:
    return Target(name=name, address="127.0.0.1", port=port, user="me", ssh_config=ssh_config)


def test_a_node_is_called_at_once_and_handed_out_once(listener: socket.socket) -> None:
    node = target("a", listener.getsockname()[1])
    calls = EarlyConnections([node])
    listener.accept()[0].close()  # before anybody asks for it
    call = calls.pop_connection(node)
    assert call is not None
    assert call.error is None
    assert call.connection.getpeername() == listener.getsockname()
    call.connection.close()
    assert calls.pop_connection(node) is None


def test_a_refusal_is_kept_for_whoever_asks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    node = target("a", free)
    call = EarlyConnections([node]).pop_connection(node)
    assert call is not None
    assert isinstance(call.error, ConnectionRefusedError)
    assert call.settings.port == free


def test_one_slow_node_does_not_hold_up_the_others() -> None:
    answer = threading.Event()

    def connect(address: str, port: int, timeout_s: float) -> int:
        if port == 1:
            answer.wait(120)
        return port

    slow, quick = target("slow", 1), target("quick", 2)
    calls = EarlyConnections([slow, quick], connect)
    taken = calls.pop_connection(quick)
    assert taken is not None
    assert taken.connection == 2
    answer.set()
    late = calls.pop_connection(slow)
    assert late is not None
    assert late.connection == 1


def test_a_way_through_a_program_is_left_to_the_transport(tmp_path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  ProxyCommand nc %h %p\n")
    node = target("a", 22, ssh_config=str(config))
    call = EarlyConnections([node], lambda *_: pytest.fail("called directly")).pop_connection(node)
    assert call is not None
    assert call.connection is None
    assert call.settings.proxy_command is not None


def test_a_configuration_that_openssh_refuses_is_reported(tmp_path) -> None:
    config = tmp_path / "config"
    config.write_text("NoSuchKeyword yes\n")
    node = target("a", 22, ssh_config=str(config))
    with raises(ConnectError, "OpenSSH"):
        EarlyConnections([node]).pop_connection(node)
