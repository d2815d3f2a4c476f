"""Print the interface that this node reaches an address through; on the node that has it, the one that holds it.

Sent as text into a batch script, see `dtctl.render.standalone`; Python 3.8 is enough.
"""

import sys

from dtctl.node_facts import address_towards, interface_of

address = address_towards(sys.argv[1])
if not address:
    raise SystemExit(f"dtctl: there is no route to {sys.argv[1]}")
print(interface_of(address))  # noqa: T201
