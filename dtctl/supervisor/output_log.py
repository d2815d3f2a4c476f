"""The output of one rank on its node, stored in a file and sent over the link by offset. Stdlib only, Python 3.8.

The file is the buffer: a slow or absent reader costs disk space, not memory. Output that the disk refuses is held in
memory until the link has taken it, and no more is read from the worker meanwhile; without a link, the oldest of it is
dropped. Above a limit, the middle is cut out of the file. Offsets count all printed bytes, including those cut out.
"""

from __future__ import annotations

import os

from dtctl import folders
from dtctl.supervisor import frames
from dtctl.supervisor.frames import format_log_name, parse_log_name
from dtctl.supervisor.link import CHUNK, ControlLink
from dtctl.supervisor.messages.attempt import LogGap
from dtctl.supervisor.worker_log import cut_log, split_limit

HELD_BYTES = 1 << 20
"""Most bytes of one rank's output that are held in memory."""
READ_BYTES = 1 << 20
"""Most bytes of a worker's output that are read at once, see `NodeProcesses.drain`."""


class OutputLog:
    """Output of a rank, and the offset up to which it was queued for the link."""

    def __init__(self, path: str, limit_bytes: int = 0) -> None:
        """Append to the file at `path`, which is made with mode 0600; a limit of 0 bytes is none."""
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.limit_bytes = limit_bytes
        self.end = os.fstat(self.fd).st_size
        """Size of the file in bytes."""
        self.segments = [[0, 0, self.end]] if self.end else []
        """Segments of the file in their order: offset in the output, offset in the file, and length."""
        self.size = self.end
        """Size of the output in bytes."""
        self.sent = 0
        self.held = b""
        """Newest output that the disk has refused."""
        self.unstored = 0
        """Bytes that the disk has refused."""
        self.cut = 0
        """Bytes that were cut out of the file because of the limit."""
        self._skipped = 0

    def write(self, data: bytes, is_linked: bool = True) -> None:
        """Append `data`; without a link, newly refused output may replace output that the disk refused before."""
        if not self.held:  # Output in memory comes first, so that the order is kept.
            data = data[self._write_output(data) :]
        self.unstored += len(data)
        self.size += len(data)
        self.held += data
        if not is_linked and len(self.held) > HELD_BYTES:
            self.held = self.held[-HELD_BYTES:]
        if 0 < self.limit_bytes < self.stored():
            self._cut_middle()

    def _write_output(self, data: bytes) -> int:
        """Write the bytes that fit on the disk; return their number."""
        try:
            written = os.pwrite(self.fd, data, self.end)  # A nearly full disk accepts a part.
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
        """Cut out the middle, so that half of the limit remains at the beginning and an eighth at the end."""
        most_head, most_tail = split_limit(self.limit_bytes)
        first, last = self.segments[0], self.segments[-1]
        head = min(first[2], most_head)
        tail = min(last[2] - (head if last is first else 0), most_tail)
        start, source = last[0] + last[2] - tail, last[1] + last[2] - tail
        self.cut += self.stored() - head - tail
        try:
            target = cut_log(self.fd, first[1] + head, source, source + tail, self.cut)
        except OSError:
            target = source  # The file is unchanged.
        self.segments = [[first[0], first[1], head], [start, target, tail]]
        self.end = target + tail

    def is_full(self) -> bool:
        """Return whether the link should take output before more is read from the worker."""
        would_be_cut = bool(self.limit_bytes) and self.stored() + READ_BYTES >= self.limit_bytes
        # The kept end of the file must contain all unsent output, including the bytes that are read next.
        most_unsent = max(0, split_limit(self.limit_bytes)[1] - READ_BYTES)
        return len(self.held) >= HELD_BYTES or (would_be_cut and self.size - self.sent > most_unsent)

    def stored(self) -> int:
        """Return the number of bytes of the output in the file."""
        return sum(segment[2] for segment in self.segments)

    def take_unsent(self, limit: int) -> tuple:  # type: ignore[type-arg]
        """Return the number of missing bytes after the sent output, and the next bytes; both count as sent now."""
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
        """Set the offset up to which a new link has the output."""
        self.sent = min(offset, self.size)

    def lost(self, is_linked: bool) -> int:
        """Return the bytes that are neither in the file nor sent over a link nor about to be; cuts do not count."""
        if not self.unstored:  # All missing bytes were cut out, which the launcher learns from a LogGap.
            return 0
        left = sum(max(0, start + length - max(start, self.sent)) for start, _, length in self.segments)
        held = min(len(self.held), self.size - self.sent) if is_linked else 0
        return self._skipped + max(0, self.size - self.sent - left - held)


class RankLogs:
    """The logs of one attempt on this node, each opened at first use."""

    def __init__(self, folder: str, limit_bytes: int = 0) -> None:
        """Store the logs in `folder`, for each rank no more than the limit."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.is_linked = True
        """True if a link takes the output that cannot be written to the disk."""
        self._logs: dict[int, OutputLog] = {}

    def open(self, rank: int) -> OutputLog:
        """Return the log of a rank."""
        if rank not in self._logs:
            self._logs[rank] = OutputLog(os.path.join(self.folder, format_log_name(rank)), self.limit_bytes)
        return self._logs[rank]

    def skip_stored(self) -> None:
        """Count stored output as sent: an earlier supervisor has sent it, or the new link requests it."""
        for rank in list_rank_logs(self.folder):
            log = self.open(rank)
            log.sent = log.size

    def rewind(self, offsets: dict[str, int]) -> None:
        """Set the offset of each rank up to which a new link has the output."""
        for rank in list_rank_logs(self.folder):
            self.open(rank)
        for rank, log in self._logs.items():
            log.rewind(offsets.get(str(rank), 0))

    def write(self, rank: int, data: bytes) -> None:
        """Append to the log of a rank."""
        self.open(rank).write(data, self.is_linked)

    def is_link_behind(self) -> bool:
        """Return whether the link should take output before more is read from the workers."""
        return self.is_linked and any(log.is_full() for log in self._logs.values())

    def feed(self, link: ControlLink) -> bool:
        """Queue unsent output, as much as the link can take; return whether no unsent output is left."""
        for rank, log in self._logs.items():
            while log.sent < log.size and len(link.out) < CHUNK:
                missing, data = log.take_unsent(CHUNK)
                if missing:
                    link.send(LogGap(rank=rank, bytes=missing))
                if not (missing or data):
                    break  # Another process has truncated the file.
                link.out += frames.pack_frame(frames.LOG, data, rank)
        return all(log.sent >= log.size for log in self._logs.values())

    def losses(self, is_linked: bool) -> dict[str, int]:
        """Return the numbers of lost bytes and of bytes that the disk refused, by the keys of AttemptStopped."""
        logs = self._logs.values()
        return {
            "log_bytes_lost": sum(log.lost(is_linked) for log in logs),
            "log_bytes_unstored": sum(log.unstored for log in logs),
        }

    def segments(self) -> dict[str, list[list[int]]]:
        """Return the segments of each incomplete log, by rank."""
        return {str(rank): log.segments for rank, log in self._logs.items() if log.unstored or log.cut}


def list_rank_logs(folder: str) -> dict[int, str]:
    """Return the path of each rank's log in a folder."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".log"))
    return {parse_log_name(name): os.path.join(folder, name) for name in names}


def read_from(fd: int, segments: list, offset: int):  # type: ignore[no-untyped-def, type-arg]
    """Yield the contents of a log's file from an offset on, as pairs of a number of missing bytes and the next bytes.

    Args:
        fd: descriptor of the file.
        segments: segments as in `OutputLog`; empty: the file has the whole output.
        offset: offset of the first byte in the output.
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
    """Send the output in a folder's logs after the offset of each rank; `segments` is as in `AttemptStopped`."""
    for rank, path in list_rank_logs(folder).items():
        with os.fdopen(folders.open_regular(path, follow=False), "rb") as file:
            for missing, data in read_from(file.fileno(), segments.get(str(rank), []), offsets.get(str(rank), 0)):
                if missing:
                    link.send_json(LogGap(rank=rank, bytes=missing))
                link.send_frame(frames.LOG, data, rank)
