"""Replacement of lost workers while the others stay: pipes to the workers, and the ranks to start.

The launcher decides (dtctl/launch/control/worker_replacement.py), and the workers act on its decisions
(dtctl/runtime/live/control.py, which describes the messages in the pipes). This module passes the messages on, and ends
the remaining processes of a lost worker before another one is started. The pipes are named pipes, which work for every
way of starting a worker. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import json
import os
import signal

from dtctl.schema import InvalidMessage
from dtctl.supervisor import processes
from dtctl.supervisor.messages.attempt import Heal, Join, LiveReport

REPORTS = "reports"
LIVE = "DTCTL_LIVE"
LIVE_EPOCH = "DTCTL_LIVE_EPOCH"
LONGEST = 1 << 16


class ReplacementPipes:
    """The pipes of one attempt's workers on this node."""

    def __init__(self, folder: str, ranks: list[int]) -> None:
        """Make the pipes.

        Raises:
            OSError: a pipe could not be made.
        """
        self.folder = folder
        self.ranks = ranks
        self.missing: list[int] = []
        """Ranks of lost workers that have to be replaced."""
        self.undecided: set[int] = set()
        """Ranks of lost workers about which the launcher has not decided yet."""
        self.epoch = 0
        self._pipes: dict[int, int] = {}
        self._received = b""
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self.reports = self._make_fifo(REPORTS)
        for rank in ranks:
            self._pipes[rank] = self._make_fifo("rank-%d" % rank)

    @property
    def is_open(self) -> bool:
        """Return whether a lost worker has not been replaced yet, and may be."""
        return bool(self.undecided or self.missing)

    def mark_undecided(self, rank: int) -> None:
        """Record that the launcher has to decide about the end of a worker."""
        if rank not in self.missing:
            self.undecided.add(rank)

    def _make_fifo(self, name: str) -> int:
        path = os.path.join(self.folder, name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def send_to_worker(self, rank: int, **message) -> None:  # type: ignore[no-untyped-def]
        """Send a message to a worker without waiting, since the worker may not read."""
        try:
            os.write(self._pipes[rank], json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # The pipe is full.

    def heal(self, request: Heal) -> None:
        """Interrupt the wait of the remaining workers, and prepare new pipes for the lost ones."""
        self.epoch = request.epoch
        self.undecided.difference_update(request.lost)
        for rank in self.ranks:
            if rank in request.lost:
                os.close(self._pipes[rank])
                # A new pipe does not have the unread messages of the lost worker.
                self._pipes[rank] = self._make_fifo("rank-%d" % rank)
                if rank not in self.missing:
                    self.missing.append(rank)
            else:
                self.send_to_worker(rank, op="heal", epoch=request.epoch, host=request.host)

    def join(self, request: Join) -> None:
        """Send the address at which they meet to the workers, which are all ready."""
        for rank in self.ranks:
            self.send_to_worker(rank, op="join", epoch=request.epoch, address=request.address, port=request.port)

    def end(self) -> None:
        """Release the workers that wait for a replacement, since there will be none."""
        self.missing = []
        self.undecided.clear()
        for rank in self.ranks:
            self.send_to_worker(rank, op="end")

    def read(self) -> list[LiveReport]:
        """Return the workers' reports."""
        try:
            self._received += os.read(self.reports, LONGEST)
        except BlockingIOError:
            return []
        lines = self._received.split(b"\n")
        self._received = lines.pop()[-LONGEST:]
        reports = []
        for line in lines:
            try:
                reports.append(LiveReport.parse(json.loads(line)))
            except (ValueError, InvalidMessage):
                continue  # A program may write anything into a file that its variables name.
        return [report for report in reports if report.rank in self.ranks]

    def environment(self) -> dict[str, str]:
        """Return the additional variables of a worker that replaces a lost one."""
        return {LIVE_EPOCH: str(self.epoch)}

    def close(self) -> None:
        """Close the pipes at the end of the attempt."""
        for fd in [self.reports, *self._pipes.values()]:
            os.close(fd)
        self._pipes = {}


def end_session(leader: int, token: str, keepers: frozenset[int]) -> None:
    """End the remaining processes of a lost worker, such as data loaders, since they must not write any more."""
    for pid in processes.find_run_processes(token, keepers):
        try:
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
