"""Sockets of a process group, found by comparison: gloo does not list them, and aborting it ends no wait.

A collective that waits for a peer that has ended or left stops at once when its own sockets are shut down, even if the
other end does nothing (seen with torch 2.13: gloo's `abort` returns, and the collective keeps waiting).
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/proc/self/fd")

Sockets = frozenset[tuple[int, str]]
"""Descriptor, and the kernel's name of its socket: the number alone may belong to another file later."""


def list_open_sockets() -> Sockets:
    """Return the sockets of this process."""
    found = set()
    for path in FOLDER.iterdir():
        link = _read_descriptor_link(int(path.name))
        if link.startswith("socket:"):
            found.add((int(path.name), link))
    return frozenset(found)


def shut_down(sockets: Sockets) -> None:
    """Shut down the connections that are still open; waits for them end with an error.

    Their descriptors stay open.
    """
    for number, link in sockets:
        if _read_descriptor_link(number) != link:
            continue
        with contextlib.suppress(OSError):  # not connected
            held = socket.socket(fileno=number)
            try:
                # a listening socket stays, since gloo's thread would abort
                is_listening = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if held.family in (socket.AF_INET, socket.AF_INET6) and not is_listening:
                    # Only for reading: a send that is just beginning would fail halfway (stuck.py).
                    held.shutdown(socket.SHUT_RD)
            finally:
                held.detach()


def _read_descriptor_link(number: int) -> str:
    try:
        return str((FOLDER / str(number)).readlink())
    except OSError:
        return ""
