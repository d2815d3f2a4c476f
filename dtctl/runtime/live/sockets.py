"""Sockets of a process group, found from outside: gloo does not name them, and aborting it ends no wait.

A collective that waits for a peer which is gone, or which has left, ends when its own sockets are shut down, at once
and whatever the other end does (seen with torch 2.13: gloo's `abort` returns and the collective waits on).
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/proc/self/fd")

Sockets = frozenset[tuple[int, str]]
"""Descriptor, and the kernel's name of the socket behind it: a number alone may be another file's by now."""


def opened() -> Sockets:
    """Return the sockets of this process."""
    found = set()
    for path in FOLDER.iterdir():
        link = _link(int(path.name))
        if link.startswith("socket:"):
            found.add((int(path.name), link))
    return frozenset(found)


def shut_down(sockets: Sockets) -> None:
    """Shut down the connections that are still there; waits for them end with an error. They stay open."""
    for number, link in sockets:
        if _link(number) != link:
            continue
        with contextlib.suppress(OSError):  # not connected
            held = socket.socket(fileno=number)
            try:
                is_listening = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # gloo's thread would abort
                if held.family in (socket.AF_INET, socket.AF_INET6) and not is_listening:
                    # Not for writing: a send that is just beginning would fail in the midst (stuck.py).
                    held.shutdown(socket.SHUT_RD)
            finally:
                held.detach()


def _link(number: int) -> str:
    try:
        return str((FOLDER / str(number)).readlink())
    except OSError:
        return ""
