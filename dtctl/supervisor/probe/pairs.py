"""Connections between nodes: every node listens, and every node calls all others. Stdlib only, Python 3.8.

A call shows whether there is a route, whether the right node answers, the address that it sees, and whether large
packets arrive. Silence means that packets are dropped; a refusal means that they are rejected, since the node listens.
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
"""Bytes of a transfer that needs packets of full size."""
PASSED_BYTES = 16 << 10
_IP_RECVERR = 11  # This constant is from linux/in.h.
_TCP_INFO_BYTES_ACKED = 120  # This is an offset in struct tcp_info of linux/tcp.h.
PARALLEL = 24
KNOCKS = ("spread", "meeting")
"""Kinds of calls that only check which node answers; many of them find a firewall rule for a part of the ports."""
TRIES = 4
"""Most ports in a part of a range that are tried until one is free."""
MEASURE_TIMEOUT_S = quality.PHASE_LIMIT_S + 1.0
"""Seconds for a connection, and for each answer while it is measured."""
_BACKLOG = 512


class ProbeListeners:
    """Listening sockets and the threads that answer; they end with the process."""

    def __init__(self, name: str, token: str) -> None:
        """Listen for calls with `token`, and answer as `name`."""
        self._name = name
        self._token = token.encode()
        self.sockets: list = []  # type: ignore[type-arg]

    def open(self, port: int) -> int:
        """Listen on a port (0: the kernel chooses one); return the port, or the error's number as a negative one."""
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
            threading.Thread(target=self._accept_peer_connections, args=(ear,), daemon=True).start()
        except RuntimeError:  # The limit of processes is reached, which another fact shows.
            return -errno.EAGAIN
        return int(ear.getsockname()[1])

    def spread(self, first: int, last: int, count: int) -> list:  # type: ignore[type-arg]
        """Listen by one thread on a port in each of `count` equal parts of a range; return the opened ports."""
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
                    threading.Thread(
                        target=self._answer_peer_connection, args=(call, str(peer[0])), daemon=True
                    ).start()
                except RuntimeError:
                    self._answer_peer_connection(call, str(peer[0]))

    def _accept_peer_connections(self, ear: socket.socket) -> None:
        while True:
            try:
                call, peer = ear.accept()
            except OSError:
                return
            try:
                threading.Thread(target=self._answer_peer_connection, args=(call, str(peer[0])), daemon=True).start()
            except RuntimeError:
                self._answer_peer_connection(call, str(peer[0]))

    def _answer_peer_connection(self, call: socket.socket, peer: str) -> None:
        with call:
            call.settimeout(10.0)
            try:
                token, _, wish = read_line(call).partition(" ")
                if token.encode() != self._token:
                    return
                if wish == "measure":
                    quality.serve_measurement(call)
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
    """Read up to a newline, one byte at a time, since the bytes after it are for another reader."""
    line = b""
    limit = time.monotonic() + (sock.gettimeout() or 10.0)
    while not line.endswith(b"\n") and len(line) < 200:
        byte = sock.recv(1)
        if not byte:
            break
        line += byte
        if time.monotonic() > limit:  # The other side sends single bytes at long intervals.
            raise socket.timeout("timed out")
    return line.strip().decode(errors="replace")


def call_all(targets: list, token: str, timeout_s: float) -> list:  # type: ignore[type-arg]
    """Call every target, many at the same time; return one answer for each, in their order.

    Args:
        targets: [node, address, port, kind], in an order such that no two nodes begin with the same target.
        token: token that only the nodes of this examination have.
        timeout_s: seconds for a connection, and again for sending; they suffice after two lost packets.
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
            said = check_peer_connection(address, port, node, token, timeout_s, large=not knock)
            if knock and said["result"] != "ok":  # A packet may be lost, or the other side busy.
                said = check_peer_connection(address, port, node, token, timeout_s, large=False)
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


def check_peer_connection(
    address: str, port: int, node: str, token: str, timeout_s: float, *, large: bool = True
) -> dict:  # type: ignore[type-arg]
    """Make one call: `result` is ok, dropped, no-room, refused, unreachable, silent, stranger, large-lost or error.

    With `large`, packets of full size are sent, too.
    """
    begun = time.monotonic()
    try:
        sock = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as exc:
        return {"result": classify_connect_error(exc, address), "said": str(exc), "took_ms": _compute_elapsed_ms(begun)}
    with sock:
        took = _compute_elapsed_ms(begun)
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.sendall(token.encode() + b"\n")
            name, _, seen = read_line(sock).partition(" ")
            seen = seen[:60]  # No address is longer, and an untrusted sender may send more.
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
            # Over a slow link, some packets of full size have arrived; if the link drops these, none has.
            whole = _count_acknowledged_bytes(sock) >= PASSED_BYTES
        return {**answer, "result": "ok" if whole else "large-lost"}


def measure_peer_link(address: str, port: int, token: str, seconds: float) -> dict:  # type: ignore[type-arg]
    """Measure the connection to a node by `quality.measure_connection`.

    Without a connection, return `error` and `result` as for a call.

    Args:
        address: address of the other node.
        port: port on which the other node's probe listens.
        token: token of this examination.
        seconds: seconds for which the stream is measured.
    """
    try:
        sock = socket.create_connection((address, port), timeout=MEASURE_TIMEOUT_S)
    except OSError as exc:
        return {"error": str(exc) or type(exc).__name__, "result": classify_connect_error(exc, address)}
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.sendall(token.encode() + b" measure\n")
        except OSError as exc:
            return {"error": str(exc) or type(exc).__name__}
        return quality.measure_connection(sock, seconds)


def _count_acknowledged_bytes(sock: socket.socket) -> int:
    """Return the bytes that the other side has acknowledged, by the kernel's count; 0 if the kernel has no count."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) if hasattr(socket, "TCP_INFO") else b""
    except OSError:
        return 0
    return (
        int(struct.unpack_from("=Q", info, _TCP_INFO_BYTES_ACKED)[0]) if len(info) >= _TCP_INFO_BYTES_ACKED + 8 else 0
    )


def has_no_room_for(address: str) -> bool:
    """Return whether the kernel drops packets to an address because its table of neighbours is full.

    A TCP connection then only gets no answer. A datagram with IP_RECVERR set fails immediately with ENOBUFS
    (net/ipv4/udp.c, `udp_send_skb`). A full queue of the interface causes this error as well, but then the table has
    the address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            sock.sendto(b"", (address, 9))  # This is the port of the service `discard`.
    except OSError as exc:
        return exc.errno == errno.ENOBUFS and address not in node_facts.read_arp_neighbours()
    return False


def classify_connect_error(exc: OSError, address: str) -> str:
    """Return the result of a call for the failure of a connection to an address."""
    if isinstance(exc, socket.timeout) or exc.errno == errno.ETIMEDOUT:
        return "no-room" if has_no_room_for(address) else "dropped"
    if exc.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        return "refused"
    if exc.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
        return "unreachable"
    return "error"


def _compute_elapsed_ms(begun: float) -> float:
    return round((time.monotonic() - begun) * 1000, 3)
