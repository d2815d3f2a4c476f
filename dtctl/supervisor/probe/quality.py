"""Quality of the way from one node to another: round trips, loss, bandwidth. Stdlib only, Python 3.8.

The bandwidth is what arrives, counted by the receiver after a warm-up in which TCP finds its speed and a shaper's
bucket runs empty. Loss is counted on UDP in small bursts, each counted before the next: TCP loses packets on any full
link, and a receiver that is late loses none of a burst that fits its buffer.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import time

PINGS = 20
BURSTS = 5
BURST = 100
"""Datagrams in a burst; they fit into the smallest receive buffer of Linux."""
DATAGRAM = b"\0" * 64
WARM_S = 0.15
PHASE_LIMIT_S = 1.5
"""Seconds after which the round trips, and then the bursts, end with what there is: each loss of TCP costs 0.2 s."""
SLICES = 5
"""Slices of the measurement; their median counts, since TCP halves its speed once when the queue is full, and machines
pause."""
STALL_S = 2.0
"""Silence in the middle of a stream after which nothing more will come: TCP has tried again three times by then."""
ENOUGH_BYTES = 48 << 20
"""Bytes that a stream carries at least, if it does so within `MORE_S`: what is in between may give up after some
megabytes."""
MORE_S = 1.0
MANY = 4 * BURST
CHUNK = 256 << 10
LINE_BYTES = 64
"""Bytes of a line from the other side. It is not trusted: its false data must not look like this node's."""
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
            raise OSError("the other side sent something that was not requested")
    return line.strip().decode(errors="replace")


def _number(said: str, most: float) -> float:
    number = float(said)
    if not 0 <= number <= most:  # nor, by that, not-a-number
        raise ValueError("the other side sent an impossible number")
    return number


def serve(call: socket.socket) -> None:
    """Serve as the called side: answer `ping`, count datagrams, read a stream and report its speed."""
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
                rates, got, word = _swallow(call, float(seconds))
                rates.sort()
                rate = rates[len(rates) // 2] if rates else 0.0
                call.sendall(b"%.2f %d %s\n" % (rate, got, word.encode()))
                _drain(call)
                return
            else:
                return


def _count(ear: socket.socket) -> int:
    """Datagrams that are here, or come within some milliseconds after the last."""
    count = 0
    while count < MANY and select.select([ear], [], [], 0.005)[0]:
        ear.recv(2048)
        count += 1
    return count


def _swallow(call: socket.socket, seconds: float) -> tuple:  # type: ignore[type-arg]
    """Read for so long; Mbit/s in each slice of the time after the warm-up, bytes in all, and `stalled` or `-`.

    A slice begins and ends with an arrival: bytes come in lumps, and a lump is no part of the time before it. What the
    kernel has received by then counts, read or not: on a busy machine this program comes late, and what has waited for
    it would be counted to a slice in which it did not arrive.
    """
    call.settimeout(STALL_S)
    begun = time.monotonic()
    found: list = []  # type: ignore[type-arg]
    since, got, every, waited = 0.0, 0, 0, 0
    buffer = bytearray(CHUNK)
    while True:
        try:
            size = call.recv_into(buffer)
        except socket.timeout:
            return found, every, "stalled"
        except OSError:
            return found, every, "-"
        now = time.monotonic()
        if not size:
            return found, every, "-"
        got += size
        every += size
        over = WARM_S + seconds
        if now - begun >= over and (every >= ENOUGH_BYTES or now - begun >= over + MORE_S):
            return found, every, "-"
        if now - begun >= over + seconds / SLICES and found:
            continue
        if since and now - since >= seconds / SLICES:
            found.append((got + _waiting_bytes(call) - waited) * 8 / 1e6 / (now - since))
        elif since or now - begun < WARM_S:
            continue
        since, got, waited = now, 0, _waiting_bytes(call)


def _waiting_bytes(call: socket.socket) -> int:
    """Return how many bytes the kernel has received that were not read yet."""
    return struct.unpack("i", fcntl.ioctl(call, termios.FIONREAD, bytes(4)))[0]  # type: ignore[no-any-return]


def _drain(call: socket.socket) -> None:
    """Read on until the caller has seen the result and hangs up: closing on unread bytes would cut it off."""
    call.settimeout(PHASE_LIMIT_S)
    try:
        while call.recv(CHUNK):
            pass
    except OSError:
        return


def measure(call: socket.socket, seconds: float) -> dict:  # type: ignore[type-arg]
    """Measure as the calling side.

    Args:
        call: to the other node, which now serves.
        seconds: how long the stream is measured.

    Returns:
        `rtt_ms` (the best and the median of several), `sent`, `lost` and `twice` datagrams (None when no UDP passes),
        `mbit_s` (payload, None when nothing arrived), `retransmitted` and `segments` of the stream, the bytes that it
        has `carried`, and if it was interrupted, how it is `broken`: stalled or reset; or `error`.
    """
    try:
        udp_port = int(_number(_line(call), 65_535))
        figures = {"rtt_ms": _round_trips(call)}
        figures.update(_bursts(call, (call.getpeername()[0], udp_port)))
        figures.update(_stream(call, seconds))
    except (OSError, ValueError) as exc:
        return {"error": str(exc) or type(exc).__name__}
    return figures


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
    sent = lost = twice = 0
    limit = time.monotonic() + PHASE_LIMIT_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
        for _ in range(BURSTS):
            gone = 0
            for _ in range(BURST):
                try:
                    mouth.sendto(DATAGRAM, ear)
                    gone += 1
                except OSError:  # a filter on this side reports it; one that drops some loses them like any other
                    continue
            if not gone:
                return {"sent": 0, "lost": None}
            sent += BURST
            call.sendall(b"count\n")
            arrived = int(_number(_line(call), MANY))
            if not arrived:  # no UDP passes here, which is no error
                return {"sent": sent, "lost": None}
            lost += max(0, BURST - arrived)
            twice += max(0, arrived - BURST)
            if time.monotonic() > limit:
                break
    return {"sent": sent, "lost": lost, "twice": twice}


def _stream(call: socket.socket, seconds: float) -> dict:  # type: ignore[type-arg]
    call.sendall(b"stream %g\n" % seconds)
    call.setblocking(False)
    data = memoryview(bytes(CHUNK))
    limit = time.monotonic() + seconds + WARM_S + MORE_S + STALL_S + PHASE_LIMIT_S
    broken, sent = "stalled", 0
    while time.monotonic() < limit:
        can_read, can_write, _ = select.select([call], [call], [], 0.5)
        if can_read:
            broken = ""
            break
        if can_write:
            try:
                sent += call.send(data)
            except BlockingIOError:
                continue
            except OSError:
                return {"mbit_s": None, "carried": sent, "broken": "reset"}
    info = call.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) if hasattr(socket, "TCP_INFO") else b""
    again = out = 0
    if len(info) >= _TCP_INFO_DATA_OUT + 4:
        again = struct.unpack_from("=I", info, _TCP_INFO_RETRANS)[0]
        out = struct.unpack_from("=I", info, _TCP_INFO_DATA_OUT)[0]
    figures: dict = {"mbit_s": None, "retransmitted": again, "segments": out, "carried": sent, "broken": broken}  # type: ignore[type-arg]
    if not broken:
        call.settimeout(PHASE_LIMIT_S)
        try:
            words = _line(call).split()
        except OSError:
            return {**figures, "broken": "reset"}
        if len(words) != 3 or words[2] not in ("-", "stalled"):
            raise ValueError("the other side sent something that was not requested")
        figures["mbit_s"] = _number(words[0], 1e9) or None
        figures["carried"] = int(_number(words[1], 1e15))
        figures["broken"] = words[2].strip("-")
    # Data that still waits to be sent must not run during the next measurement.
    call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return figures
