"""Hosts of package indexes are named as unreachable if a connection to them fails here, and only then."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from dtctl.supervisor.index_hosts import describe_unreachable_host

SAID = """\
error: Request failed after 3 retries in 7.2s
  cause: Failed to fetch: {url}/alpha/
  cause: error sending request for url ({url}/alpha/)
  cause: Connection refused (os error 111)
hint: see https://manual.invalid/page
"""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def serve_once(answer: bytes) -> int:
    """Return the port on which a server gives the first client an answer."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = server.accept()
        with server, client:
            if answer:
                client.recv(1 << 12)
            client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def test_what_uv_says_is_no_proof() -> None:
    url = f"http://127.0.0.1:{serve_once(b'')}/simple"
    assert describe_unreachable_host(SAID.format(url=url), "", {}) == ""


def test_a_host_that_refuses_is_named(closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}/simple"
    host = f"127.0.0.1:{closed_port}"
    assert describe_unreachable_host(SAID.format(url=url), "", {}).startswith(f"{host}, from which uv fetches files: ")
    of_index = f"the package index {host}: connection refused"
    assert describe_unreachable_host(SAID.format(url=url), f"--index-url {url}", {}) == of_index
    assert describe_unreachable_host("unknown words", f"--index-url {url}", {}) == of_index
    assert describe_unreachable_host("unknown words", "", {"UV_DEFAULT_INDEX": url}) == of_index


def test_without_an_index_no_host_is_needed() -> None:
    assert describe_unreachable_host("alpha was not found, see https://manual.invalid/page", "--no-index\n", {}) == ""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 Connection established\r\n\r\n", ""),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", ""),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "it answers 403 Forbidden"),
        (b"SSH-2.0-OpenSSH\r\n", "it is no proxy"),
    ],
)
def test_a_proxy_that_does_not_connect_is_named(answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = serve_once(answer)
    monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{port}")
    said = describe_unreachable_host(SAID.format(url="https://pypi.org/simple"), "", {})
    assert said == (f"the package index pypi.org:443: the proxy 127.0.0.1:{port}: {reason}" if reason else "")
