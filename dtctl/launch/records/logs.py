"""Workers' output on the control machine: one file per rank, and whole lines for the user as they arrive."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import BinaryIO

from dtctl import folders, names
from dtctl.launch.records.run_writer import RunWriter

METRICS = -2
"""Pseudo rank under which nodes send what rank 0 writes to metrics.jsonl."""
BEGUN_FILE = "logs/attempt.json"
"""Rows of node, rank and the size in bytes that the rank's log had when the newest attempt began."""
ATTEMPTS_FILE = "logs/attempts.jsonl"
"""File with a line of such rows for every attempt, in their order."""
TIMES_SUFFIX = ".times"
"""Suffix of the file next to a log with its size over time: lines of seconds since the epoch and bytes."""
TIMES_EVERY_S = 2.0
LONGEST_BYTES = 1 << 16
"""A line that is longer is shown in several; it is kept whole in its file."""
CUT_MARK = b"[dtctl: %d bytes were cut here, see job.log_mib]\n"

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
RECORD_BYTES = 16 << 20


def attempts_of(run_folder: Path) -> list[dict[tuple[str, int], int]]:
    """Return for each attempt the size of each log at its beginning, by node and rank; nothing if that is unknown."""
    try:
        lines = folders.read_regular(str(run_folder / ATTEMPTS_FILE), RECORD_BYTES).splitlines()
        return [{(str(node), int(rank)): int(size) for node, rank, size in json.loads(line)} for line in lines]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def offset_at(log: Path, moment: float) -> int:
    """Return the size that a log had at a time, or a few seconds before; 0 if that is unknown."""
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


class Lines:
    """Output of one process, split into lines. Time and memory grow with the new part, not with the whole."""

    def __init__(self) -> None:
        self._partial_line = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes, without their ends.

        A progress bar redraws its line with carriage returns; its last state counts.
        """
        lines: list[str] = []
        *complete, remainder = data.split(b"\n")
        for chunk in complete:
            self._add(chunk, lines)
            lines.append(self._take(len(self._partial_line)))
        self._add(remainder, lines)
        return lines

    def flush(self) -> str:
        """Return the line that was begun and never ended; it counts as ended now."""
        return self._take(len(self._partial_line))

    def _add(self, data: bytes, lines: list[str]) -> None:
        text = data.rstrip(b"\r")
        if text and self._partial_line.endswith(b"\r"):
            self._partial_line.clear()
        redraw_start = text.rfind(b"\r")
        if redraw_start >= 0:
            self._partial_line.clear()
        self._partial_line += text[redraw_start + 1 :]
        if len(text) < len(data) and not self._partial_line.endswith(b"\r"):
            self._partial_line += b"\r"
        while len(self._partial_line) > LONGEST_BYTES:
            lines.append(self._take(LONGEST_BYTES))

    def _take(self, size: int) -> str:
        text = bytes(self._partial_line[:size]).rstrip(b"\r").decode(errors="replace")
        del self._partial_line[:size]
        return text


class RankLog:
    """Output of one rank: a file that grows; a limit cuts its middle."""

    def __init__(self, path: Path, limit_bytes: int = 0) -> None:
        """Nothing has come; the file is opened at first use. 0 bytes are no limit."""
        self.path = path
        self.lines = Lines()
        self.received = 0
        """Bytes of output that have come in this attempt."""
        self.begun: int | None = None
        """Size that it had when the newest attempt began; None: it was not there."""
        self.cut = 0
        """Bytes of output that the limit, or a node's, has cut out."""
        self.refusal: str | None = None
        """Reason why the disk has refused some of it; None: it has not."""
        self._limit_bytes = limit_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._mark_size = 0
        self._gap_size = 0
        """Bytes of marks for what nodes had cut out before it came here."""
        self._timed = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether something has come, here or to an earlier launcher."""
        return self._file is not None

    def open(self) -> BinaryIO:
        """Return the file.

        Raises:
            OSError: it cannot be opened.
        """
        if self._file is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)  # others read along
            self.path.chmod(0o600)
            self._size = self._file.tell()
        return self._file

    def write(self, data: bytes) -> int:
        """Append what the disk takes; the number of bytes that it refuses."""
        written = 0
        try:
            written = self.open().write(data) or 0  # on a disk that is nearly full, a part of it
        except OSError as exc:
            self.refusal = self.refusal or exc.strerror
        if written < len(data):
            self.refusal = self.refusal or "the disk is full"
        self._size += written
        return len(data) - written

    def note_time(self) -> None:
        """Note when the file has which size, every few seconds."""
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
        """Say in the file that so much of the output is missing, or was cut, where there is a limit."""
        text = b"[dtctl: %d bytes are missing here]\n"
        self.received += size
        if self._limit_bytes:
            self.cut += size
            text = CUT_MARK
        with contextlib.suppress(OSError):
            self._gap_size += self.end_line()
            self._gap_size += self.open().write(text % size) or 0

    def cut_middle(self) -> bool:
        """Cut a file that is too long, and note this in it; return whether that was done.

        The first half of what the limit allows is kept, and an eighth at the end.
        """
        if not 0 < self._limit_bytes < self._size:
            return False
        head, tail = self._limit_bytes // 2, self._limit_bytes // 8
        try:
            with self.path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                self.cut += size - head - tail - self._mark_size - self._gap_size
                self._gap_size = 0
                file.seek(size - tail)
                end = file.read(tail)
                file.seek(head)
                self._mark_size = file.write(b"\n" + CUT_MARK % self.cut)
                file.write(end)
                file.truncate()
                self._size = file.tell()
        except OSError:
            return False  # it is as long as it is
        # What the attempt has put there is counted from its beginning, wherever that would lie now.
        self.begun = (self.begun or 0) - (size - self._size)
        return True

    def end_line(self) -> int:
        """End a line that an ended worker has left incomplete, so that its successor begins with a new one.

        Returns:
            Bytes that were added.
        """
        with contextlib.suppress(OSError):
            with self.path.open("rb") as file:
                if not file.seek(0, 2):
                    return 0
                file.seek(-1, 2)
                ends_with_newline = file.read(1) == b"\n"
            if not ends_with_newline:
                return self.open().write(b"\n") or 0
        return 0

    def tail(self, limit_bytes: int) -> str:
        """Return the end of what has come in this attempt."""
        try:
            with os.fdopen(folders.open_regular(str(self.path)), "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, self.begun or 0, file.tell() - limit_bytes))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class MetricsCopy(RankLog):
    """The same for the metrics of a run, which nodes send as the output of a rank; several may do so in turn."""

    def __init__(self, path: Path) -> None:
        """Go on with the file as it is."""
        super().__init__(path)
        self._first_line: bytes | None = None
        """Beginning of metrics that are sent from the top, until their first line is whole; None: it is."""

    def begin(self) -> None:
        """Metrics are sent from the top now.

        The copy here keeps the steps before the first one that comes: another node does not have them.
        """
        self._first_line, self.received = b"", 0

    def write(self, data: bytes) -> int:
        """Append, but only once the first line is whole: its step decides which rows it replaces."""
        if self._first_line is None:
            return super().write(data)
        data = self._first_line + data
        if b"\n" not in data:
            self._first_line = data
            return 0
        self._first_line = None
        first = _step_of(data.partition(b"\n")[0])
        size, copy = 0, self.open()
        with self.path.open("rb") as file:
            for line in file:
                step = _step_of(line)
                if step is None or first is None or step >= first:
                    break
                size += len(line)
        copy.truncate(size)
        return super().write(data)


class Logs:
    """Writes what arrives and cuts it into lines."""

    def __init__(self, record: RunWriter, limit_bytes: int = 0) -> None:
        """Write into the run's folder, of each rank no more than the limit; 0 is none."""
        self._record = record
        self._limit_bytes = limit_bytes
        self._logs: dict[tuple[str, int], RankLog] = {}
        self._refusal: str | None = None
        self._refusal_reported = False
        self.lost: dict[str, int] = {}
        """Node -> bytes of its output that could not be kept here."""

    def write(self, node: str, rank: int, data: bytes) -> list[str]:
        """Keep `data` and return the lines that it completes, without their ends.

        What a full disk refuses is shown and not kept: the workers are worth more than their logs, and a detached
        node has them too.
        """
        log = self._log(node, rank)
        log.received += len(data)
        if rank != METRICS:
            log.note_time()
        refused = log.write(data)
        if refused:
            self.lost[node] = self.lost.get(node, 0) + refused
        self._refusal = self._refusal or log.refusal
        if rank == METRICS:
            return []
        if log.cut_middle():
            self._write_begun()
        return log.lines.feed(data)

    def skip(self, node: str, rank: int, size: int) -> None:
        """A node has no longer what comes next in the output of a rank."""
        self._log(node, rank).skip(size)

    @property
    def offsets(self) -> dict[str, dict[int, int]]:
        """Node -> rank -> bytes received in this attempt; what a new link asks the rest of."""
        found: dict[str, dict[int, int]] = {}
        for (node, rank), log in self._logs.items():
            if log.received:
                found.setdefault(node, {})[rank] = log.received
        return found

    @property
    def cut(self) -> dict[str, int]:
        """Bytes of output that `job.log_mib` has cut out of the files here, by node."""
        found: Counter[str] = Counter()
        for (node, _), log in self._logs.items():
            found[node] += log.cut
        return dict(+found)

    def refusal(self) -> str | None:
        """Return the reason why output is no longer kept, once; None while all is kept, and afterwards."""
        if self._refusal is None or self._refusal_reported:
            return None
        self._refusal_reported = True
        return self._refusal

    def flush(self) -> list[tuple[str, int, str]]:
        """Lines that were begun and never ended, as (node, rank, text); they count as ended now."""
        unfinished = [(node, rank, log.lines.flush()) for (node, rank), log in self._logs.items()]
        return [(node, rank, text) for node, rank, text in unfinished if text]

    def begin_metrics(self, node: str) -> None:
        """Expect rank 0's metrics from the top, because a snapshot took it back, or because its node has changed."""
        log = self._log(node, METRICS)
        if isinstance(log, MetricsCopy):
            log.begin()

    def begin_attempt(self) -> None:
        """A new attempt writes new files on the nodes; here it is appended to the ones of the last."""
        for log in self._logs.values():
            log.received = 0
            if log.is_open:
                log.end_line()
            log.begun = log.path.stat().st_size if log.is_open else None
        (self._record.folder / names.LOGS_DIR).mkdir(mode=0o700, exist_ok=True)
        self._write_begun()

    def _write_begun(self) -> None:
        rows = [(node, rank, log.begun) for (node, rank), log in self._logs.items() if log.begun is not None]
        self._record.write(BEGUN_FILE, json.dumps(rows) + "\n")
        with contextlib.suppress(OSError):
            fd = os.open(self._record.folder / ATTEMPTS_FILE, APPEND, 0o600)
            with os.fdopen(fd, "a", encoding="utf-8") as file:
                file.write(json.dumps(rows) + "\n")

    def rejoin(self) -> None:
        """Continue where another launcher has stopped in mid-attempt: data on disk here need not be sent again."""
        for node, rank, size in json.loads((self._record.folder / BEGUN_FILE).read_text(encoding="utf-8")):
            self._log(node, rank).begun = size
        for path in sorted((self._record.folder / names.LOGS_DIR).glob("*/*.log")):
            node, rank = path.parent.name, rank_of(path)
            log = self._log(node, rank)
            log.received = path.stat().st_size - (log.begun or 0)
            log.open()  # known from now on, also to the next attempt

    def tail(self, node: str, rank: int, limit_bytes: int = 32_768) -> str:
        """Return the end of a rank's output in this attempt."""
        return self._log(node, rank).tail(limit_bytes)

    def close(self) -> None:
        """Close all files."""
        for log in self._logs.values():
            log.close()

    def path(self, node: str, rank: int) -> Path:
        """Return the file of a rank's output."""
        return self._record.folder / names.METRICS_FILE if rank == METRICS else self._record.log_path(node, rank)

    def _log(self, node: str, rank: int) -> RankLog:
        if (node, rank) not in self._logs:
            path = self.path(node, rank)
            self._logs[node, rank] = MetricsCopy(path) if rank == METRICS else RankLog(path, self._limit_bytes)
        return self._logs[node, rank]


def _step_of(line: bytes) -> int | None:
    """Return the step that a line of metrics is of; None if it is no row."""
    from dtctl.launch.records.metrics_rows import parse_row  # only metrics that start again need it

    row = parse_row(line)
    return None if row is None else int(row["step"])


def rank_of(path: Path) -> int:
    """Return the rank whose output a log file holds; -1 for torchrun's agent."""
    return -1 if path.name == "agent.log" else int(path.stem.removeprefix("rank-"))
