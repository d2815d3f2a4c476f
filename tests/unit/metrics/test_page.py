"""The page of metrics, with clients that take their time."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from dtctl.metrics import page as module
from dtctl.metrics.page import MetricsServer


@pytest.fixture
def page() -> Iterator[MetricsServer]:
    page = MetricsServer("127.0.0.1", 0, lambda: "dtctl_step 3\n")
    yield page
    page.close()


def read(page: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def test_slow_clients_keep_nobody_out(page: MetricsServer) -> None:
    """As many as there is room for, and more, that have sent a part of a request."""
    slow = []
    for _ in range(3 * module.MANY):
        client = socket.create_connection(("127.0.0.1", page.port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        slow.append(client)
    try:
        for _ in range(5):
            assert read(page) == "dtctl_step 3\n"
        assert threading.active_count() < 3 * module.MANY, "threads of those that were ended are gone"
    finally:
        for client in slow:
            client.close()


def test_a_client_that_sends_a_byte_now_and_then_has_one_limit(
    page: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLIENT_S", 1.0)
    with socket.create_connection(("127.0.0.1", page.port)) as client:
        client.settimeout(0.1)
        began = time.monotonic()
        while time.monotonic() < began + 10:
            try:
                client.sendall(b"G")
                if client.recv(100) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert 0.9 < time.monotonic() - began < 8


def test_a_client_that_does_not_take_its_answer_has_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_S", 1.0)
    page = MetricsServer("127.0.0.1", 0, lambda: "x" * (32 << 20))
    before = threading.active_count()
    try:
        with socket.create_connection(("127.0.0.1", page.port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            deadline = time.monotonic() + 10
            time.sleep(0.3)
            while threading.active_count() > before and time.monotonic() < deadline:
                time.sleep(0.05)
            assert threading.active_count() <= before
    finally:
        page.close()


def test_many_at_once_all_have_the_page(page: MetricsServer) -> None:
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(read(page))) for _ in range(module.MANY // 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers == ["dtctl_step 3\n"] * len(threads)
