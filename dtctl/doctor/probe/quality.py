"""How good the way from one node to another is: round trips, loss, bandwidth. Stdlib only, Python 3.8.

The bandwidth is what arrives, counted by the receiver after a warm-up in which TCP finds its speed and a shaper's
bucket runs empty. Loss is counted on UDP in small bursts, each of which is counted before the next: TCP loses packets
on any full link, and a receiver that is late loses none of a burst that fits its buffer.
"""

from __future__ import annotations

import select
import socket
import struct
import time

PINGS = 20
BURSTS = 5
BURST = 100
"""Datagrams in a burst; they fit into the smallest receive buffer of Linux."""
DATAGRAM = b"\0" * 64
WARM_S = 0.15
PHASE_LIMIT_S = 1.5
"""After this the round trips, and then the bursts, end with what there is: each loss of TCP costs 0.2 s."""
SLICES = 5
"""Of which the median counts: TCP halves its speed once when it finds the end of the queue, and machines hesitate."""
CHUNK = 256 << 10
LINE_BYTES = 64
"""Of what the other side says, which is not believed either: its lies are not to look like this node's."""
_TCP_INFO_RETRANS = 100  # struct tcp_info of linux/tcp.h: tcpi_total_retrans
_TCP_INFO_DATA_OUT = 156  # tcpi_data_segs_out


def _line(sock: socket.socket) -> str:
    line = b""
    limit = 0.0
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte:
            raise OSError("the other side has closed the connection")
        line += byte
        limit = limit or time.monotonic() + PHASE_LIMIT_S
        if len(line) > LINE_BYTES or time.monotonic() > limit:
            raise OSError("the other side says something that it was not asked for")
    return line.strip().decode(errors="replace")


def _number(said: str, most: float) -> float:
    found = float(said)
    if not 0 <= found <= most:  # nor, by that, not-a-number
        raise ValueError("the other side says a number that cannot be")
    return found


def serve(call: socket.socket) -> None:
    """The called side: answers `ping`, counts datagrams, swallows a stream and tells how fast it came."""
    call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        ear.bind(("", 0))
        call.sendall(b"%d\n" % ear.getsockname()[1])
        while True:
            word, _, seconds = _line(call).partition(" ")
            if word == "ping":
                call.sendall(b"pong\n")
            elif word == "count":
                call.sendall(b"%d\n" % _count(ear))
            elif word == "stream":
                rates = sorted(_swallow(call, float(seconds)))
                call.sendall(b"%.2f\n" % (rates[len(rates) // 2] if rates else 0.0))
                _drain(call)
                return
            else:
                return


def _count(ear: socket.socket) -> int:
    """Datagrams that are here, or come within some milliseconds after the last."""
    found = 0
    while select.select([ear], [], [], 0.005)[0]:
        ear.recv(2048)
        found += 1
    return found


def _swallow(call: socket.socket, seconds: float) -> list:  # type: ignore[type-arg]
    """Read for so long; Mbit/s in each slice of the time after the warm-up.

    A slice begins and ends with an arrival: bytes come in lumps, and a lump is no part of the time before it.
    """
    call.settimeout(seconds + WARM_S + PHASE_LIMIT_S)
    begun = time.monotonic()
    found: list = []  # type: ignore[type-arg]
    since, got = 0.0, 0
    buffer = bytearray(CHUNK)
    while True:
        try:
            size = call.recv_into(buffer)
        except socket.timeout:
            return found
        now = time.monotonic()
        if not size:
            return found
        got += size
        if since and now - since >= seconds / SLICES:
            found.append(got * 8 / 1e6 / (now - since))
        elif since or now - begun < WARM_S:
            continue
        since, got = now, 0
        if now - begun >= WARM_S + seconds:
            return found


def _drain(call: socket.socket) -> None:
    """Read on until the caller has seen the result and hangs up: closing on unread bytes would cut it off."""
    call.settimeout(PHASE_LIMIT_S)
    try:
        while call.recv(CHUNK):
            pass
    except OSError:
        return


def measure(address: str, port: int, token: str, seconds: float) -> dict:  # type: ignore[type-arg]
    """The calling side.

    Args:
        address: of the other node.
        port: on which its probe listens.
        token: of this examination.
        seconds: how long the stream is measured.

    Returns:
        `rtt_ms` (the best and the median of several), `sent` and `lost` datagrams (None when no UDP passes), `mbit_s`
        (payload, None when nothing arrived), `retransmitted` and `segments` of the stream; or `error`.
    """
    try:
        with socket.create_connection((address, port), timeout=PHASE_LIMIT_S + 1.0) as call:
            call.settimeout(PHASE_LIMIT_S + 1.0)
            call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call.sendall(token.encode() + b" measure\n")
            udp_port = int(_number(_line(call), 65_535))
            found = {"rtt_ms": _round_trips(call)}
            found.update(_bursts(call, (address, udp_port)))
            found.update(_stream(call, seconds))
            return found
    except (OSError, ValueError) as exc:
        return {"error": str(exc) or type(exc).__name__}


def _round_trips(call: socket.socket) -> list:  # type: ignore[type-arg]
    took: list = []  # type: ignore[type-arg]
    limit = time.monotonic() + PHASE_LIMIT_S
    while len(took) < PINGS and (not took or time.monotonic() < limit):
        begun = time.monotonic()
        call.sendall(b"ping\n")
        _line(call)
        took.append(time.monotonic() - begun)
    took.sort()
    return [round(took[0] * 1e3, 4), round(took[len(took) // 2] * 1e3, 4)]


def _bursts(call: socket.socket, ear: tuple) -> dict:  # type: ignore[type-arg]
    sent = arrived = 0
    limit = time.monotonic() + PHASE_LIMIT_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
        for _ in range(BURSTS):
            try:
                for _ in range(BURST):
                    mouth.sendto(DATAGRAM, ear)
            except OSError:  # a filter on this side says so
                return {"sent": 0, "lost": None}
            sent += BURST
            call.sendall(b"count\n")
            arrived += int(_number(_line(call), BURST))
            if not arrived:  # no UDP passes here, which is nobody's fault
                return {"sent": sent, "lost": None}
            if time.monotonic() > limit:
                break
    return {"sent": sent, "lost": max(0, sent - arrived)}


def _stream(call: socket.socket, seconds: float) -> dict:  # type: ignore[type-arg]
    call.sendall(b"stream %g\n" % seconds)
    call.setblocking(False)
    data = memoryview(bytes(CHUNK))
    limit = time.monotonic() + seconds + WARM_S + 2 * PHASE_LIMIT_S
    while time.monotonic() < limit:
        can_read, can_write, _ = select.select([call], [call], [], 0.5)
        if can_read:
            break
        if can_write:
            try:
                call.send(data)
            except BlockingIOError:
                continue
    info = call.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) if hasattr(socket, "TCP_INFO") else b""
    again = out = 0
    if len(info) >= _TCP_INFO_DATA_OUT + 4:
        again = struct.unpack_from("=I", info, _TCP_INFO_RETRANS)[0]
        out = struct.unpack_from("=I", info, _TCP_INFO_DATA_OUT)[0]
    call.settimeout(PHASE_LIMIT_S)
    rate = _number(_line(call), 1e9)
    # What still waits to be sent must not run beside the next measurement.
    call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return {"mbit_s": rate or None, "retransmitted": again, "segments": out}
