"""Replacement of lost workers while the others stay: pipes to the workers, and the ranks that are to be started.

The launcher decides (dtctl/launch/control/healing.py), and the workers act on it (dtctl/runtime/live/control.py, which
describes the messages in the pipes). This module passes the messages on, ends the remains of a lost worker and starts
another one. The pipes are named, since these work however a worker was started. Stdlib only, Python 3.8.
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


class Live:
    """The pipes of one attempt's workers on this node."""

    def __init__(self, folder: str, ranks: list[int]) -> None:
        """Make them.

        Raises:
            OSError: a pipe could not be made.
        """
        self.folder = folder
        self.ranks = ranks
        self.missing: list[int] = []
        """Lost workers that are to be replaced."""
        self.undecided: set[int] = set()
        """Lost workers that the launcher has not decided about yet."""
        self.epoch = 0
        self._pipes: dict[int, int] = {}
        self._received = b""
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self.reports = self._make(REPORTS)
        for rank in ranks:
            self._pipes[rank] = self._make("rank-%d" % rank)

    @property
    def is_open(self) -> bool:
        """Return whether a lost worker has no successor yet, and may get one."""
        return bool(self.undecided or self.missing)

    def lose(self, rank: int) -> None:
        """Leave it to the launcher what follows from the end of a worker."""
        if rank not in self.missing:
            self.undecided.add(rank)

    def _make(self, name: str) -> int:
        path = os.path.join(self.folder, name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def tell(self, rank: int, **message) -> None:  # type: ignore[no-untyped-def]
        """Send a message to a worker, without waiting for one that reads nothing."""
        try:
            os.write(self._pipes[rank], json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # full

    def heal(self, request: Heal) -> None:
        """Free the workers that stay, and make room for those that are lost."""
        self.epoch = request.epoch
        self.undecided.difference_update(request.lost)
        for rank in self.ranks:
            if rank in request.lost:
                os.close(self._pipes[rank])
                self._pipes[rank] = self._make("rank-%d" % rank)  # what the lost one has not read is not for the next
                if rank not in self.missing:
                    self.missing.append(rank)
            else:
                self.tell(rank, op="heal", epoch=request.epoch, host=request.host)

    def join(self, request: Join) -> None:
        """Send the workers, which are all ready, the address where they meet."""
        for rank in self.ranks:
            self.tell(rank, op="join", epoch=request.epoch, address=request.address, port=request.port)

    def end(self) -> None:
        """Release the workers that wait for a replacement: there will be none."""
        self.missing = []
        self.undecided.clear()
        for rank in self.ranks:
            self.tell(rank, op="end")

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
                continue  # a program may write anything into its environment's files
        return [report for report in reports if report.rank in self.ranks]

    def environment(self) -> dict[str, str]:
        """Return what a worker that takes a place gets on top."""
        return {LIVE_EPOCH: str(self.epoch)}

    def close(self) -> None:
        """The attempt is over."""
        for fd in [self.reports, *self._pipes.values()]:
            os.close(fd)
        self._pipes = {}


def end_session(leader: int, token: str, keepers: frozenset[int]) -> None:
    """End what a lost worker has left, such as processes that read data: nothing of it may write any more."""
    for pid in processes.find(token, keepers):
        try:
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
