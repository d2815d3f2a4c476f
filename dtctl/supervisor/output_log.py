"""The output of one rank on its node: kept in a file, and given to the link by offset. Stdlib only, Python 3.8.

The file is the buffer: a slow or absent reader costs disk, not memory. What the disk refuses is held in memory until
the link has taken it, and no more is read from the worker meanwhile; without a link the oldest of it is given up. Above
a limit the middle is cut out of the file. Offsets are those of what was printed, whatever the file still has of it.
"""

from __future__ import annotations

import os

from dtctl import folders
from dtctl.supervisor import frames
from dtctl.supervisor.link import CHUNK, ControlLink
from dtctl.supervisor.messages.attempt import LogGap

AGENT = -1
"""Rank under which the output of torchrun's agent, or of a command that is not a worker, is kept."""
AGENT_FILE = "agent.log"
HELD_BYTES = 1 << 20
"""Bytes of one rank, in memory."""
COPY_BYTES = 1 << 20


class Log:
    """Output of a rank, and the offset up to which the link was given it."""

    def __init__(self, path: str, limit_bytes: int = 0) -> None:
        """Append to the file at `path`, which is made with mode 0600; 0 bytes are no limit."""
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.limit_bytes = limit_bytes
        self.end = os.fstat(self.fd).st_size
        """Size of the file."""
        self.segments = [[0, 0, self.end]] if self.end else []
        """Segments of the file in their order: offset in the output, offset in the file, and length."""
        self.size = self.end
        """Size of the output."""
        self.sent = 0
        self.held = b""
        """The newest of the output, when the disk has refused it."""
        self.unstored = 0
        """Bytes that the disk has refused."""
        self.cut = 0
        """Bytes that were cut out of the file because of the limit."""
        self._skipped = 0

    def write(self, data: bytes, is_linked: bool = True) -> None:
        """Append `data`; without a link, what the disk refuses may push out what it has refused before."""
        if not self.held:  # else the disk is full, and the order is kept
            data = data[self._store(data) :]
        self.unstored += len(data)
        self.size += len(data)
        self.held += data
        if not is_linked and len(self.held) > HELD_BYTES:
            self.held = self.held[-HELD_BYTES:]
        if 0 < self.limit_bytes < self.stored():
            self._cut_middle()

    def _store(self, data: bytes) -> int:
        """Write what the disk takes; its length."""
        try:
            written = os.pwrite(self.fd, data, self.end)  # on a disk that is nearly full, a part of it
        except OSError:
            return 0
        last = self.segments[-1] if self.segments else None
        if last is not None and (last[0] + last[2], last[1] + last[2]) == (self.size, self.end):
            last[2] += written
        elif written:
            self.segments.append([self.size, self.end, written])
        self.end += written
        self.size += written
        return written

    def _cut_middle(self) -> None:
        """Keep the first half of what the limit allows, and an eighth at the end."""
        first = self.segments[0]
        head = min(first[2], self.limit_bytes // 2)
        last = self.segments[-1]
        tail = min(last[2] - (head if last is first else 0), self.limit_bytes // 8)
        start, source = last[0] + last[2] - tail, last[1] + last[2] - tail
        self.cut += self.stored() - head - tail
        mark = b"\n[dtctl: %d bytes were cut here, see job.log_mib]\n" % self.cut
        try:
            target = first[1] + head + os.pwrite(self.fd, mark, first[1] + head)
            for offset in range(0, tail, COPY_BYTES):  # forwards: nothing is overwritten before it is read
                data = os.pread(self.fd, min(COPY_BYTES, tail - offset), source + offset)
                os.pwrite(self.fd, data, target + offset)
            os.ftruncate(self.fd, target + tail)
        except OSError:
            target = source  # what was there is there
        self.segments = [[first[0], first[1], head], [start, target, tail]]
        self.end = target + tail

    def is_full(self) -> bool:
        """Return whether the link should take something before more is read from the worker."""
        would_be_cut = self.limit_bytes and self.stored() + COPY_BYTES >= self.limit_bytes
        return len(self.held) >= HELD_BYTES or bool(would_be_cut and self.size - self.sent > self.limit_bytes // 8)

    def stored(self) -> int:
        """Return the bytes of the output that the file has."""
        return sum(segment[2] for segment in self.segments)

    def take(self, limit: int) -> tuple:  # type: ignore[type-arg]
        """Return how many bytes are missing where the link has got to, and some that follow, which count as sent."""
        held_start = self.size - len(self.held)
        segment = next((each for each in self.segments if each[0] + each[2] > self.sent), None)
        start = held_start if segment is None else segment[0]
        missing = max(0, start - self.sent)
        self.sent += missing
        self._skipped += missing
        offset = self.sent - start
        if segment is not None:
            data = os.pread(self.fd, min(limit, segment[2] - offset), segment[1] + offset)
        else:
            data = self.held[offset : offset + limit]
            self.held = self.held[offset + len(data) :]
        self.sent += len(data)
        return missing, data

    def rewind(self, offset: int) -> None:
        """A new link has got so far."""
        self.sent = min(offset, self.size)

    def lost(self, is_linked: bool) -> int:
        """Bytes that neither the file has nor a link was given, or, if there is one, will be; not those cut out."""
        if not self.unstored:  # then all that is missing was cut out, which is reported to the launcher as a gap
            return 0
        left = sum(max(0, start + length - max(start, self.sent)) for start, _, length in self.segments)
        held = min(len(self.held), self.size - self.sent) if is_linked else 0
        return self._skipped + max(0, self.size - self.sent - left - held)


class RankLogs:
    """The logs of one attempt on this node, each opened at first use."""

    def __init__(self, folder: str, limit_bytes: int = 0) -> None:
        """Keep them in `folder`, of each rank no more than the limit."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.is_linked = True
        """True if a link takes the output that cannot be written to the disk."""
        self._logs: dict[int, Log] = {}

    def open(self, rank: int) -> Log:
        """Return the log of a rank."""
        if rank not in self._logs:
            name = AGENT_FILE if rank == AGENT else f"rank-{rank}.log"
            self._logs[rank] = Log(os.path.join(self.folder, name), self.limit_bytes)
        return self._logs[rank]

    def skip_stored(self) -> None:
        """Count what the folder has as sent: a supervisor before this one has sent it, or it is asked for."""
        for rank in ranks_in(self.folder):
            log = self.open(rank)
            log.sent = log.size

    def rewind(self, offsets: dict[str, int]) -> None:
        """A new link has got so far, by rank."""
        for rank in ranks_in(self.folder):
            self.open(rank)
        for rank, log in self._logs.items():
            log.rewind(offsets.get(str(rank), 0))

    def write(self, rank: int, data: bytes) -> None:
        """Append to the log of a rank."""
        self.open(rank).write(data, self.is_linked)

    def must_wait(self) -> bool:
        """Return whether the link should take something before more is read from the workers."""
        return self.is_linked and any(log.is_full() for log in self._logs.values())

    def feed(self, link: ControlLink) -> bool:
        """Queue what was not sent yet, as much as the link can take; whether that was all."""
        for rank, log in self._logs.items():
            while log.sent < log.size and len(link.out) < CHUNK:
                missing, data = log.take(CHUNK)
                if missing:
                    link.send(LogGap(rank=rank, bytes=missing))
                if not (missing or data):
                    break  # another process has truncated the file
                link.out += frames.pack(frames.LOG, data, rank)
        return all(log.sent >= log.size for log in self._logs.values())

    def losses(self, is_linked: bool) -> dict[str, int]:
        """Return the bytes that are lost, and bytes that the disk has refused, as AttemptStopped names them."""
        logs = self._logs.values()
        return {
            "log_bytes_lost": sum(log.lost(is_linked) for log in logs),
            "log_bytes_unstored": sum(log.unstored for log in logs),
        }

    def segments(self) -> dict[str, list[list[int]]]:
        """Return the segments of each log that does not have all of its rank's output."""
        return {str(rank): log.segments for rank, log in self._logs.items() if log.unstored or log.cut}


def ranks_in(folder: str) -> dict[int, str]:
    """Rank -> path of its log, of all that a folder has."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".log"))
    return {AGENT if name == AGENT_FILE else int(name[5:-4]): os.path.join(folder, name) for name in names}


def read_from(fd: int, segments: list, offset: int):  # type: ignore[no-untyped-def, type-arg]
    """Yield the contents of a log's file from an offset on: the number of missing bytes, then some, again and again.

    Args:
        fd: the file.
        segments: as in `Log`; nothing: the file has all of it.
        offset: where to begin.
    """
    for start, at, length in segments or [[0, 0, os.fstat(fd).st_size]]:
        while start + length > offset:
            missing = max(0, start - offset)
            offset += missing
            data = os.pread(fd, min(1 << 16, start + length - offset), at + offset - start)
            if not data:
                return
            offset += len(data)
            yield missing, data


def send_stored(
    link: frames.FdLink, folder: str, offsets: dict[str, int], segments: dict[str, list[list[int]]]
) -> None:
    """Send what the logs of a folder have beyond some offsets; both by rank, `segments` as in `AttemptStopped`."""
    for rank, path in ranks_in(folder).items():
        with os.fdopen(folders.open_regular(path, follow=False), "rb") as file:
            for missing, data in read_from(file.fileno(), segments.get(str(rank), []), offsets.get(str(rank), 0)):
                if missing:
                    link.send_json(LogGap(rank=rank, bytes=missing))
                link.send_frame(frames.LOG, data, rank)
