"""Watch of the port of an attempt: whether its workers have ever met there. Stdlib only, Python 3.8.

Workers that never form a group train a model each, and end well: only their sockets show it.
"""

from __future__ import annotations

import time

from dtctl import node_facts

LOOK_S = 0.2
"""Seconds between two looks at first; later a tenth of the attempt's age, for the list of sockets may be long."""


class RendezvousPort:
    """The port of this node that rank 0 has to open."""

    def __init__(self, port: int) -> None:
        """Look for nothing yet; 0: the workers meet on another node, or need not meet."""
        self.port = port
        self.opened: bool | None = False if port else None
        """True once the port is open; None on nodes that do not check it."""
        self._begun = time.monotonic()
        self._next = 0.0

    def check_port(self, at_once: bool = False) -> None:
        """Check whether it is open, unless it was, or the last look was just now."""
        now = time.monotonic()
        if self.opened is False and (at_once or now >= self._next):
            self.opened = node_facts.has_socket_at(self.port)
            self._next = now + max(LOOK_S, (now - self._begun) / 10)
