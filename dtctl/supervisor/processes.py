"""Processes of a run on this node, and their end. This module runs on the node; stdlib only, Python 3.8.

A process belongs to a run if its environment has the run's token, or if it descends from such a process or from the
supervisor. Names do not count, since another run of the same script on the same node must not be affected. A kernel
feature closes the gaps of a scan: the supervisor is a child subreaper, so that daemons still descend from it, and its
parent, the guard, is one, too, and ends the run if the supervisor is killed.
"""

from __future__ import annotations

import os
import signal
import time

from dtctl import folders, node_facts
from dtctl.supervisor import frames

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from typing import Any

RECORD = "supervisor.json"
"""File in a run's folder that names the supervisor on this node."""
_RECORD_BYTES = 1 << 20
TOKEN = "DTCTL_RUN_TOKEN"
"""Variable whose value, 32 random hexadecimal digits, marks every process of one run."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> bool:
    """Make this process, and not init, the parent of orphaned descendants; return whether the system supports it."""
    return node_facts.set_process_attribute(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(parent: int) -> None:
    """End this process when its parent ends; `parent` is the parent's id, in case it has ended already."""
    node_facts.set_process_attribute(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _read_process_table() -> dict[int, tuple[int, str, int]]:
    """Return all processes: id -> (parent id, state letter, start time in clock ticks since boot)."""
    table = {}
    for name in os.listdir("/proc"):
        row = node_facts.read_process_stat(name) if name.isdigit() else None
        if row is not None:  # Otherwise the process has ended meanwhile.
            table[int(name)] = (row[1], row[0], row[2])
    return table


def read_process_identity(pid: int) -> str:
    """Return a text that distinguishes a process from earlier and later ones with its id; empty if there is none."""
    row = node_facts.read_process_stat(pid)
    return "" if row is None else f"{node_facts.read_boot_id()} {row[2]}"


def find_living_supervisor(run_dir: str) -> dict[str, Any] | None:
    """Return the record of a run's supervisor; None if it has ended, or was never started on this node."""
    try:
        record = frames.decode_message(folders.read_regular(os.path.join(run_dir, RECORD), _RECORD_BYTES))
        return record if read_process_identity(int(record["pid"])) == record["identity"] != "" else None
    except (OSError, ValueError, KeyError, TypeError, frames.BrokenFrame):
        return None


def has_run_token(pid: int, token: str) -> bool:
    """Return whether a process was started with the run's token, as far as its environment is readable."""
    return _has_token_mark(pid, f"{TOKEN}={token}".encode())


def _has_token_mark(pid: int, mark: bytes) -> bool:
    try:
        return _has_environment_mark(f"/proc/{pid}", mark)
    except ProcessLookupError:  # The main thread has ended, but others may still run.
        pass
    except OSError:
        return False  # The process has ended, or this user may not read its environment.
    try:
        threads = [thread for thread in os.listdir(f"/proc/{pid}/task") if thread != str(pid)]
        return any(_has_environment_mark(f"/proc/{pid}/task/{thread}", mark) for thread in threads)
    except OSError:
        return False


def _has_environment_mark(folder: str, mark: bytes) -> bool:
    with open(f"{folder}/environ", "rb") as file:
        return mark in file.read().split(b"\0")


def find_run_processes(token: str, keepers: frozenset[int] = frozenset()) -> list[int]:
    """Return the ids of a run's living processes, oldest first, without zombies and without this process.

    Args:
        token: the run's token.
        keepers: ids of the supervisor and its guard, which do not belong to the run, unlike all their descendants.
    """
    mark = f"{TOKEN}={token}".encode()
    table = _read_process_table()
    keepers = (keepers | {os.getpid()}) - {0}  # 0 is the parent of init, and so an ancestor of all processes.
    members = {pid for pid, row in table.items() if pid not in keepers and row[1] != "Z" and _has_token_mark(pid, mark)}
    grew = True
    while grew:  # Descendants count even if they have changed their environment.
        grew = False
        for pid, (parent, state, _) in table.items():
            if pid not in members and pid not in keepers and state != "Z" and (parent in members or parent in keepers):
                members.add(pid)
                grew = True
    return sorted(members, key=lambda pid: (table[pid][2], pid))


def spawn_program(argv: list[str], cwd: str, env: dict[str, str], files: dict[int, int]) -> int:
    """Start a program in a session of its own, with these descriptors (there -> here) and no input; return its id.

    Signals are blocked in the child until the handlers of this process are removed there, so that an early signal acts
    on the program.
    """
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    try:
        os.setsid()
        set_parent_death_signal(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, source in files.items():
            os.dup2(source, target)
        usual = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD, signal.SIGUSR1)
        for number in usual:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.chdir(cwd)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(argv[0], argv, env)
    except OSError as exc:
        os.write(2, f"dtctl: cannot start {argv[0]} in {cwd}: {exc.strerror}\n".encode())
    finally:
        os._exit(127)


def send_process_signal(pids: list[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def kill_run_processes(token: str, keepers: frozenset[int] = frozenset()) -> int:
    """Kill every process of a run; return the number of those that remain after two seconds (stuck in the kernel).

    Children of this process stay zombies until the caller collects them with their exit status.
    """
    deadline = time.monotonic() + 2.0
    while True:
        remaining = find_run_processes(token, keepers)
        if not remaining or time.monotonic() > deadline:
            return len(remaining)
        # The processes are stopped first, so that none of them can fork while the others are being killed.
        send_process_signal(remaining, signal.SIGSTOP)
        send_process_signal(remaining, signal.SIGKILL)
        time.sleep(0.01)


def has_children() -> bool:
    """Return whether this process has a child, including one that has ended and was not collected yet."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def reap_children() -> list[tuple[int, int]]:
    """Collect children that have ended; return (id, wait status) of each, in no particular order."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))
