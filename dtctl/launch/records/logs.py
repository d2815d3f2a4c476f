"""Workers' output on the control machine: one file per rank, and whole lines for people as they arrive."""

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
"""For every attempt, in their order, a line with such rows."""
TIMES_SUFFIX = ".times"
"""Of the file beside a log that says when it had which size: lines of seconds since the epoch and bytes."""
TIMES_EVERY_S = 2.0
LONGEST_BYTES = 1 << 16
"""A line that is longer is shown in several; it is kept whole in its file."""


APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
RECORD_BYTES = 16 << 20


def attempts_of(run_folder: Path) -> list[dict[tuple[str, int], int]]:
    """For each attempt of a run the size that each log had when it began, by node and rank; none if that is unknown."""
    try:
        lines = folders.read_regular(str(run_folder / ATTEMPTS_FILE), RECORD_BYTES).splitlines()
        return [{(str(node), int(rank)): int(size) for node, rank, size in json.loads(line)} for line in lines]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def offset_at(log: Path, moment: float) -> int:
    """The size that a log had at a time, or a few seconds before; 0 if that is unknown."""
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
    """What one process has printed, from piece to piece. Takes time and memory by what comes, not by what came."""

    def __init__(self) -> None:
        self._partial_line = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their ends.

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
        """The line that was begun and never ended; it counts as ended now."""
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


class Logs:
    """Writes what arrives and cuts it into lines."""

    def __init__(self, record: RunWriter, limit_bytes: int = 0) -> None:
        """Write into the run's folder, of each rank no more than the limit; 0 is none."""
        self._record = record
        self._limit_bytes = limit_bytes
        self._sizes: dict[tuple[str, int], int] = {}
        self._cut: Counter[tuple[str, int]] = Counter()
        self._mark_sizes: Counter[tuple[str, int]] = Counter()
        self._gap_sizes: Counter[tuple[str, int]] = Counter()
        """Bytes of marks for what nodes had cut out before it came here."""
        self._files: dict[tuple[str, int], BinaryIO] = {}
        self._partial: dict[tuple[str, int], Lines] = {}
        self._refused: str | None = None
        self._refusal_reported = False
        self._begun: dict[tuple[str, int], int] = {}
        self._timed: dict[tuple[str, int], float] = {}
        self._metrics_begun: bytes | None = None
        """What has come of metrics that are sent from the top, until their first line is whole; None: it is."""
        self.lost: dict[str, int] = {}
        """Node -> bytes of its output that could not be kept here."""
        self.offsets: dict[str, dict[int, int]] = {}
        """Node -> rank -> bytes received in this attempt; what a new link asks the rest of."""

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self._record.folder

    def write(self, node: str, rank: int, data: bytes) -> list[str]:
        """Keep `data` and return the lines that it completes, without their ends.

        What a full disk refuses is shown and not kept: the workers are worth more than their logs, and a detached
        node has them too.
        """
        key = (node, rank)
        written = 0
        received = self.offsets.setdefault(node, {})
        received[rank] = received.get(rank, 0) + len(data)
        if rank == METRICS and self._metrics_begun is not None:
            data = self._metrics_from_first_step(key, data)
        self._note_time(key)
        try:
            written = self._file(key).write(data) or 0  # on a disk that is nearly full, a part of it
        except OSError as exc:
            self._refused = self._refused or exc.strerror
        if written < len(data):
            self._refused = self._refused or "the disk is full"
            self.lost[node] = self.lost.get(node, 0) + len(data) - written
        if rank == METRICS:
            return []
        self._sizes[key] = self._sizes.get(key, 0) + written
        if 0 < self._limit_bytes < self._sizes[key]:
            self._cut_middle(key)
        return self._partial.setdefault(key, Lines()).feed(data)

    def _note_time(self, key: tuple[str, int]) -> None:
        """Note when a log has which size, every few seconds."""
        now = time.time()
        if key[1] == METRICS or now - self._timed.get(key, 0.0) < TIMES_EVERY_S:
            return
        self._timed[key] = now
        with contextlib.suppress(OSError):
            size = self._file(key).seek(0, os.SEEK_END)
            fd = os.open(self.path(*key).with_suffix(TIMES_SUFFIX), APPEND, 0o600)
            with os.fdopen(fd, "a", encoding="ascii") as file:
                file.write(f"{now:.1f} {size}\n")

    def skip(self, node: str, rank: int, size: int) -> None:
        """A node has no longer what comes next in the output of a rank."""
        received = self.offsets.setdefault(node, {})
        received[rank] = received.get(rank, 0) + size
        key = (node, rank)
        text = b"[dtctl: %d bytes are missing here]\n"
        if self._limit_bytes:
            self._cut[key] += size
            text = b"[dtctl: %d bytes were cut here, see job.log_mib]\n"
        with contextlib.suppress(OSError):
            self._gap_sizes[key] += self._end_line(node, rank)
            self._gap_sizes[key] += self._file(key).write(text % size) or 0

    @property
    def cut(self) -> dict[str, int]:
        """Bytes of output that `job.log_mib` has cut out of the files here, by node."""
        found: Counter[str] = Counter()
        for (node, _), size in self._cut.items():
            found[node] += size
        return dict(+found)

    def _cut_middle(self, key: tuple[str, int]) -> None:
        """Keep the first half of what the limit allows, and an eighth at the end; what was cut is said in between."""
        head, tail = self._limit_bytes // 2, self._limit_bytes // 8
        try:
            with self.path(*key).open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                self._cut[key] += size - head - tail - self._mark_sizes[key] - self._gap_sizes.pop(key, 0)
                file.seek(size - tail)
                end = file.read(tail)
                file.seek(head)
                self._mark_sizes[key] = file.write(
                    b"\n[dtctl: %d bytes were cut here, see job.log_mib]\n" % self._cut[key]
                )
                file.write(end)
                file.truncate()
                self._sizes[key] = file.tell()
        except OSError:
            return  # it is as long as it is
        # What the attempt has put there is counted from its beginning, wherever that would lie now.
        self._begun[key] = self._begun.get(key, 0) - (size - self._sizes[key])
        self._write_begun()

    def refusal(self) -> str | None:
        """Why output is no longer kept, told once; None while all is kept, and afterwards."""
        if self._refused is None or self._refusal_reported:
            return None
        self._refusal_reported = True
        return self._refused

    def flush(self) -> list[tuple[str, int, str]]:
        """Lines that were begun and never ended, as (node, rank, text); they count as ended now."""
        unfinished = [(node, rank, lines.flush()) for (node, rank), lines in self._partial.items()]
        self._partial.clear()
        return [(node, rank, text) for node, rank, text in unfinished if text]

    def begin_metrics(self, node: str) -> None:
        """Rank 0 sends its metrics from the top, because a snapshot took it back, or it is on another node now.

        The copy here keeps the steps before the first one that comes: another node does not have them.
        """
        self._metrics_begun = b""
        self.offsets.setdefault(node, {})[METRICS] = 0

    def _metrics_from_first_step(self, key: tuple[str, int], data: bytes) -> bytes:
        """What is to be written now: nothing before the first line is whole, which says what it replaces."""
        begun = (self._metrics_begun or b"") + data
        first = _step_of(begun.partition(b"\n")[0]) if b"\n" in begun else None
        self._metrics_begun = None if b"\n" in begun else begun
        if self._metrics_begun is not None:
            return b""
        size, copy = 0, self._file(key)
        with self.path(*key).open("rb") as file:
            for line in file:
                step = _step_of(line)
                if step is None or first is None or step >= first:
                    break
                size += len(line)
        copy.truncate(size)
        return begun

    def begin_attempt(self) -> None:
        """A new attempt writes new files on the nodes; here it is appended to the ones of the last."""
        self.offsets.clear()
        for key in self._files:
            self._end_line(*key)
        self._begun = {key: self.path(*key).stat().st_size for key in self._files}
        (self._record.folder / names.LOGS_DIR).mkdir(mode=0o700, exist_ok=True)
        self._write_begun()

    def _write_begun(self) -> None:
        rows = [(node, rank, size) for (node, rank), size in self._begun.items()]
        self._record.write(BEGUN_FILE, json.dumps(rows) + "\n")
        with contextlib.suppress(OSError):
            fd = os.open(self._record.folder / ATTEMPTS_FILE, APPEND, 0o600)
            with os.fdopen(fd, "a", encoding="utf-8") as file:
                file.write(json.dumps(rows) + "\n")

    def _end_line(self, node: str, rank: int) -> int:
        """End a line in whose middle a worker was ended, so that its successor begins with one of its own.

        Returns:
            Bytes that were added.
        """
        with contextlib.suppress(OSError):
            path = self.path(node, rank)
            with path.open("rb") as file:
                if not file.seek(0, 2):
                    return 0
                file.seek(-1, 2)
                ends_with_newline = file.read(1) == b"\n"
            if not ends_with_newline:
                return self._file((node, rank)).write(b"\n") or 0
        return 0

    def rejoin(self) -> None:
        """Go on where another launcher has stopped in mid-attempt: what is on disk here need not be sent again."""
        rows = json.loads((self._record.folder / BEGUN_FILE).read_text(encoding="utf-8"))
        self._begun = {(node, rank): size for node, rank, size in rows}
        for path in sorted((self._record.folder / names.LOGS_DIR).glob("*/*.log")):
            node, rank = path.parent.name, rank_of(path)
            have = path.stat().st_size - self._begun.get((node, rank), 0)
            self.offsets.setdefault(node, {})[rank] = have
            self._file((node, rank))  # known from now on, also to the next attempt

    def tail(self, node: str, rank: int, limit_bytes: int = 32_768) -> str:
        """The end of a rank's output in this attempt."""
        try:
            with os.fdopen(folders.open_regular(str(self.path(node, rank))), "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, self._begun.get((node, rank), 0), file.tell() - limit_bytes))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def last_step(self) -> int | None:
        """The last step that rank 0 has logged; None when it has logged none."""
        from dtctl.launch.records.metrics_rows import read_last_rows  # only a failure needs it

        rows = read_last_rows(self._record.folder / names.METRICS_FILE)
        return int(rows[-1]["step"]) if rows else None

    def ranks(self, node: str) -> list[int]:
        """Ranks of a node that have printed something, in order; without torchrun's agent."""
        return sorted(rank for name, rank in self._files if name == node and rank >= 0)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def path(self, node: str, rank: int) -> Path:
        """The file of a rank's output."""
        return self._record.folder / names.METRICS_FILE if rank == METRICS else self._record.log_path(node, rank)

    def _file(self, key: tuple[str, int]) -> BinaryIO:
        if key not in self._files:
            path = self.path(*key)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = path.open("ab", buffering=0)  # others read along
            path.chmod(0o600)
            self._files[key] = file
            self._sizes[key] = file.tell()
        return self._files[key]


def _step_of(line: bytes) -> int | None:
    """Return the step that a line of metrics is of; None if it is no row."""
    from dtctl.launch.records.metrics_rows import parse_row  # only metrics that begin anew need it

    row = parse_row(line)
    return None if row is None else int(row["step"])


def rank_of(path: Path) -> int:
    """The rank whose output a log file holds; -1 for torchrun's agent."""
    return -1 if path.name == "agent.log" else int(path.stem.removeprefix("rank-"))
