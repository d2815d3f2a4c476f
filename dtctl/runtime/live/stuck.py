"""Detection of a wait in gloo that never ends: for a send whose connection failed after a part of it was written.

When a connection fails, gloo ends the waits for its other sends and receives, but not for that one. This wait ends only
with the time-out of the group (`Pair::signalException` in gloo's transport/tcp/pair.cc; seen with torch 2.13, for peers
that were killed and for sockets that were shut down). The system call of the waiting thread identifies such a wait: new
ones cannot begin, since gloo refuses them on a connection that has failed.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch.distributed as dist

TASKS: Final = Path("/proc/self/task")
RUNS: Final = "pt_gloo_runloop"
"""Threads that run collectives, by their name in torch."""
MOVES: Final = "gloo_tcp_loop"
"""Threads that write to sockets, read from them and wake the others; they tick a hundred times a second."""
FUTEX: Final = {"x86_64": "202", "aarch64": "98"}.get(platform.machine(), "")
"""Number of the system call in which a thread waits; its fourth argument is the time limit, 0 for none."""
TICKS: Final = 20
"""Number of ticks after which every thread that can be woken has been woken."""
POLL_S: Final = 0.1


def is_stuck(goes_on: Callable[[], bool]) -> bool:
    """Return whether a thread waits for an event that never comes, after the sockets of all groups were shut down.

    Args:
        goes_on: returns whether the result is still needed.
    """
    begun = _count_thread_switches()
    while begun and goes_on():
        time.sleep(POLL_S)
        ticks = _count_thread_switches()
        if any(ticks[thread] < count + TICKS for thread, count in begun.items() if thread in ticks):
            continue
        before = find_gloo_waits()
        time.sleep(POLL_S)
        return bool(before & find_gloo_waits()) and goes_on()
    return False


def find_gloo_waits() -> frozenset[tuple[str, str]]:
    """Return the threads that wait for an operation of gloo, each with its system call."""
    found = set()
    for task in TASKS.iterdir():
        is_main = task.name == str(os.getpid())
        if not (_read_task_file(task / "comm") == RUNS or (is_main and _main_is_in_collective())):
            continue
        call = _read_task_file(task / "syscall")
        words = call.split()  # a thread that runs or has ended has no arguments
        if FUTEX and words[:1] == [FUTEX] and int(words[4], 16):  # threads that wait for work have no time limit
            found.add((task.name, call))
    return frozenset(found)


def _count_thread_switches() -> dict[str, int]:
    """Return how often each thread that moves bytes has slept."""
    found = {}
    for task in TASKS.iterdir():
        if _read_task_file(task / "comm") == MOVES:
            status = dict(
                line.split(":\t", 1) for line in _read_task_file(task / "status").splitlines() if ":\t" in line
            )
            found[task.name] = int(status.get("voluntary_ctxt_switches", 0))
    return found


def _main_is_in_collective() -> bool:
    """Return whether the main thread is in torch's module for collectives."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    return frame is not None and frame.f_code.co_filename == dist.distributed_c10d.__file__


def _read_task_file(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # the thread has ended
        return "-"
