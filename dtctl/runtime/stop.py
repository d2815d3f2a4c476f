"""Stopping in good order: a signal to any worker ends all of them at the same step, with a snapshot.

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
    """End of a run, other than by an error."""

    FINISHED = 0
    """All steps are done."""
    STOPPED = REQUEUE_EXIT
    """A signal asked to stop; a snapshot of the last step was written."""

    @property
    def exit_code(self) -> int:
        """Return what the worker's process should end with."""
        return self.value


class StopRequest:
    """Request to this worker to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._granted = False

    def granted(self) -> Outcome:
        """Return the outcome of a training that stops on all workers, with or without a signal to this one.

        From now on it ignores signals and only has to end with the exit code for a stop: a launcher that sees its peers
        end sends SIGTERM to the workers that are still running.
        """
        if not self._granted and threading.current_thread() is threading.main_thread():
            # The interpreter puts handlers back when it ends, but for what is ignored; by then no program is started.
            atexit.register(_ignore)
        self._granted = True
        return Outcome.STOPPED

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take the signals while the body runs. A second one changes nothing: launchers often send it twice over."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may set handlers; a loop elsewhere is stopped by its owner
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                # A function, not SIG_IGN, which programs that this process starts would inherit.
                signal.signal(number, self._note if self._granted else handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number


def _ignore() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
