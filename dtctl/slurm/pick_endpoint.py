"""Print the address that this node has on the way to another one, and two ports that are free here.

One is for the workers, one for the monitors beside them. Sent as text into a batch script, see
`dtctl.render.standalone`; Python 3.8 is enough. The ports depend on the job and its start.
"""

import socket
import sys

from dtctl.node_facts import address_towards, first_free, port_candidates

peer, seed, fixed = sys.argv[1], sys.argv[2], int(sys.argv[3])
try:
    found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
except OSError:
    found = socket.getaddrinfo(socket.gethostname(), 9, type=socket.SOCK_DGRAM)
address = address_towards(str(found[0][4][0]))
if not address:
    raise SystemExit(f"dtctl: there is no route to {peer}")
ports = port_candidates(seed)
port = first_free([fixed] if fixed else ports)
if not port:
    raise SystemExit("dtctl: no port is free on the first node")
print(address, port, first_free([other for other in ports if other != port]))  # noqa: T201
