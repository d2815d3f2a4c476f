"""The log files of a run as lines: those of a node, a rank, an attempt, with a pattern, or of the last minutes."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from dtctl import folders, names
from dtctl.cli import output
from dtctl.launch.records.logs import Lines, attempts_of, offset_at, rank_of

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord

PIECE_BYTES = 1 << 20
LOOK_BACK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Selection of log lines."""

    node: str | None = None
    rank: int | None = None
    tail: int | None = None
    """Lines of each worker that are shown of the existing output."""
    tail_bytes: int | None = None
    """Bytes that are shown of the end of the existing output, perhaps not from the beginning of a line."""
    attempt: int | None = None
    """Attempt from 0; negative: counted from the newest."""
    pattern: re.Pattern[str] | None = None
    changed_since: float | None = None
    """Seconds since the epoch."""


class LogLine(NamedTuple):
    """A line that a process has printed."""

    node: str
    rank: int
    """AGENT for torchrun's agent."""
    text: str

    @property
    def origin(self) -> str:
        """Prefix that identifies the process to the user."""
        return f"[{self.node}:{'agent' if self.rank < 0 else self.rank}]"


class LogReader:
    """Reads a run's log files, each from where it stopped."""

    def __init__(self, record: RunRecord, chosen: LogFilter) -> None:
        self._folder = record.folder / names.LOGS_DIR
        self._chosen = chosen
        self._attempts = attempts_of(record.folder)
        self._read: dict[Path, int] = {}
        self._partial: dict[Path, Lines] = {}

    @property
    def has_output(self) -> bool:
        """Return whether the workers have printed anything, selected or not."""
        return any(path.is_file() and path.stat().st_size for path in self._folder.glob("*/*.log"))

    def read_new(self) -> Iterator[LogLine]:
        """Read all whole lines that were not read yet."""
        for path in sorted(self._folder.glob("*/*.log")):
            if self._is_selected(path):
                for text in self._read_file(path):
                    yield LogLine(path.parent.name, rank_of(path), text)

    def read_rest(self) -> Iterator[LogLine]:
        """Read lines that were begun and never ended."""
        for path, lines in self._partial.items():
            if text := lines.flush():
                yield LogLine(path.parent.name, rank_of(path), text)
        self._partial.clear()

    def _is_selected(self, path: Path) -> bool:
        if self._chosen.node is not None and path.parent.name != self._chosen.node:
            return False
        return self._chosen.rank is None or path.name == f"rank-{self._chosen.rank}.log"

    def _read_file(self, path: Path) -> Iterator[str]:
        try:
            file = os.fdopen(folders.open_regular(str(path)), "rb")
        except OSError as exc:
            if path not in self._read:
                output.err(f"{path} cannot be read: {exc.strerror}", "yellow")
            self._read[path] = 0
            return
        with file:
            is_first = path not in self._read
            begin, end = self._span(path, file) if is_first else (self._read[path], self._end(path))
            # Shorter than it was: its middle was cut out, and what is new stands at its end.
            begin = min(begin, file.seek(0, os.SEEK_END))
            texts = self._lines(path, file, begin, end)
            yield from deque(texts, self._chosen.tail) if is_first and self._chosen.tail is not None else texts

    def _lines(self, path: Path, file: BinaryIO, begin: int, end: int | None) -> Iterator[str]:
        """Yield the lines between two places that have the pattern; what is read is noted."""
        lines = self._partial.setdefault(path, Lines())
        file.seek(begin)
        self._read[path] = begin
        while data := file.read(PIECE_BYTES if end is None else min(PIECE_BYTES, max(0, end - file.tell()))):
            self._read[path] = file.tell()
            for text in lines.feed(data):
                if self._chosen.pattern is None or self._chosen.pattern.search(text):
                    yield text

    def _number(self) -> int | None:
        """Return the chosen attempt, counted from 0."""
        attempt = self._chosen.attempt
        if attempt is None:
            return None
        return attempt if attempt >= 0 else max(0, len(self._attempts) + attempt)

    def _span(self, path: Path, file: BinaryIO) -> tuple[int, int | None]:
        """Return the offsets between which a file is read."""
        number, begin = self._number(), 0
        if number is not None:
            if number >= max(1, len(self._attempts)):
                return 0, 0
            begin = self._begun(path, number)
        if self._chosen.changed_since is not None:
            begin = max(begin, _line_start(file, offset_at(path, self._chosen.changed_since)))
        if self._chosen.tail_bytes is not None:
            begin = max(begin, file.seek(0, os.SEEK_END) - self._chosen.tail_bytes)
        return begin, self._end(path)

    def _end(self, path: Path) -> int | None:
        number = self._number()
        if number is None or number + 1 >= len(self._attempts):
            return None
        return self._begun(path, number + 1)

    def _begun(self, path: Path, number: int) -> int:
        """Size of a file when an attempt began."""
        sizes = self._attempts[number] if number < len(self._attempts) else {}
        return sizes.get((path.parent.name, rank_of(path)), 0)


def _line_start(file: BinaryIO, offset: int) -> int:
    """Return the beginning of the line in which a place lies."""
    start = max(0, offset - LOOK_BACK_BYTES)
    file.seek(start)
    before, newline, _ = file.read(offset - start).rpartition(b"\n")
    return start + len(before) + len(newline) if newline or not start else offset
