"""Print the address that this node has on the way to another one, and a port that is free here.

The ports lie below the range that the kernel gives out by itself (32768 on), so that one found free stays so; they
depend on the job and its start. Sent as text into a batch script; Python 3.8 is enough.
"""

import socket
import sys
import zlib

peer, salt, fixed = sys.argv[1], sys.argv[2], sys.argv[3]
try:
    found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
except OSError:
    found = socket.getaddrinfo(socket.gethostname(), 9, type=socket.SOCK_DGRAM)
with socket.socket(found[0][0], socket.SOCK_DGRAM) as way:
    way.connect(found[0][4])  # sends nothing: the kernel chooses the route
    address = way.getsockname()[0]
start = zlib.crc32(salt.encode())
for attempt in range(64):
    port = int(fixed) or 20000 + (start + 7919 * attempt) % 9000
    with socket.socket(found[0][0], socket.SOCK_STREAM) as tried:
        try:
            tried.bind((address, port))
        except OSError as exc:
            reason = exc
            continue
    print(address, port)  # noqa: T201
    break
else:
    raise SystemExit(f"dtctl: no port is free on the first node: {reason}")
