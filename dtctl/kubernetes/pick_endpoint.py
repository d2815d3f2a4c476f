"""Wait until a name is known; print its address, the interface on the way to it, `-` for none, and this pod's cores.

Pods of one job come up at different times, and their names are known a moment after that. Sent as text into a pod's
script, see `dtctl.render.inline_node_facts`; Python 3.8 is enough.
"""

import socket
import sys
import time

from dtctl.node_facts import count_usable_cores, find_interface_towards

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
address = str(found[4][0])
print(address, find_interface_towards(address) or "-", count_usable_cores())  # noqa: T201
