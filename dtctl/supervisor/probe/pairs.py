"""Connections between nodes: every node listens, every node calls all others. Stdlib only, Python 3.8.

A call shows whether there is a route, whether the right node answers, from which address it sees us come, and whether
large packets arrive. Silence means that packets are dropped; a refusal that they are rejected, since the node listens.
"""

from __future__ import annotations

import errno
import random
import select
import socket
import struct
import threading
import time

from dtctl import node_facts
from dtctl.supervisor.probe import quality

LARGE_BYTES = 256 << 10
"""More than a connection carries without any full-size packet getting through."""
PASSED_BYTES = 16 << 10
_IP_RECVERR = 11  # linux/in.h
_TCP_INFO_BYTES_ACKED = 120  # struct tcp_info of linux/tcp.h
PARALLEL = 24
KNOCKS = ("spread", "meeting")
"""Kinds of calls that only check which node answers: many of them find a rule for a part of the ports."""
TRIES = 4
"""Ports of a stretch that are tried until one is free."""
MEASURE_TIMEOUT_S = quality.PHASE_LIMIT_S + 1.0
"""Seconds to connect, and for each answer while a connection is measured."""
_BACKLOG = 512


class Listeners:
    """Listening sockets and the threads that answer; gone with the process."""

    def __init__(self, name: str, token: str) -> None:
        """Listen for calls with `token`, and answer as `name`."""
        self._name = name
        self._token = token.encode()
        self.sockets: list = []  # type: ignore[type-arg]

    def open(self, port: int) -> int:
        """Listen on a port, 0 for one that the kernel chooses; the port, or minus the error's number."""
        ear = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if port:
                ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ear.bind(("", port))
            ear.listen(_BACKLOG)
        except OSError as exc:
            ear.close()
            return -int(exc.errno or 1)
        self.sockets.append(ear)
        try:
            threading.Thread(target=self._accept, args=(ear,), daemon=True).start()
        except RuntimeError:  # no more processes are allowed here, which is reported elsewhere
            return -errno.EAGAIN
        return int(ear.getsockname()[1])

    def spread(self, first: int, last: int, count: int) -> list:  # type: ignore[type-arg]
        """Listen on one port of each of `count` equal stretches of a range; those that were free. One thread serves."""
        size = max(1, (last - first + 1) // max(1, count))
        ears = []
        for low in range(first, last + 1, size)[:count]:
            for _ in range(TRIES):
                ear = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                try:
                    ear.bind(("", random.randrange(low, min(low + size, last + 1))))
                    ear.listen(_BACKLOG)
                except OSError:
                    ear.close()
                    continue
                ears.append(ear)
                break
        self.sockets += ears
        try:
            threading.Thread(target=self._accept_all, args=(ears,), daemon=True).start()
        except RuntimeError:
            return []
        return [int(ear.getsockname()[1]) for ear in ears]

    def _accept_all(self, ears: list) -> None:  # type: ignore[type-arg]
        while ears:
            for ear in select.select(ears, [], [])[0]:
                try:
                    call, peer = ear.accept()
                except OSError:
                    continue
                try:
                    threading.Thread(target=self._answer, args=(call, str(peer[0])), daemon=True).start()
                except RuntimeError:
                    self._answer(call, str(peer[0]))

    def _accept(self, ear: socket.socket) -> None:
        while True:
            try:
                call, peer = ear.accept()
            except OSError:
                return
            try:
                threading.Thread(target=self._answer, args=(call, str(peer[0])), daemon=True).start()
            except RuntimeError:
                self._answer(call, str(peer[0]))

    def _answer(self, call: socket.socket, peer: str) -> None:
        with call:
            call.settimeout(10.0)
            try:
                token, _, wish = read_line(call).partition(" ")
                if token.encode() != self._token:
                    return
                if wish == "measure":
                    quality.serve(call)
                    return
                call.sendall(f"{self._name} {peer}\n".encode())
                left = LARGE_BYTES
                while left:
                    data = call.recv(min(left, 1 << 16))
                    if not data:
                        return
                    left -= len(data)
                call.sendall(b"got\n")
            except (OSError, ValueError):
                return


def read_line(sock: socket.socket) -> str:
    """Return bytes up to a newline, one at a time: what follows is not ours to read."""
    line = b""
    limit = time.monotonic() + (sock.gettimeout() or 10.0)
    while not line.endswith(b"\n") and len(line) < 200:
        byte = sock.recv(1)
        if not byte:
            break
        line += byte
        if time.monotonic() > limit:  # it sends a byte now and then
            raise socket.timeout("timed out")
    return line.strip().decode(errors="replace")


def call_all(targets: list, token: str, timeout_s: float) -> list:  # type: ignore[type-arg]
    """Call every target, many at once; one answer each, in their order.

    Args:
        targets: [node, address, port, kind], in an order in which no two nodes begin with the same one.
        token: known to the nodes of this examination only.
        timeout_s: seconds to connect, and again to send; two lost packets fit in.
    """
    answers: list = [None] * len(targets)  # type: ignore[type-arg]
    todo = list(enumerate(targets))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                index, (node, address, port, kind) = todo.pop(0)
            knock = kind in KNOCKS
            said = call(address, port, node, token, timeout_s, large=not knock)
            if knock and said["result"] != "ok":  # a packet may be lost, or the other side be busy
                said = call(address, port, node, token, timeout_s, large=False)
            answers[index] = {"node": node, "port": port, "kind": kind, **said}

    threads = []
    for _ in range(min(PARALLEL, len(targets)) - 1):
        thread = threading.Thread(target=work, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            break
        threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    return answers


def call(address: str, port: int, node: str, token: str, timeout_s: float, *, large: bool = True) -> dict:  # type: ignore[type-arg]
    """Return one call: `result` is ok, dropped, no-room, refused, unreachable, silent, stranger, large-lost or error.

    With `large`, packets of full size are sent, too.
    """
    begun = time.monotonic()
    try:
        sock = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as exc:
        return {"result": word_for(exc, address), "said": str(exc), "took_ms": _ms(begun)}
    with sock:
        took = _ms(begun)
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.sendall(token.encode() + b"\n")
            name, _, seen = read_line(sock).partition(" ")
            seen = seen[:60]  # longer than an address: the other side may send anything
        except OSError as exc:
            return {"result": "silent", "said": str(exc), "took_ms": took}
        answer = {"took_ms": took, "seen": seen, "own": sock.getsockname()[0]}
        if name != node:
            return {**answer, "result": "stranger", "said": name or "nothing"}
        if not large:
            return {**answer, "result": "ok"}
        try:
            sock.sendall(b"\0" * LARGE_BYTES)
            whole = read_line(sock) == "got"
        except OSError:
            # On a slow link some of it has arrived, in packets of full size; where those are lost, nothing has.
            whole = _acknowledged(sock) >= PASSED_BYTES
        return {**answer, "result": "ok" if whole else "large-lost"}


def measure(address: str, port: int, token: str, seconds: float) -> dict:  # type: ignore[type-arg]
    """Measure the way as `quality.measure` does; without a connection, return its `error` and `result` as a call.

    Args:
        address: of the other node.
        port: on which its probe listens.
        token: of this examination.
        seconds: how long the stream is measured.
    """
    try:
        sock = socket.create_connection((address, port), timeout=MEASURE_TIMEOUT_S)
    except OSError as exc:
        return {"error": str(exc) or type(exc).__name__, "result": word_for(exc, address)}
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.sendall(token.encode() + b" measure\n")
        except OSError as exc:
            return {"error": str(exc) or type(exc).__name__}
        return quality.measure(sock, seconds)


def _acknowledged(sock: socket.socket) -> int:
    """Return the bytes that the other side has acknowledged, by the kernel's count; 0 where it has none."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) if hasattr(socket, "TCP_INFO") else b""
    except OSError:
        return 0
    return (
        int(struct.unpack_from("=Q", info, _TCP_INFO_BYTES_ACKED)[0]) if len(info) >= _TCP_INFO_BYTES_ACKED + 8 else 0
    )


def has_no_room_for(address: str) -> bool:
    """Return whether the kernel drops packets to an address since its table of neighbours is full.

    A TCP connection only sees silence then. A datagram with IP_RECVERR set fails at once with ENOBUFS (net/ipv4/udp.c,
    `udp_send_skb`). A full queue of the interface causes this error as well, but then the table has the address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            sock.sendto(b"", (address, 9))  # the port of `discard`
    except OSError as exc:
        return exc.errno == errno.ENOBUFS and address not in node_facts.neighbours()
    return False


def word_for(exc: OSError, address: str) -> str:
    """Return what the failure of a connection to an address means on the way."""
    if isinstance(exc, socket.timeout) or exc.errno == errno.ETIMEDOUT:
        return "no-room" if has_no_room_for(address) else "dropped"
    if exc.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        return "refused"
    if exc.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
        return "unreachable"
    return "error"


def _ms(begun: float) -> float:
    return round((time.monotonic() - begun) * 1000, 3)
