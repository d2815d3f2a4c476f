"""Stacks and last collectives of a node's workers that make no progress.

py-spy reads stacks from outside, also of a stopped process. If it is not installed, a signal makes Python's
faulthandler write the stack of the main thread, for which it needs no lock of the interpreter. A thread of the worker,
if it can still run, writes the stacks of the other threads, and the last collectives from torch's flight recorder.
Stdlib only, Python 3.8.
"""

from __future__ import annotations

import os
import time

from dtctl import node_facts
from dtctl.supervisor import processes, progress
from dtctl.supervisor.messages.attempt import WorkerProgress, WorkerStack

LIMIT_S = 2.0
"""Seconds in which the workers have to answer."""
SETTLED_S = 0.2
"""Seconds without growth after which an answer counts as complete."""
TEXT_BYTES = 1 << 16
FLIGHT_BYTES = 1 << 18
"""Most bytes of a flight record; workers write at most half of it. A longer one is left out, since a cut JSON text is
useless."""


class StackDump:
    """Collection of the stacks of all workers of a node."""

    def __init__(self, folder: str, token: str) -> None:
        """Request the stacks; `folder` has the progress files of the workers."""
        self.folder = folder
        self.reports = [
            report
            for report in progress.read_worker_progress(folder)
            if report.pid and processes.has_run_token(report.pid, token)
        ]
        self.tool_of_rank = {}
        self.deadline = time.monotonic() + LIMIT_S
        self.sizes = (-1, 0.0)
        for report in self.reports:
            self.tool_of_rank[report.rank] = self._request_stack(report)

    def path(self, rank: int, kind: str) -> str:
        """Return the path of a rank's answer of a kind: `stack`, `threads` or `flight`."""
        return os.path.join(self.folder, f"rank-{rank}.{kind}")

    def _request_stack(self, report: WorkerProgress) -> str:
        rank, pid = report.rank, report.pid
        stack = os.open(self.path(rank, "stack"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            try:
                ask = os.open(self.path(rank, "ask"), os.O_WRONLY | os.O_NONBLOCK)
                os.write(ask, b"?")
                os.close(ask)
            except OSError:
                pass  # No thread of the worker reads the pipe.
            spy = _py_spy(pid)
            if spy:
                processes.spawn_program([spy, "dump", "--pid", str(pid)], "/", dict(os.environ), {1: stack, 2: stack})
                return "py-spy"
        finally:
            os.close(stack)
        if report.state == "T" or not report.signal:
            return "none"
        processes.send_process_signal([pid], report.signal)
        return "faulthandler"

    def ready(self) -> bool:
        """Return whether all workers have answered, or the time limit has passed."""
        now = time.monotonic()
        expected = [rank for rank, tool in self.tool_of_rank.items() if tool != "none"]
        sizes = [_read_file_size(self.path(rank, "stack")) for rank in expected]
        total = sum(sizes) + sum(
            _read_file_size(self.path(r, kind)) for r in self.tool_of_rank for kind in ("threads", "flight")
        )
        if total != self.sizes[0]:
            self.sizes = (total, now)
        return now >= self.deadline or (all(sizes) and now - self.sizes[1] >= SETTLED_S)

    def answers(self) -> list[WorkerStack]:
        """Return one message for each worker."""
        return [
            WorkerStack(
                rank=report.rank,
                state=node_facts.read_process_state(report.pid),
                how=self.tool_of_rank[report.rank],
                text=self._read_worker_stacks(report.rank),
                flight=_read_flight_record(self.path(report.rank, "flight")),
            )
            for report in self.reports
        ]

    def _read_worker_stacks(self, rank: int) -> str:
        """Return the stacks of a worker; the stack of its main thread comes last."""
        stack = _read_text_up_to(self.path(rank, "stack"), TEXT_BYTES)
        if self.tool_of_rank[rank] != "faulthandler":
            return stack
        return _read_text_up_to(self.path(rank, "threads"), TEXT_BYTES) + stack


def _py_spy(pid: int) -> str:
    """Return the path of py-spy, next to the worker's Python or on the PATH; empty if there is none."""
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


def _read_file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read_flight_record(path: str) -> str:
    return _read_text_up_to(path, FLIGHT_BYTES) if _read_file_size(path) <= FLIGHT_BYTES else ""


def _read_text_up_to(path: str, limit: int) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
