"""Ten thousand strangers at a node that serves blocks: they get nothing, and nodes of the run get everything.

The strangers are processes of their own and come from addresses of 127.0.0.0/8; all that they do ends by itself.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dtctl.supervisor import relay
from tests.hosts import wait_until
from tests.unit.launch.test_relay import Served, served

__all__ = ["served"]

CONNECTIONS = 10_000
OPEN_AT_ONCE = 400
"""Connections of one process of strangers; well below the limit of open files."""
STRANGERS = """
import os, random, select, socket, sys
from collections import deque
port, count, at_once, seed = map(int, sys.argv[1:5])
addresses = sys.argv[5:]
chance = random.Random(seed)
HELLO = bytes.fromhex("1603010200010001fc0303") + os.urandom(200)
SAID = [b"", b"GET / HTTP/1.0\\r\\n\\r\\n", os.urandom(32), os.urandom(4096), HELLO, bytes(68), b"\\xff" * 36]
made = got = 0
silent, still = deque(), deque()
def speak():
    global made
    sock = silent.popleft()
    try:
        sock.send(chance.choice(SAID))
        made += 1
    except OSError:
        pass
    still.append(sock)
def drop():
    global got
    sock = still.popleft()
    try:
        got += len(sock.recv(1 << 16))
    except OSError:
        pass
    sock.close()
for number in range(count):
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind((chance.choice(addresses), 0))
    sock.connect_ex(("127.0.0.1", port))
    silent.append(sock)
    select.select([], [sock], [], 0.002)
    while len(silent) > 20:
        speak()
    while len(still) > at_once:
        drop()
while silent:
    speak()
while still:
    drop()
print(made, got)
"""


def start_strangers(port: int, count: int, addresses: list[str], seed: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", STRANGERS, str(port), str(count), str(OPEN_AT_ONCE), str(seed), *addresses]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def count_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("addresses", [1, 1000])
def test_ten_thousand_connections_keep_no_node_of_the_run_out(served: Served, addresses: int) -> None:
    """From one address, and from a thousand; also with a node of the run that takes nothing."""
    assert served.fetch() == served.digests
    served.forget()
    fds = count_descriptors()
    sources = [f"127.1.{number // 250}.{number % 250 + 1}" for number in range(addresses)]
    processes = [start_strangers(served.server.port, CONNECTIONS // 2, sources, seed) for seed in range(2)]
    fetches, most = 0, [0, 0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            most[:] = max(most[0], len(served.server._strangers)), max(most[1], len(served.server._threads))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    begun = time.monotonic()
    try:
        with served.connect() as sock, served.prove(sock) as slow:
            for digest in served.digests * 20:
                slow.sendall(digest)
            while any(process.poll() is None for process in processes) or not fetches:
                assert served.fetch() == served.digests
                served.forget()
                fetches += 1
                assert time.monotonic() - begun < 300, "the strangers do not end"
        counts = [[int(word) for word in process.communicate(timeout=60)[0].split()] for process in processes]
    finally:
        stop.set()
        watching.join()
        for process in processes:
            process.kill()
            process.wait()
    print(
        f"{fetches} fetches, {counts} made, got in {time.monotonic() - begun:.1f} s; at most {most} unproven, threads"
    )
    assert sum(made for made, _ in counts) > 0.5 * CONNECTIONS, "the others did not get past the kernel"
    assert most[0] <= relay.STRANGERS
    assert most[1] <= 4, "one accepts, and one serves each node; strangers have none"
    assert sum(got for _, got in counts) == 0
    wait_until(lambda: not served.server._strangers and len(served.server._threads) == 1, what="they are gone")
    wait_until(lambda: count_descriptors() <= fds, what="and so are their descriptors")
