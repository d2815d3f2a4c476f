"""Output cut into lines as people want to see them, however long it is and however it arrives."""

from __future__ import annotations

from typing import Final

LONGEST_BYTES: Final = 1 << 16
"""A line that is longer is shown in several; it is kept whole in its file."""


class Lines:
    """What one process has printed, from piece to piece. Takes time and memory by what comes, not by what came."""

    def __init__(self) -> None:
        self._part = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their ends.

        A progress bar redraws its line with carriage returns; its last state counts.
        """
        found: list[str] = []
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._add(piece, found)
            found.append(self._take(len(self._part)))
        self._add(rest, found)
        return found

    def rest(self) -> str:
        """The line that was begun and never ended; it counts as ended now."""
        return self._take(len(self._part))

    def _add(self, data: bytes, found: list[str]) -> None:
        drawn = data.rstrip(b"\r")
        if drawn and self._part.endswith(b"\r"):
            self._part.clear()
        again = drawn.rfind(b"\r")
        if again >= 0:
            self._part.clear()
        self._part += drawn[again + 1 :]
        if len(drawn) < len(data) and not self._part.endswith(b"\r"):
            self._part += b"\r"
        while len(self._part) > LONGEST_BYTES:
            found.append(self._take(LONGEST_BYTES))

    def _take(self, size: int) -> str:
        text = bytes(self._part[:size]).rstrip(b"\r").decode(errors="replace")
        del self._part[:size]
        return text
