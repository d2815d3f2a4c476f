"""Quality of the connection from one node to another: round trips, loss, bandwidth. Stdlib only, Python 3.8.

The receiver counts the arriving bytes after a warm-up in which TCP finds its speed and a shaper's bucket runs empty.
Loss is measured by small bursts over UDP, each counted before the next: TCP loses packets on any full link, and even a
slow receiver loses no packet of a burst that fits into its buffer.
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
"""Number of datagrams in a burst, which fit into the smallest receive buffer of Linux."""
DATAGRAM = b"\0" * 64
WARM_S = 0.15
PHASE_LIMIT_S = 1.5
"""Seconds after which the round trips, and then the bursts, end: each packet that TCP loses costs 0.2 s."""
SLICES = 5
"""Number of slices of the measurement, whose median counts, since TCP halves its speed once when the queue is full, and
machines pause."""
STALL_S = 2.0
"""Seconds of silence in a stream after which it counts as stalled: TCP has then tried again three times."""
ENOUGH_BYTES = 48 << 20
"""Least bytes of a stream, unless `MORE_S` ends before, since a device between the nodes may fail after some
megabytes."""
MORE_S = 1.0
MANY = 4 * BURST
CHUNK = 256 << 10
LINE_BYTES = 64
"""Most bytes of a line from the other side, which is not trusted: its false data must not look like this node's."""
_TCP_INFO_RETRANS = 100  # This is the offset of tcpi_total_retrans in struct tcp_info of linux/tcp.h.
_TCP_INFO_DATA_OUT = 156  # This is the offset of tcpi_data_segs_out.


def _receive_line(sock: socket.socket) -> str:
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


def _parse_bounded_number(said: str, most: float) -> float:
    number = float(said)
    if not 0 <= number <= most:  # This also rejects NaN.
        raise ValueError("the other side sent an impossible number")
    return number


def serve_measurement(call: socket.socket) -> None:
    """Serve a measurement as the called side: answer `ping`, count datagrams, read a stream and report its speed."""
    call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        ear.bind(("", 0))
        call.sendall(b"%d\n" % ear.getsockname()[1])
        while True:
            word, _, seconds = _receive_line(call).partition(" ")
            if word == "ping":
                call.sendall(b"pong\n")
            elif word == "count":
                call.sendall(b"%d\n" % _count_datagrams(ear))
            elif word == "stream":
                rates, got, word = _measure_received_stream(call, float(seconds))
                rates.sort()
                rate = rates[len(rates) // 2] if rates else 0.0
                call.sendall(b"%.2f %d %s\n" % (rate, got, word.encode()))
                _drain_connection(call)
                return
            else:
                return


def _count_datagrams(ear: socket.socket) -> int:
    """Return the number of datagrams that have arrived, or arrive within some milliseconds after the last one."""
    count = 0
    while count < MANY and select.select([ear], [], [], 0.005)[0]:
        ear.recv(2048)
        count += 1
    return count


def _measure_received_stream(call: socket.socket, seconds: float) -> tuple:  # type: ignore[type-arg]
    """Read a stream; return Mbit/s in each slice after the warm-up, the total of bytes, and `stalled` or `-`.

    A slice begins and ends with an arrival, since bytes arrive in lumps, and a lump does not belong to the time before
    it. All bytes that the kernel has received count, even unread ones: on a busy machine this program reads late, and
    waiting bytes would otherwise count to a slice in which they did not arrive.
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
    """Return the number of bytes that the kernel has received and that were not read yet."""
    return struct.unpack("i", fcntl.ioctl(call, termios.FIONREAD, bytes(4)))[0]  # type: ignore[no-any-return]


def _drain_connection(call: socket.socket) -> None:
    """Read until the caller closes the connection, since closing it with unread bytes would discard the result."""
    call.settimeout(PHASE_LIMIT_S)
    try:
        while call.recv(CHUNK):
            pass
    except OSError:
        return


def measure_connection(call: socket.socket, seconds: float) -> dict:  # type: ignore[type-arg]
    """Measure a connection as the calling side.

    Args:
        call: connection to the other node, which serves the measurement.
        seconds: seconds for which the stream is measured.

    Returns:
        `rtt_ms` (the best and the median of several), `sent`, `lost` and `twice` datagrams (None if no UDP passes),
        `mbit_s` (payload, None if nothing arrived), `retransmitted` and `segments` of the stream, its `carried` bytes,
        and `broken` (stalled or reset) if it was interrupted; or `error`.
    """
    try:
        udp_port = int(_parse_bounded_number(_receive_line(call), 65_535))
        figures = {"rtt_ms": _round_trips(call)}
        figures.update(_measure_datagram_loss(call, (call.getpeername()[0], udp_port)))
        figures.update(_measure_stream_speed(call, seconds))
    except (OSError, ValueError) as exc:
        return {"error": str(exc) or type(exc).__name__}
    return figures


def _round_trips(call: socket.socket) -> list:  # type: ignore[type-arg]
    took: list = []  # type: ignore[type-arg]
    limit = time.monotonic() + PHASE_LIMIT_S
    while len(took) < PINGS and (not took or time.monotonic() < limit):
        begun = time.monotonic()
        call.sendall(b"ping\n")
        _receive_line(call)
        took.append(time.monotonic() - begun)
    took.sort()
    return [round(took[0] * 1e3, 4), round(took[len(took) // 2] * 1e3, 4)]


def _measure_datagram_loss(call: socket.socket, ear: tuple) -> dict:  # type: ignore[type-arg]
    sent = lost = twice = 0
    limit = time.monotonic() + PHASE_LIMIT_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
        for _ in range(BURSTS):
            gone = 0
            for _ in range(BURST):
                try:
                    mouth.sendto(DATAGRAM, ear)
                    gone += 1
                except OSError:  # A local filter reports dropped packets; they count as lost.
                    continue
            if not gone:
                return {"sent": 0, "lost": None}
            sent += BURST
            call.sendall(b"count\n")
            arrived = int(_parse_bounded_number(_receive_line(call), MANY))
            if not arrived:  # UDP may be filtered, which is not an error.
                return {"sent": sent, "lost": None}
            lost += max(0, BURST - arrived)
            twice += max(0, arrived - BURST)
            if time.monotonic() > limit:
                break
    return {"sent": sent, "lost": lost, "twice": twice}


def _measure_stream_speed(call: socket.socket, seconds: float) -> dict:  # type: ignore[type-arg]
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
            words = _receive_line(call).split()
        except OSError:
            return {**figures, "broken": "reset"}
        if len(words) != 3 or words[2] not in ("-", "stalled"):
            raise ValueError("the other side sent something that was not requested")
        figures["mbit_s"] = _parse_bounded_number(words[0], 1e9) or None
        figures["carried"] = int(_parse_bounded_number(words[1], 1e15))
        figures["broken"] = words[2].strip("-")
    # Unsent data must not be sent during the next measurement.
    call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return figures
