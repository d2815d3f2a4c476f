"""The processes of one attempt on one node: started, read from, and reaped. Stdlib only, Python 3.8.

Output goes to one log per rank (output_log.py), and from there to the linked reader, by offset. A reader that
reconnects requests what it has not received.
"""

from __future__ import annotations

import os

from dtctl.supervisor import processes
from dtctl.supervisor.output_log import AGENT, RankLogs

LONGEST = 1 << 16
"""Bytes of a line that are waited for; a longer one is stored in parts."""
RANK_MARK = b"[dtctl:"
"""Prefix of a line that worker R printed under torchrun: `[dtctl:R] `, by TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""


class Process:
    """One started copy of the node script and the pipe that its output comes through."""

    def __init__(self, rank: int, pid: int, pipe: int) -> None:
        """Watch process `pid` and read its output from the descriptor `pipe`."""
        self.rank = rank
        self.pid = pid
        self.pipe: int | None = pipe
        self.status: int | None = None
        self.partial = b""
        self.midst: int | None = None
        """Rank of the line that is stored in part so far, or None."""


class Group:
    """All processes of one attempt on this node."""

    def __init__(self, logs: RankLogs, split_ranks: bool) -> None:
        """Put output into these logs; with `split_ranks`, sort torchrun's into ranks by its line prefix."""
        self.logs = logs
        self.split_ranks = split_ranks
        self.processes: list[Process] = []

    def start(self, argv: list[str], cwd: str, env: dict[str, str], rank: int) -> None:
        """Start `argv` in a session of its own, with standard output and error in one pipe.

        Raises:
            OSError: the process could not be made. What fails later, in the child, is written to its log.
        """
        self.add(rank, lambda output_fd: processes.spawn(argv, cwd, env, {1: output_fd, 2: output_fd}))

    def add(self, rank: int, start):  # type: ignore[no-untyped-def]  # Callable would have to come from typing
        """Watch the process that `start(output_fd)` starts; `start` returns its process id."""
        read_end, write_end = os.pipe()
        try:
            pid = start(write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        self.processes.append(Process(rank, pid, read_end))

    def drain(self, process: Process) -> None:
        """Move what a process has printed into its log; closes the pipe at its end."""
        if process.pipe is None:
            return
        for _ in range(16):  # bounded, so that one loud worker does not starve the heartbeat
            try:
                data = os.read(process.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.store(process, b"", last=True)
                os.close(process.pipe)
                process.pipe = None
                return
            self.store(process, data, last=False)

    def store(self, process: Process, data: bytes, last: bool) -> None:
        """Append output to the log of its rank; with torchrun, line by line to the rank that the prefix names."""
        if not self.split_ranks:
            if data:
                self.logs.write(process.rank, data)
            return
        lines = (process.partial + data).split(b"\n")
        process.partial = b"" if last else lines.pop()
        chunks: dict[int, list[bytes]] = {}
        for line in lines:
            if line or not last:
                for rank, text in split_marks(line + b"\n", process.midst):
                    chunks.setdefault(rank, []).append(text)
                process.midst = None
        if len(process.partial) > LONGEST:  # not kept until it ends, if it ever does
            for rank, text in split_marks(process.partial, process.midst):
                chunks.setdefault(rank, []).append(text)
                process.midst = rank
            process.partial = b""
        for rank, texts in chunks.items():
            self.logs.write(rank, b"".join(texts))

    def readable(self) -> dict[int, Process]:
        """Pipes from which output may be read now, each with the process that it comes from."""
        if self.logs.must_wait():
            return {}
        return {process.pipe: process for process in self.processes if process.pipe is not None}

    def collect(self) -> list[Process]:
        """The started processes that have ended since the last call, with `status` set; strays are reaped too."""
        ended = []
        by_pid = {process.pid: process for process in self.processes}
        for pid, status in processes.reap():
            process = by_pid.get(pid)
            if process is not None:
                process.status = status
                ended.append(process)
        return ended

    def running(self) -> list[Process]:
        """Return the started processes that have not ended."""
        return [process for process in self.processes if process.status is None]

    def close(self) -> None:
        """Take what is left in the pipes and close everything."""
        for process in self.processes:
            self.drain(process)
            if process.pipe is not None:
                self.store(process, b"", last=True)
                os.close(process.pipe)
                process.pipe = None


def split_prefix(line: bytes) -> tuple[int, bytes]:
    """The rank that torchrun's prefix names and the line without it; AGENT and the whole line without a prefix."""
    if line.startswith(RANK_MARK):
        end = line.find(b"]", len(RANK_MARK))
        digits = line[len(RANK_MARK) : end]
        if end > 0 and digits.isdigit():
            text = line[end + 1 :]
            return int(digits), text[1:] if text[:1] == b" " else text
    return AGENT, line


def split_marks(line: bytes, rank: "int | None" = None) -> list:  # type: ignore[type-arg]
    """Return the parts of a line as (rank, text); `rank` is that of its beginning, if that is known.

    torchrun begins a new line with the prefix whenever it finds a piece of one, and what redraws its line (tqdm) comes
    in pieces: their marks stand in the middle of a line, and the pieces of several workers between each other.
    """
    if rank is None:
        rank, line = split_prefix(line)
    parts: list = []  # type: ignore[type-arg]
    begin = 0
    while True:
        begin = line.find(RANK_MARK, begin)
        if begin < 0:
            return [*parts, (rank, line)]
        next_rank, rest = split_prefix(line[begin:])
        if next_rank == AGENT:
            begin += 1
        else:
            parts.append((rank, line[:begin]))
            rank, line, begin = next_rank, rest, 0
