"""Orderly stop: a signal to any worker ends all workers at the same step, with a snapshot.

SIGTERM (launchers, Slurm at the time limit) and SIGUSR1 (Slurm's `--signal=USR1@60`) request it. The exit code means
"start again", since the next attempt finds the snapshot. Until the first step a worker does not handle these signals,
and a signal ends it like any program: there is nothing to save, and the newest snapshot is the one that it began from.
Its work before the first step (import, build the model, wait for other workers) may take longer than any grace period.
The launcher takes this into account.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Final

from dtctl.names import REQUEUE_EXIT

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)


class Outcome(Enum):
    """Way in which a run ended without an error."""

    FINISHED = 0
    """True if all steps are done."""
    STOPPED = REQUEUE_EXIT
    """A signal requested a stop; a snapshot of the last step was written."""

    @property
    def exit_code(self) -> int:
        """Return the exit code of the worker's process."""
        return self.value


class StopRequest:
    """Request to this worker to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._granted = False

    def build_stop_outcome(self) -> Outcome:
        """Return the outcome of a run that stops on all workers, whether or not this worker got a signal.

        From now on this worker ignores signals and exits with the code for a stop: a launcher that sees other workers
        exit sends SIGTERM to those that are still running.
        """
        if not self._granted and threading.current_thread() is threading.main_thread():
            # At exit the interpreter restores all handlers, except those of ignored signals. No program is started
            # after that.
            atexit.register(_ignore_stop_signals)
        self._granted = True
        return Outcome.STOPPED

    @contextmanager
    def handling_stop_signals(self) -> Iterator[StopRequest]:
        """Handle the signals while the body runs. A second signal changes nothing, since launchers often send two."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may set handlers; the owner of another thread stops it
            return
        before = {number: signal.signal(number, self._record_stop_signal) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                # A function instead of SIG_IGN, which programs that this process starts would inherit.
                signal.signal(number, self._record_stop_signal if self._granted else handler)

    def _record_stop_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number


def _ignore_stop_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
