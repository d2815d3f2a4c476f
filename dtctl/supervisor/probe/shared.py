"""Test of a shared folder: each node writes a mark, all nodes look for all marks, and all marks are removed.

Stdlib only, Python 3.8.
"""

from __future__ import annotations

import os
import time

LOOK_LIMIT_S = 3.0
EVERY_S = 0.02


class FolderMarks:
    """Marks of this node, which are removed on request, or when the probe ends."""

    def __init__(self, token: str) -> None:
        """Begin without marks; `token` identifies this examination and is part of the name of each mark."""
        self._token = token
        self._left: list = []  # type: ignore[type-arg]

    def _build_mark_path(self, folder: str, node: str) -> str:
        return os.path.join(os.path.expanduser(folder), ".dtctl-doctor-%s-%s" % (self._token, node))

    def write_marks(self, folders: list, node: str) -> list:  # type: ignore[type-arg]
        """Write a mark into each folder; return the folders in which this was possible."""
        done = []
        for folder in folders:
            path = self._build_mark_path(folder, node)
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except OSError:
                continue
            self._left.append(path)
            done.append(folder)
        return done

    def wait_for_marks(self, wanted: list) -> list:  # type: ignore[type-arg]
        """Return for each [folder, node] the seconds until the mark was seen, or None."""
        begun = time.monotonic()
        delays: list = [None] * len(wanted)  # type: ignore[type-arg]
        while None in delays and time.monotonic() - begun < LOOK_LIMIT_S:
            for index, (folder, node) in enumerate(wanted):
                if delays[index] is None:
                    try:
                        # A list is requested from the server; a look-up of one name may be answered from a cache.
                        there = os.path.basename(self._build_mark_path(folder, node)) in os.listdir(
                            os.path.expanduser(folder)
                        )
                    except OSError:
                        there = False
                    if there:
                        delays[index] = round(time.monotonic() - begun, 3)
            time.sleep(EVERY_S)
        return delays

    def remove(self) -> None:
        """Remove all marks."""
        for path in self._left:
            try:
                os.unlink(path)
            except OSError:
                continue
        self._left = []
