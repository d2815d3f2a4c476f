"""Check of an attempt's port, which shows whether the workers have ever met there. Stdlib only, Python 3.8.

Workers that never form a group each train a separate model and succeed: only their sockets show the mistake.
"""

from __future__ import annotations

import time

from dtctl import node_facts

LOOK_S = 0.2
"""Seconds between the first checks; later waits are a tenth of the attempt's age: there may be many sockets."""


class RendezvousPort:
    """The port of this node that rank 0 has to open."""

    def __init__(self, port: int) -> None:
        """Begin without a check; with port 0, the workers meet on another node, or not at all."""
        self.port = port
        self.opened: bool | None = False if port else None
        """True once the port is open; None on nodes that do not check it."""
        self._begun = time.monotonic()
        self._next = 0.0

    def check_port(self, at_once: bool = False) -> None:
        """Check whether the port is open, unless it was open before, or the last check is recent."""
        now = time.monotonic()
        if self.opened is False and (at_once or now >= self._next):
            self.opened = node_facts.has_socket_at(self.port)
            self._next = now + max(LOOK_S, (now - self._begun) / 10)
