"""Stacks and last collectives of the workers of a node that make no progress.

py-spy reads stacks from outside, also of a process that is stopped; where it is not installed, a signal makes Python's
faulthandler write that of the main thread, which needs no lock of the interpreter. The stacks of the other threads, and
the last collectives from torch's flight recorder, come from a thread of the worker, if it still gets to run. Stdlib
only, Python 3.8.
"""

from __future__ import annotations

import os
import time

from dtctl import node_facts
from dtctl.supervisor import processes, progress
from dtctl.supervisor.messages.attempt import WorkerProgress, WorkerStack

LIMIT_S = 2.0
"""Seconds that the workers have to answer."""
SETTLED_S = 0.2
"""An answer that has not grown for this long is complete."""
TEXT_BYTES = 1 << 16
FLIGHT_BYTES = 1 << 18
"""Workers keep to half of it; half a JSON text is none, so a longer one is left out."""


class StackDump:
    """One question to all workers of a node."""

    def __init__(self, folder: str, token: str) -> None:
        """Ask; `folder` is where they note their progress."""
        self.folder = folder
        self.reports = [
            report for report in progress.read(folder) if report.pid and processes.carries(report.pid, token)
        ]
        self.tool_of_rank = {}
        self.deadline = time.monotonic() + LIMIT_S
        self.sizes = (-1, 0.0)
        for report in self.reports:
            self.tool_of_rank[report.rank] = self._ask(report)

    def path(self, rank: int, kind: str) -> str:
        """Return where the answer of a rank lies: `stack`, `threads` or `flight`."""
        return os.path.join(self.folder, f"rank-{rank}.{kind}")

    def _ask(self, report: WorkerProgress) -> str:
        rank, pid = report.rank, report.pid
        stack = os.open(self.path(rank, "stack"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            try:
                ask = os.open(self.path(rank, "ask"), os.O_WRONLY | os.O_NONBLOCK)
                os.write(ask, b"?")
                os.close(ask)
            except OSError:
                pass  # it does not listen any more
            spy = _py_spy(pid)
            if spy:
                processes.spawn([spy, "dump", "--pid", str(pid)], "/", dict(os.environ), {1: stack, 2: stack})
                return "py-spy"
        finally:
            os.close(stack)
        if report.state == "T" or not report.signal:
            return "none"
        processes.send([pid], report.signal)
        return "faulthandler"

    def ready(self) -> bool:
        """Return whether all have answered, or the time limit has passed."""
        now = time.monotonic()
        expected = [rank for rank, tool in self.tool_of_rank.items() if tool != "none"]
        sizes = [_size(self.path(rank, "stack")) for rank in expected]
        total = sum(sizes) + sum(_size(self.path(r, kind)) for r in self.tool_of_rank for kind in ("threads", "flight"))
        if total != self.sizes[0]:
            self.sizes = (total, now)
        return now >= self.deadline or (all(sizes) and now - self.sizes[1] >= SETTLED_S)

    def answers(self) -> list[WorkerStack]:
        """Return one message for each worker."""
        return [
            WorkerStack(
                rank=report.rank,
                state=node_facts.state(report.pid),
                how=self.tool_of_rank[report.rank],
                text=self._stacks(report.rank),
                flight=_flight(self.path(report.rank, "flight")),
            )
            for report in self.reports
        ]

    def _stacks(self, rank: int) -> str:
        """Return the stacks of a worker, that of its main thread last."""
        stack = _text(self.path(rank, "stack"), TEXT_BYTES)
        if self.tool_of_rank[rank] != "faulthandler":
            return stack
        return _text(self.path(rank, "threads"), TEXT_BYTES) + stack


def _py_spy(pid: int) -> str:
    """Return the path of py-spy, next to the worker's Python or on the PATH; empty where it is not."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            python = file.read().split(b"\0")[0].decode()
    except (OSError, UnicodeDecodeError):
        return ""
    for folder in [os.path.dirname(python), *os.environ.get("PATH", os.defpath).split(os.pathsep)]:
        path = os.path.join(folder, "py-spy")
        if folder and os.access(path, os.X_OK):
            return path
    return ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _flight(path: str) -> str:
    return _text(path, FLIGHT_BYTES) if _size(path) <= FLIGHT_BYTES else ""


def _text(path: str, limit: int) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
