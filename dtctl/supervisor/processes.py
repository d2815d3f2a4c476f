"""Processes of a run on this node, and the way they are ended. Runs on the node; stdlib only, Python 3.8.

A process belongs to a run when its environment carries the run's token, or when it descends from one that does, or from
the supervisor. Never by name: another run of the same script on the same node must not be touched. Two kernel
features close the gaps that a scan leaves: the supervisor is a child subreaper, so that what daemonizes still descends
from it, and its parent, the guard, is one too and ends the run if the supervisor itself is killed.
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
    """Let orphaned descendants be re-parented to this process instead of to init; whether that is so now."""
    return node_facts.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends; `parent` is the parent's id, in case it has ended already."""
    node_facts.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _table() -> dict[int, tuple[int, str, int]]:
    """Return all processes: id -> (parent id, state letter, start time in clock ticks since boot)."""
    table = {}
    for name in os.listdir("/proc"):
        row = node_facts.process(name) if name.isdigit() else None
        if row is not None:  # else it ended while we looked
            table[int(name)] = (row[1], row[0], row[2])
    return table


def identity(pid: int) -> str:
    """Return a text that distinguishes a process from earlier and later ones with its id; empty if there is none."""
    row = node_facts.process(pid)
    return "" if row is None else f"{node_facts.boot_id()} {row[2]}"


def living_supervisor(run_dir: str) -> dict[str, Any] | None:
    """Return the record of a run's supervisor; None when it has ended, or none was started on this node."""
    try:
        record = frames.decode(folders.read_regular(os.path.join(run_dir, RECORD), _RECORD_BYTES))
        return record if identity(int(record["pid"])) == record["identity"] != "" else None
    except (OSError, ValueError, KeyError, TypeError, frames.BrokenFrame):
        return None


def carries(pid: int, token: str) -> bool:
    """Return whether a process was started with the run's token, as far as its environment is readable."""
    return _carries(pid, f"{TOKEN}={token}".encode())


def _carries(pid: int, mark: bytes) -> bool:
    try:
        return _shows(f"/proc/{pid}", mark)
    except ProcessLookupError:  # its first thread has ended, and perhaps no other one
        pass
    except OSError:
        return False  # ended, or not ours to read
    try:
        threads = [thread for thread in os.listdir(f"/proc/{pid}/task") if thread != str(pid)]
        return any(_shows(f"/proc/{pid}/task/{thread}", mark) for thread in threads)
    except OSError:
        return False


def _shows(folder: str, mark: bytes) -> bool:
    with open(f"{folder}/environ", "rb") as file:
        return mark in file.read().split(b"\0")


def find(token: str, keepers: frozenset[int] = frozenset()) -> list[int]:
    """Ids of the living processes of a run, oldest first; zombies do not count, nor does the process that asks.

    Args:
        token: the run's token.
        keepers: ids of the supervisor and its guard: not part of the run, but all their other descendants are.
    """
    mark = f"{TOKEN}={token}".encode()
    table = _table()
    keepers = (keepers | {os.getpid()}) - {0}  # 0 is the parent of init, and so an ancestor of all
    members = {pid for pid, row in table.items() if pid not in keepers and row[1] != "Z" and _carries(pid, mark)}
    grew = True
    while grew:  # descendants, whatever they did to their environment
        grew = False
        for pid, (parent, state, _) in table.items():
            if pid not in members and pid not in keepers and state != "Z" and (parent in members or parent in keepers):
                members.add(pid)
                grew = True
    return sorted(members, key=lambda pid: (table[pid][2], pid))


def spawn(argv: list[str], cwd: str, env: dict[str, str], files: dict[int, int]) -> int:
    """Start a program in a session of its own, with these descriptors (there -> here), without input; its id.

    A signal that reaches it at once has the effect that it has on the program: it waits until the handlers of this
    process are gone, which would take it for themselves.
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
        die_with_parent(parent)
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


def send(pids: list[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def kill(token: str, keepers: frozenset[int] = frozenset()) -> int:
    """End every process of a run with SIGKILL; return how many remain after two seconds (stuck in the kernel).

    Children of this process stay zombies: the caller collects them with their exit status.
    """
    deadline = time.monotonic() + 2.0
    while True:
        remaining = find(token, keepers)
        if not remaining or time.monotonic() > deadline:
            return len(remaining)
        # Stopped first, so that none of them can fork while the others are being killed.
        send(remaining, signal.SIGSTOP)
        send(remaining, signal.SIGKILL)
        time.sleep(0.01)


def has_children() -> bool:
    """Return whether this process has any child, one that has ended and was not collected yet included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def reap() -> list[tuple[int, int]]:
    """Collect children that have ended: (id, wait status) each, in no particular order."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))
