"""Cause of a process's end by the kernel: memory, a limit of the shell, a full disk. Stdlib only, Python 3.8.

A process that the kernel ends for lack of memory gets SIGKILL, like one that a user has killed. The memory counter of
its cgroup shows the difference, and so does the kernel's log where that may be read. The machine's own counter is no
evidence: it counts every process of the machine.
"""

from __future__ import annotations

import os
import signal
import time

from dtctl.supervisor.messages.attempt import WorkerExit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtctl.supervisor.group import Process

LIMITS = {
    int(signal.SIGXCPU): "it has used all the processor time that it may (ulimit -t); raise the limit in job.setup, or "
    "ask the site",
    int(signal.SIGXFSZ): "it has written a file as large as it may (ulimit -f); raise the limit in job.setup, or ask "
    "the site",
}
"""Signals by which the kernel ends a process that has reached a limit of its shell."""
FULL_BYTES = 1 << 20
"""A disk with fewer free bytes than this counts as full."""


class OomCounters:
    """Number of processes of this cgroup that were ended for lack of memory before an attempt."""

    def __init__(self, root: str = "/") -> None:
        """Count now; `root` is where /proc and /sys lie."""
        self.root = root
        self.initial = self._count()

    def _count(self) -> int | None:
        """Return the counter; None where there is none."""
        for line in _read(os.path.join(self.root, self._cgroup(), "memory.events")).splitlines():
            fields = line.split()
            if len(fields) == 2 and fields[0] == "oom_kill" and fields[1].isdigit():
                return int(fields[1])
        return None

    def _cgroup(self) -> str:
        """Folder of our cgroup, in which the workers are too (version 2)."""
        for line in _read(os.path.join(self.root, "proc/self/cgroup")).splitlines():
            if line.startswith("0::"):
                return "sys/fs/cgroup" + line[3:].rstrip("/")
        return "sys/fs/cgroup"

    def reason(self, pid: int) -> str:
        """Return what is known about a process that SIGKILL has ended; empty: nothing, so it was sent on purpose."""
        for line in _kernel_log(os.path.join(self.root, "dev/kmsg")).splitlines()[::-1]:
            if f"Killed process {pid} " in line:
                return f"the kernel killed it for lack of memory: {line.rpartition(';')[2]}"
        count = self._count()
        if count is not None and self.initial is not None and count > self.initial:
            return (
                f"the kernel killed it for lack of memory: oom_kill of its cgroup went from {self.initial} to {count}"
            )
        return ""


class WorkerExits:
    """Exits of the processes of an attempt."""

    def __init__(self, run_dir: str) -> None:
        """Begin before the first of them is started; `run_dir` is the run's folder."""
        self.run_dir = run_dir
        self.exits: list[WorkerExit] = []
        self._memory = OomCounters()

    def add(self, process: Process, is_ending: bool, is_killing: bool) -> WorkerExit:
        """Note the end of a process, with the cause if this node can determine it.

        Args:
            process: it has a status.
            is_ending: whether the attempt is being ended: then its processes were sent SIGTERM.
            is_killing: whether they were sent SIGKILL after that.
        """
        code, number = exit_facts(process.status or 0)
        ended_at, reason = time.time(), ""
        killed = is_killing and number == signal.SIGKILL
        if code and not is_ending:  # a process that we ended needs no explanation
            if number == signal.SIGKILL:
                reason = self._memory.reason(process.pid)
            reason = reason or LIMITS.get(number or 0, "") or full_disk(self.run_dir)
        elif killed:
            reason = "it did not end when it was asked to, so dtctl killed it"
        worker_exit = WorkerExit(
            rank=process.rank,
            code=code,
            signal=number,
            why=reason,
            # From outside, to a worker that does not listen to it.
            asked=number in (signal.SIGTERM, signal.SIGUSR1) and not is_ending,
            told=is_ending,  # it may have ended because it was asked to
            killed=killed,
            time=ended_at,
        )
        self.exits.append(worker_exit)
        return worker_exit

    def forget(self, rank: int) -> None:
        """Leave out the exit of a replaced worker: it is not reported again at the end of the attempt."""
        self.exits = [worker_exit for worker_exit in self.exits if worker_exit.rank != rank]


def exit_facts(status: int) -> tuple[int, int | None]:
    """Exit code and signal of a wait status: (code, None) or (128 + signal, signal), as a shell counts."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return 128 + number, number
    return os.WEXITSTATUS(status), None


def full_disk(path: str) -> str:
    """Return that the disk of `path` is full; empty if it is not."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return ""
    if stat.f_blocks == 0 or stat.f_bavail * stat.f_frsize >= FULL_BYTES:
        return ""
    return f"the disk of {path} is full"


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 18).decode("utf-8", "replace")
    except OSError:
        return ""


def _kernel_log(path: str) -> str:
    """Return the kernel's messages, newest last; empty where they may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    lines: list = []  # type: ignore[type-arg]
    try:
        while len(lines) < 20_000:
            lines.append(os.read(fd, 8192).decode("utf-8", "replace").rstrip("\n"))
            if not lines[-1]:
                break
    except OSError:
        pass  # no more of them, or some were overwritten while we read
    finally:
        os.close(fd)
    return "\n".join(lines)
