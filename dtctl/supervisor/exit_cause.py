"""Cause of a process's end by the kernel: memory, a limit of the shell, a full disk. Stdlib only, Python 3.8.

A process that the kernel ends for lack of memory gets SIGKILL, like one that a user has killed. The memory counter of
its cgroup shows the difference, as does the kernel's log if it may be read. The machine's own counter is no evidence,
since it counts all processes of the machine.
"""

from __future__ import annotations

import os
import signal
import time

from dtctl.supervisor.messages.attempt import WorkerExit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtctl.supervisor.node_processes import StartedProcess

LIMITS = {
    int(signal.SIGXCPU): "it has used all the processor time that it may (ulimit -t); raise the limit in job.setup, or "
    "ask the site",
    int(signal.SIGXFSZ): "it has written a file as large as it may (ulimit -f); raise the limit in job.setup, or ask "
    "the site",
}
"""Signals by which the kernel ends a process at a limit of its shell, each with its explanation."""
FULL_BYTES = 1 << 20
"""Free bytes below which a disk counts as full."""


class OomCounters:
    """Counter of the processes of this cgroup that were ended for lack of memory since the beginning of an attempt."""

    def __init__(self, root: str = "/") -> None:
        """Read the counter at the beginning; `root` is the folder that has `proc` and `sys`."""
        self.root = root
        self.initial = self._read_oom_kills()

    def _read_oom_kills(self) -> int | None:
        """Return the value of the counter; None if there is none."""
        for line in _read_kernel_file(
            os.path.join(self.root, self._find_cgroup_folder(), "memory.events")
        ).splitlines():
            fields = line.split()
            if len(fields) == 2 and fields[0] == "oom_kill" and fields[1].isdigit():
                return int(fields[1])
        return None

    def _find_cgroup_folder(self) -> str:
        """Return the folder of the cgroup (version 2) of this process, which is that of the workers, too."""
        for line in _read_kernel_file(os.path.join(self.root, "proc/self/cgroup")).splitlines():
            if line.startswith("0::"):
                return "sys/fs/cgroup" + line[3:].rstrip("/")
        return "sys/fs/cgroup"

    def reason(self, pid: int) -> str:
        """Return the reason why the kernel killed a process; empty if none is found."""
        for line in _kernel_log(os.path.join(self.root, "dev/kmsg")).splitlines()[::-1]:
            if f"Killed process {pid} " in line:
                return f"the kernel killed it for lack of memory: {line.rpartition(';')[2]}"
        count = self._read_oom_kills()
        if count is not None and self.initial is not None and count > self.initial:
            return (
                f"the kernel killed it for lack of memory: oom_kill of its cgroup went from {self.initial} to {count}"
            )
        return ""


class WorkerExits:
    """Exits of the processes of an attempt."""

    def __init__(self, run_dir: str) -> None:
        """Begin before the first process is started; `run_dir` is the run's folder."""
        self.run_dir = run_dir
        self.exits: list[WorkerExit] = []
        self._memory = OomCounters()

    def add(self, process: StartedProcess, is_ending: bool, is_killing: bool) -> WorkerExit:
        """Record the end of a process, with the cause if this node can determine it.

        Args:
            process: process that has ended and has a status.
            is_ending: whether the attempt is being ended, so that its processes got SIGTERM.
            is_killing: whether the processes got SIGKILL after that.
        """
        code, number = exit_facts(process.status or 0)
        ended_at, reason = time.time(), ""
        killed = is_killing and number == signal.SIGKILL
        if code and not is_ending:  # A process that dtctl has ended needs no explanation.
            if number == signal.SIGKILL:
                reason = self._memory.reason(process.pid)
            reason = reason or LIMITS.get(number or 0, "") or describe_full_disk(self.run_dir)
        elif killed:
            reason = "it did not end within the grace period, so dtctl killed it"
        worker_exit = WorkerExit(
            rank=process.rank,
            code=code,
            signal=number,
            why=reason,
            # The signal came from outside, and the worker has no handler for it.
            asked=number in (signal.SIGTERM, signal.SIGUSR1) and not is_ending,
            told=is_ending,  # The process may have ended because of SIGTERM.
            killed=killed,
            time=ended_at,
        )
        self.exits.append(worker_exit)
        return worker_exit

    def drop_exit(self, rank: int) -> None:
        """Leave out the exit of a replaced worker: it is not reported again at the end of the attempt."""
        self.exits = [worker_exit for worker_exit in self.exits if worker_exit.rank != rank]


def exit_facts(status: int) -> tuple[int, int | None]:
    """Return exit code and signal of a wait status: (code, None), or (128 + signal, signal) as in a shell."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return 128 + number, number
    return os.WEXITSTATUS(status), None


def describe_full_disk(path: str) -> str:
    """Return a text if the disk of `path` is full; empty if it is not."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return ""
    if stat.f_blocks == 0 or stat.f_bavail * stat.f_frsize >= FULL_BYTES:
        return ""
    return f"the disk of {path} is full"


def _read_kernel_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 18).decode("utf-8", "replace")
    except OSError:
        return ""


def _kernel_log(path: str) -> str:
    """Return the kernel's messages, newest last; empty if they may not be read."""
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
        pass  # There are no more messages, or some were overwritten meanwhile.
    finally:
        os.close(fd)
    return "\n".join(lines)
