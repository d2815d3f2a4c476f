"""The processes of one attempt on one node: their start, their output and their end. Stdlib only, Python 3.8.

Output goes to one log per rank (output_log.py), and from there to the linked reader by offset. A reader that reconnects
requests the bytes that it has not received.
"""

from __future__ import annotations

import os

from dtctl.supervisor import processes
from dtctl.supervisor.frames import AGENT
from dtctl.supervisor.output_log import RankLogs
from dtctl.supervisor.worker_log import RANK_MARK, split_prefix

LONGEST = 1 << 16
"""Most bytes of a line that is stored as a whole; a longer one is stored in parts."""


class StartedProcess:
    """A started copy of the node script, and the pipe with its output."""

    def __init__(self, rank: int, pid: int, pipe: int) -> None:
        """Watch process `pid` and read its output from the descriptor `pipe`."""
        self.rank = rank
        self.pid = pid
        self.pipe: int | None = pipe
        self.status: int | None = None
        self.partial = b""
        self.midst: int | None = None
        """Rank of a line that is only partly stored; None if there is none."""


class NodeProcesses:
    """All processes of one attempt on this node."""

    def __init__(self, logs: RankLogs, split_ranks: bool) -> None:
        """Write output to these logs; with `split_ranks`, assign torchrun's lines to ranks by their prefix."""
        self.logs = logs
        self.split_ranks = split_ranks
        self.processes: list[StartedProcess] = []

    def start(self, argv: list[str], cwd: str, env: dict[str, str], rank: int) -> None:
        """Start `argv` in a session of its own, with standard output and error in one pipe.

        Raises:
            OSError: the process could not be made. A later failure in the child is written to its log.
        """
        self.add(rank, lambda output_fd: processes.spawn_program(argv, cwd, env, {1: output_fd, 2: output_fd}))

    def add(self, rank: int, start):  # type: ignore[no-untyped-def]  # Callable would have to come from typing
        """Start and watch a process by `start(output_fd)`, which returns the process id."""
        read_end, write_end = os.pipe()
        try:
            pid = start(write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        self.processes.append(StartedProcess(rank, pid, read_end))

    def drain(self, process: StartedProcess) -> None:
        """Move the output of a process from its pipe into its log; close the pipe at its end."""
        if process.pipe is None:
            return
        for _ in range(16):  # With this limit, a worker with much output does not delay the heartbeat.
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

    def store(self, process: StartedProcess, data: bytes, last: bool) -> None:
        """Append output to the log of its rank; with torchrun, append each line to the rank in its prefix."""
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
        if len(process.partial) > LONGEST:  # The line may never end, so it is not kept in memory.
            for rank, text in split_marks(process.partial, process.midst):
                chunks.setdefault(rank, []).append(text)
                process.midst = rank
            process.partial = b""
        for rank, texts in chunks.items():
            self.logs.write(rank, b"".join(texts))

    def readable(self) -> dict[int, StartedProcess]:
        """Return the pipes from which output may be read now, each with its process."""
        if self.logs.is_link_behind():
            return {}
        return {process.pipe: process for process in self.processes if process.pipe is not None}

    def collect(self) -> list[StartedProcess]:
        """Return the started processes that ended since the last call, with `status` set; reap other children, too."""
        ended = []
        by_pid = {process.pid: process for process in self.processes}
        for pid, status in processes.reap_children():
            process = by_pid.get(pid)
            if process is not None:
                process.status = status
                ended.append(process)
        return ended

    def running(self) -> list[StartedProcess]:
        """Return the started processes that have not ended."""
        return [process for process in self.processes if process.status is None]

    def close(self) -> None:
        """Store the remaining output of the pipes, and close everything."""
        for process in self.processes:
            self.drain(process)
            if process.pipe is not None:
                self.store(process, b"", last=True)
                os.close(process.pipe)
                process.pipe = None


def split_marks(line: bytes, rank: "int | None" = None) -> list:  # type: ignore[type-arg]
    """Return the parts of a line as (rank, text); `rank` is the rank of its beginning, if it is known.

    torchrun adds its prefix to every piece of a line that it reads, and a program that redraws its line (tqdm) writes
    pieces: so prefixes also appear in the middle of a line, and pieces of several workers alternate.
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
