"""Wait until a name is known; print its address, and the interface that this pod reaches it through.

Pods of one job come up at different times, and their names are known a moment after that. Sent as text into a pod's
script; Python 3.8 is enough.
"""

import fcntl
import socket
import struct
import sys
import time

name, limit_s = sys.argv[1], float(sys.argv[2])
deadline = time.monotonic() + limit_s
while True:
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        break
    except OSError as exc:
        if time.monotonic() > deadline:
            raise SystemExit(f"dtctl: {name} is not known after {limit_s:g} s: {exc}") from None
        time.sleep(0.5)
address, interface = found[4][0], ""
with socket.socket(found[0], socket.SOCK_DGRAM) as way:
    way.connect(found[4])  # sends nothing: the kernel chooses the route
    own = way.getsockname()[0]
    for _, candidate in socket.if_nameindex():
        try:
            answer = fcntl.ioctl(way, 0x8915, struct.pack("256s", candidate.encode()[:15]))  # SIOCGIFADDR
        except OSError:  # it has no address of version 4
            continue
        if socket.inet_ntoa(answer[20:24]) == own:
            interface = candidate
print(address, interface)  # noqa: T201
