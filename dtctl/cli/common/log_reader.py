"""Lines of a run's log files, selected by node, rank, attempt, pattern or time."""

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
from dtctl.launch.records.logs import LineSplitter, find_offset_at, read_attempt_offsets
from dtctl.supervisor.frames import format_log_name, parse_log_name

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
    """Number of existing lines of each worker that are shown."""
    tail_bytes: int | None = None
    """Number of bytes at the end of the existing output that are shown; the first line may be incomplete."""
    attempt: int | None = None
    """Number of the attempt from 0; a negative number counts from the newest."""
    pattern: re.Pattern[str] | None = None
    changed_since: float | None = None
    """Earliest time of a shown line, in seconds since the epoch."""


class RankLogLine(NamedTuple):
    """Line of output of a process."""

    node: str
    rank: int
    """Rank of the worker; AGENT for torchrun's agent."""
    text: str


class LogReader:
    """Reader of a run's log files; it continues each file where it stopped."""

    def __init__(self, record: RunRecord, chosen: LogFilter) -> None:
        self._folder = record.folder / names.LOGS_DIR
        self._chosen = chosen
        self._attempts = read_attempt_offsets(record.folder)
        self._read: dict[Path, int] = {}
        self._partial: dict[Path, LineSplitter] = {}

    @property
    def has_output(self) -> bool:
        """Return whether the workers have printed anything, selected or not."""
        return any(path.is_file() and path.stat().st_size for path in self._folder.glob("*/*.log"))

    def read_new(self) -> Iterator[RankLogLine]:
        """Read all complete lines that were not read yet."""
        for path in sorted(self._folder.glob("*/*.log")):
            if self._is_selected(path):
                for text in self._read_file(path):
                    yield RankLogLine(path.parent.name, parse_log_name(path.name), text)

    def read_rest(self) -> Iterator[RankLogLine]:
        """Read the last lines that have no end."""
        for path, lines in self._partial.items():
            if text := lines.flush():
                yield RankLogLine(path.parent.name, parse_log_name(path.name), text)
        self._partial.clear()

    def _is_selected(self, path: Path) -> bool:
        if self._chosen.node is not None and path.parent.name != self._chosen.node:
            return False
        return self._chosen.rank is None or path.name == format_log_name(self._chosen.rank)

    def _read_file(self, path: Path) -> Iterator[str]:
        try:
            file = os.fdopen(folders.open_regular(str(path)), "rb")
        except OSError as exc:
            if path not in self._read:
                output.print_stderr(f"{path} cannot be read: {exc.strerror}", "yellow")
            self._read[path] = 0
            return
        with file:
            is_first = path not in self._read
            begin, end = (
                self._compute_read_range(path, file) if is_first else (self._read[path], self._find_attempt_end(path))
            )
            # The file has become shorter: its middle was removed, and the new lines stand at its end.
            begin = min(begin, file.seek(0, os.SEEK_END))
            texts = self._read_matching_lines(path, file, begin, end)
            yield from deque(texts, self._chosen.tail) if is_first and self._chosen.tail is not None else texts

    def _read_matching_lines(self, path: Path, file: BinaryIO, begin: int, end: int | None) -> Iterator[str]:
        """Yield the lines between two offsets that match the pattern, and store the offset that was read."""
        lines = self._partial.setdefault(path, LineSplitter())
        file.seek(begin)
        self._read[path] = begin
        while data := file.read(PIECE_BYTES if end is None else min(PIECE_BYTES, max(0, end - file.tell()))):
            self._read[path] = file.tell()
            for text in lines.feed(data):
                if self._chosen.pattern is None or self._chosen.pattern.search(text):
                    yield text

    def _resolve_attempt_number(self) -> int | None:
        """Return the chosen attempt, counted from 0."""
        attempt = self._chosen.attempt
        if attempt is None:
            return None
        return attempt if attempt >= 0 else max(0, len(self._attempts) + attempt)

    def _compute_read_range(self, path: Path, file: BinaryIO) -> tuple[int, int | None]:
        """Return the offsets between which a file is read; None for the end means the whole rest."""
        number, begin = self._resolve_attempt_number(), 0
        if number is not None:
            if number >= max(1, len(self._attempts)):
                return 0, 0
            begin = self._find_attempt_start(path, number)
        if self._chosen.changed_since is not None:
            begin = max(begin, _line_start(file, find_offset_at(path, self._chosen.changed_since)))
        if self._chosen.tail_bytes is not None:
            begin = max(begin, file.seek(0, os.SEEK_END) - self._chosen.tail_bytes)
        return begin, self._find_attempt_end(path)

    def _find_attempt_end(self, path: Path) -> int | None:
        number = self._resolve_attempt_number()
        if number is None or number + 1 >= len(self._attempts):
            return None
        return self._find_attempt_start(path, number + 1)

    def _find_attempt_start(self, path: Path, number: int) -> int:
        """Return the size of a file at the start of an attempt."""
        sizes = self._attempts[number] if number < len(self._attempts) else {}
        return sizes.get((path.parent.name, parse_log_name(path.name)), 0)


def _line_start(file: BinaryIO, offset: int) -> int:
    """Return the offset of the beginning of the line that contains an offset."""
    start = max(0, offset - LOOK_BACK_BYTES)
    file.seek(start)
    before, newline, _ = file.read(offset - start).rpartition(b"\n")
    return start + len(before) + len(newline) if newline or not start else offset
