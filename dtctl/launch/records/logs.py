"""Workers' output on the control machine: one file per rank, and whole lines for the user as they arrive."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from dtctl import folders, names
from dtctl.launch.records.run_writer import RunWriter
from dtctl.supervisor.frames import METRICS, parse_log_name

BEGUN_FILE = "logs/attempt.json"
"""File with rows of node, rank and the size in bytes of the rank's log at the beginning of the newest attempt."""
ATTEMPTS_FILE = "logs/attempts.jsonl"
"""File with a line of such rows for every attempt, oldest first."""
TIMES_SUFFIX = ".times"
"""Suffix of the file next to a log with the log's size over time: lines of seconds since the epoch and bytes."""
TIMES_EVERY_S = 2.0
LONGEST_BYTES = 1 << 16
"""Most bytes of a displayed line: a longer one is split for the display, and stays whole in its file."""

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
RECORD_BYTES = 16 << 20


def read_attempt_offsets(run_folder: Path) -> list[dict[tuple[str, int], int]]:
    """Return the size of each log at the beginning of each attempt, by node and rank; empty if it is unknown."""
    try:
        lines = folders.read_regular(str(run_folder / ATTEMPTS_FILE), RECORD_BYTES).splitlines()
        return [{(str(node), int(rank)): int(size) for node, rank, size in json.loads(line)} for line in lines]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def _move_attempt_offsets(record: RunWriter, log: tuple[str, int], find_new_offset: Callable[[int], int]) -> None:
    """Update the offsets of the attempts in a log (node, rank) whose middle was cut out."""
    attempts = read_attempt_offsets(record.folder)
    for offsets in attempts:
        if log in offsets:
            offsets[log] = find_new_offset(offsets[log])
    if attempts:
        lines = [json.dumps([(*each, offset) for each, offset in offsets.items()]) for offsets in attempts]
        record.write(ATTEMPTS_FILE, "\n".join(lines) + "\n")


def find_offset_at(log: Path, moment: float) -> int:
    """Return the size of a log at a time or a few seconds earlier; 0 if it is unknown."""
    offset = 0
    with contextlib.suppress(OSError, ValueError):
        info = log.stat()
        if info.st_mtime < moment:
            return info.st_size
        for line in folders.read_regular(str(log.with_suffix(TIMES_SUFFIX)), RECORD_BYTES).splitlines():
            when, size = line.split()
            if float(when) > moment:
                break
            offset = int(size)
    return offset


class LineSplitter:
    """Splitter of one process's output into lines, in time and memory proportional to the new data."""

    def __init__(self) -> None:
        self._partial_line = bytearray()
        self._is_redrawn = False
        """True if the current line was redrawn, as progress bars are."""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes, without their ends.

        A progress bar redraws its line with carriage returns; only the last state is returned.
        """
        lines: list[str] = []
        *complete, remainder = data.split(b"\n")
        for chunk in complete:
            self._append_line_segment(chunk, lines)
            text = self._pop_line_text(len(self._partial_line))
            lines += self._split_redrawn_line(text) if self._is_redrawn else [text]
        self._append_line_segment(remainder, lines)
        return lines

    def flush(self) -> str:
        """Return and end the incomplete last line."""
        return self._pop_line_text(len(self._partial_line))

    def _append_line_segment(self, data: bytes, lines: list[str]) -> None:
        text = data.rstrip(b"\r")
        if text and self._partial_line.endswith(b"\r"):
            self._partial_line.clear()
            self._is_redrawn = True
        redraw_start = text.rfind(b"\r")
        self._is_redrawn |= redraw_start >= 0
        if redraw_start >= 0:
            self._partial_line.clear()
        self._partial_line += text[redraw_start + 1 :]
        if len(text) < len(data) and not self._partial_line.endswith(b"\r"):
            self._partial_line += b"\r"
        while len(self._partial_line) > LONGEST_BYTES:
            lines.append(self._pop_line_text(LONGEST_BYTES))

    def _split_redrawn_line(self, text: str) -> list[str]:
        from dtctl.launch.records.progress_bars import split_progress_bar  # Many programs print no bars.

        self._is_redrawn = False
        return split_progress_bar(text)

    def _pop_line_text(self, size: int) -> str:
        text = bytes(self._partial_line[:size]).rstrip(b"\r").decode(errors="replace")
        del self._partial_line[:size]
        return text


class RankLog:
    """Output of one rank in a growing file, whose middle is cut out at a limit."""

    def __init__(self, path: Path, limit_bytes: int = 0) -> None:
        """Create an empty log, whose file is opened at the first use; a limit of 0 bytes is none."""
        self.path = path
        self.lines = LineSplitter()
        self.received = 0
        """Bytes of output received in this attempt."""
        self.begun: int | None = None
        """Size of the file at the beginning of the newest attempt; None: there was no file."""
        self.cut = 0
        """Bytes of output that were cut out because of the limit, here or on a node."""
        self.refusal: str | None = None
        """Reason why the disk has refused a part of the output; None: all was written."""
        self._limit_bytes = limit_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._marks: list[tuple[int, int]] = []
        """Offsets and sizes of the texts in the file that the program did not print."""
        self._timed = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether this launcher or an earlier one has received output."""
        return self._file is not None

    def open(self) -> BinaryIO:
        """Return the file, after opening it if needed.

        Raises:
            OSError: the file cannot be opened.
        """
        if self._file is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)  # Other processes read the file at the same time.
            self.path.chmod(0o600)
            self._size = self._file.tell()
        return self._file

    def write(self, data: bytes) -> int:
        """Append the bytes that fit on the disk; return the number of refused bytes."""
        written = 0
        try:
            written = self.open().write(data) or 0  # A nearly full disk accepts a part.
        except OSError as exc:
            self.refusal = self.refusal or exc.strerror
        if written < len(data):
            self.refusal = self.refusal or "the disk is full"
        self._size += written
        return len(data) - written

    def note_time(self) -> None:
        """Record the time and the size of the file every few seconds."""
        now = time.time()
        if now - self._timed < TIMES_EVERY_S:
            return
        self._timed = now
        with contextlib.suppress(OSError):
            size = self.open().seek(0, os.SEEK_END)
            fd = os.open(self.path.with_suffix(TIMES_SUFFIX), APPEND, 0o600)
            with os.fdopen(fd, "a", encoding="ascii") as file:
                file.write(f"{now:.1f} {size}\n")

    def skip(self, size: int) -> None:
        """Write into the file that `size` bytes of output are missing or, if there is a limit, were cut out."""
        from dtctl.supervisor.worker_log import CUT_MARK

        text = b"[dtctl: %d bytes are missing here]\n"
        self.received += size
        if self._limit_bytes:
            self.cut += size
            text = CUT_MARK
        with contextlib.suppress(OSError):
            self.end_line()
            self._add_mark(text % size)

    def cut_middle(self) -> Callable[[int], int] | None:
        """Cut out the middle of a file that is too long, and write this into the file.

        Returns:
            Function from an old offset to the new offset of the same contents, or of the contents that follow if these
            were cut out; None if the file was not cut.
        """
        if not 0 < self._limit_bytes < self._size:
            return None
        from dtctl.supervisor.worker_log import cut_log, split_limit  # Most output is below the limit.

        head, tail = split_limit(self._limit_bytes)
        try:
            with self.path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                begin = size - tail
                of_marks = sum(max(0, min(at + length, begin) - max(at, head)) for at, length in self._marks)
                end = cut_log(file.fileno(), head, begin, size, self.cut + begin - head - of_marks)
        except OSError:
            return None  # The file stays too long.
        self.cut += begin - head - of_marks
        self._size = end + tail
        moved = begin - end
        before = [(at, min(length, head - at)) for at, length in self._marks if at < head]
        behind = [(max(at, begin) - moved, at + length - max(at, begin)) for at, length in self._marks]
        self._marks = [*before, (head, end - head), *(mark for mark in behind if mark[1] > 0)]
        # Positions in the attempt are counted from its beginning, which may now be a negative offset.
        self.begun = (self.begun or 0) - moved
        return lambda offset: offset if offset <= head else max(end, offset - moved)

    def end_line(self) -> None:
        """End a line that an ended worker has left incomplete, so that the next worker begins with a new line."""
        with contextlib.suppress(OSError):
            with self.path.open("rb") as file:
                if not file.seek(0, os.SEEK_END):
                    return
                file.seek(-1, os.SEEK_END)
                ends_with_newline = file.read(1) == b"\n"
            if not ends_with_newline:
                self._add_mark(b"\n")

    def _add_mark(self, text: bytes) -> None:
        """Append text that was not printed.

        Raises:
            OSError: The disk refuses the text.
        """
        file = self.open()
        self._marks.append((file.seek(0, os.SEEK_END), len(text)))
        self._size += file.write(text) or 0

    def tail(self, limit_bytes: int) -> str:
        """Return the end of the output received in this attempt."""
        try:
            with os.fdopen(folders.open_regular(str(self.path)), "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, self.begun or 0, file.tell() - limit_bytes))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()
            self._file = None


class MetricsCopy(RankLog):
    """Log of a run's metrics, which nodes send like a rank's output, possibly several nodes one after another."""

    def __init__(self, path: Path) -> None:
        """Continue the existing file."""
        super().__init__(path)
        self._first_line: bytes | None = None
        """Beginning of metrics that are sent from their start, while their first line is incomplete; None otherwise."""

    def begin(self) -> None:
        """Prepare for metrics that are sent from their first line.

        The copy here keeps the steps before the first received one, since another node does not have them.
        """
        self._first_line, self.received = b"", 0

    def write(self, data: bytes) -> int:
        """Append data once the first line is whole, since the step of that line decides which rows are replaced."""
        if self._first_line is None:
            return super().write(data)
        data = self._first_line + data
        if b"\n" not in data:
            self._first_line = data
            return 0
        self._first_line = None
        first = _parse_metrics_step(data.partition(b"\n")[0])
        size, copy = 0, self.open()
        with self.path.open("rb") as file:
            for line in file:
                step = _parse_metrics_step(line)
                if step is None or first is None or step >= first:
                    break
                size += len(line)
        copy.truncate(size)
        return super().write(data)


class RunLogs:
    """Output of all ranks of a run, which is written to files and split into lines."""

    def __init__(self, record: RunWriter, limit_bytes: int = 0) -> None:
        """Write into the run's folder, for each rank no more than the limit; 0: no limit."""
        self._record = record
        self._limit_bytes = limit_bytes
        self._logs: dict[tuple[str, int], RankLog] = {}
        self._refusal: str | None = None
        self._refusal_reported = False
        self.lost: dict[str, int] = {}
        """Bytes of each node's output that could not be stored here."""

    def write(self, node: str, rank: int, data: bytes) -> list[str]:
        """Store `data` and return the lines that it completes, without their ends.

        Output that a full disk refuses is displayed and not stored: the run must not end because of its logs, and a
        detached node stores them, too.
        """
        log = self._open_rank_log(node, rank)
        log.received += len(data)
        if rank != METRICS:
            log.note_time()
        refused = log.write(data)
        if refused:
            self.lost[node] = self.lost.get(node, 0) + refused
        self._refusal = self._refusal or log.refusal
        if rank == METRICS:
            return []
        if (find_new_offset := log.cut_middle()) is not None:
            self._write_begun()
            _move_attempt_offsets(self._record, (node, rank), find_new_offset)
        return log.lines.feed(data)

    def skip(self, node: str, rank: int, size: int) -> None:
        """Record that a node no longer has the next bytes in the output of a rank."""
        self._open_rank_log(node, rank).skip(size)

    @property
    def offsets(self) -> dict[str, dict[int, int]]:
        """Return the bytes received in this attempt by node and rank, after which a new link requests the rest."""
        found: dict[str, dict[int, int]] = {}
        for (node, rank), log in self._logs.items():
            if log.received:
                found.setdefault(node, {})[rank] = log.received
        return found

    @property
    def cut(self) -> dict[str, int]:
        """Return the bytes of output, by node, that were cut out of the files here because of `job.log_mib`."""
        found: Counter[str] = Counter()
        for (node, _), log in self._logs.items():
            found[node] += log.cut
        return dict(+found)

    def pop_write_refusal(self) -> str | None:
        """Return the reason why output is no longer stored; None while all is stored, and after the first return."""
        if self._refusal is None or self._refusal_reported:
            return None
        self._refusal_reported = True
        return self._refusal

    def flush(self) -> list[tuple[str, int, str]]:
        """Return and end the incomplete last lines as (node, rank, text)."""
        unfinished = [(node, rank, log.lines.flush()) for (node, rank), log in self._logs.items()]
        return [(node, rank, text) for node, rank, text in unfinished if text]

    def restart_metrics_copy(self, node: str) -> None:
        """Expect rank 0's metrics from the top, because it has returned to a snapshot or runs on another node."""
        log = self._open_rank_log(node, METRICS)
        if isinstance(log, MetricsCopy):
            log.begin()

    def begin_attempt(self) -> None:
        """Prepare for a new attempt, which writes new files on the nodes and is appended to the files here."""
        for log in self._logs.values():
            log.received = 0
            if log.is_open:
                log.end_line()
            log.begun = log.path.stat().st_size if log.is_open else None
        (self._record.folder / names.LOGS_DIR).mkdir(mode=0o700, exist_ok=True)
        rows = self._write_begun()
        with contextlib.suppress(OSError):
            fd = os.open(self._record.folder / ATTEMPTS_FILE, APPEND, 0o600)
            with os.fdopen(fd, "a", encoding="utf-8") as file:
                file.write(rows)

    def _write_begun(self) -> str:
        """Record where the output of the newest attempt begins; return the line of the record."""
        begun = [(node, rank, log.begun) for (node, rank), log in self._logs.items() if log.begun is not None]
        rows = json.dumps(begun) + "\n"
        self._record.write(BEGUN_FILE, rows)
        return rows

    def continue_attempt_logs(self) -> None:
        """Continue the logs of a launcher that ended during the attempt: data on disk here need not be sent again."""
        for node, rank, size in json.loads((self._record.folder / BEGUN_FILE).read_text(encoding="utf-8")):
            self._open_rank_log(node, rank).begun = size
        for path in sorted((self._record.folder / names.LOGS_DIR).glob("*/*.log")):
            node, rank = path.parent.name, parse_log_name(path.name)
            log = self._open_rank_log(node, rank)
            log.received = path.stat().st_size - (log.begun or 0)
            log.open()  # This adds the log to the record of the next attempt, too.

    def tail(self, node: str, rank: int, limit_bytes: int = 32_768) -> str:
        """Return the end of a rank's output in this attempt."""
        return self._open_rank_log(node, rank).tail(limit_bytes)

    def close(self) -> None:
        """Close all files."""
        for log in self._logs.values():
            log.close()

    def path(self, node: str, rank: int) -> Path:
        """Return the file of a rank's output."""
        return self._record.folder / names.METRICS_FILE if rank == METRICS else self._record.log_path(node, rank)

    def _open_rank_log(self, node: str, rank: int) -> RankLog:
        if (node, rank) not in self._logs:
            path = self.path(node, rank)
            self._logs[node, rank] = MetricsCopy(path) if rank == METRICS else RankLog(path, self._limit_bytes)
        return self._logs[node, rank]


def _parse_metrics_step(line: bytes) -> int | None:
    """Return the step of a line of metrics; None if the line is not a row."""
    from dtctl.launch.records.metrics_rows import parse_row  # Only metrics that start again need this module.

    row = parse_row(line)
    return None if row is None else int(row["step"])
