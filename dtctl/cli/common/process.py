"""This process: when it began, and the signals that ask it to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dtctl import node_facts


def process_start() -> float:
    """When this process began, on the monotonic clock; needed to count the time of the imports."""
    ticks = node_facts.start_ticks(os.getpid())
    if ticks <= 0:  # the system does not say; until now we have computed rather than waited
        return time.monotonic() - time.process_time()
    # The kernel counts from boot, sleep included; the monotonic clock leaves sleep out.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Signals that ask to stop are written down, for the launcher to act upon between two messages."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
