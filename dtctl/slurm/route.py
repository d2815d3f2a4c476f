"""Print the interface that this node reaches an address through; on the node that has it, the one that holds it.

Sent as text into a batch script; Python 3.8 is enough.
"""

import fcntl
import socket
import struct
import sys

address = sys.argv[1]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as way:
    way.connect((address, 9))  # sends nothing: the kernel chooses the route
    own = way.getsockname()[0]
    for _, name in socket.if_nameindex():
        if family == socket.AF_INET6:
            with open("/proc/net/if_inet6") as table:
                rows = [row.split() for row in table]
            held = [row[0] for row in rows if row[5] == name]
            mine = socket.inet_pton(family, own.split("%")[0]).hex() in held
        else:
            try:
                answer = fcntl.ioctl(way, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:  # it has no address
                continue
            mine = socket.inet_ntoa(answer[20:24]) == own
        if mine:
            print(name)  # noqa: T201
            break
