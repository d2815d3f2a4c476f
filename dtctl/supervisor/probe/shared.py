"""Test of a shared folder: each node leaves a mark there, all look for all marks, all marks go.

Stdlib only, Python 3.8.
"""

from __future__ import annotations

import os
import time

LOOK_LIMIT_S = 3.0
EVERY_S = 0.02


class Marks:
    """Marks that this node has left; removed on request, or when it ends."""

    def __init__(self, token: str) -> None:
        """`token`: of this examination; part of every mark's name."""
        self._token = token
        self._left: list = []  # type: ignore[type-arg]

    def _path(self, folder: str, node: str) -> str:
        return os.path.join(os.path.expanduser(folder), ".dtctl-doctor-%s-%s" % (self._token, node))

    def leave(self, folders: list, node: str) -> list:  # type: ignore[type-arg]
        """Leave a mark in each folder; those in which it was possible."""
        done = []
        for folder in folders:
            path = self._path(folder, node)
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except OSError:
                continue
            self._left.append(path)
            done.append(folder)
        return done

    def look(self, wanted: list) -> list:  # type: ignore[type-arg]
        """Return for each [folder, node] the seconds until the mark was seen, or None."""
        begun = time.monotonic()
        delays: list = [None] * len(wanted)  # type: ignore[type-arg]
        while None in delays and time.monotonic() - begun < LOOK_LIMIT_S:
            for index, (folder, node) in enumerate(wanted):
                if delays[index] is None:
                    try:
                        # Listing asks the server again; a look-up of one name may be answered from a cache.
                        there = os.path.basename(self._path(folder, node)) in os.listdir(os.path.expanduser(folder))
                    except OSError:
                        there = False
                    if there:
                        delays[index] = round(time.monotonic() - begun, 3)
            time.sleep(EVERY_S)
        return delays

    def remove(self) -> None:
        """Take all marks away."""
        for path in self._left:
            try:
                os.unlink(path)
            except OSError:
                continue
        self._left = []
