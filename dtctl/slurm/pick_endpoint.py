"""Print the address that this node has on the way to another one, and two ports that are free here.

One is for the workers, one for the monitors beside them. Sent as text into a batch script, see
`dtctl.render.standalone`; Python 3.8 is enough. The ports depend on the run, the job and its start.
"""

import socket
import sys

from dtctl.node_facts import address_towards, first_free, port_candidates

seed, fixed, count, names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
# Last, an address of no machine: what this node has on its default route. Nothing is sent there.
for name in [*names, socket.gethostname(), "192.0.2.1"]:
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except OSError:
        continue
    address = address_towards(str(found[0][4][0]))
    # Names that only /etc/hosts knows may mean this machine itself, which no other node reaches by that address.
    if address and (count == 1 or (not address.startswith("127.") and address != "::1")):
        break
else:
    tried = " or ".join(names)
    raise SystemExit(f"dtctl: this node has no address that {tried} can reach")
ports = port_candidates(seed)
port = first_free([fixed] if fixed else ports)
if not port:
    raise SystemExit("dtctl: no port is free on the first node")
print(address, port, first_free([other for other in ports if other != port]))  # noqa: T201
