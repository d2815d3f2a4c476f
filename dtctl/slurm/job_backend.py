"""A job of Slurm as a back end of the controller: followed, cancelled, and reported like a run on nodes.

The launcher inside the job (job_control.py) starts its workers again when they fail; it works without a follower.
"""

from __future__ import annotations

import signal
import time

from dtctl.errors import ConnectError, Interrupted
from dtctl.launch.control.controller import Result
from dtctl.launch.records.events import Emit, Note, Stopping
from dtctl.launch.records.run_writer import RunWriter
from dtctl.slurm.follow import Follower, cancel, reference
from dtctl.slurm.site import LocalSite, Site

POLL_S, POLL_AWAY_S = 0.5, 2.0
"""Seconds between two polls of a running job: here, and on a login node."""
QUEUE_POLL_S = 8.0
"""Seconds between two polls of a waiting job, after a while."""
FIRST_POLL_S = 0.2
AGAIN_S = 5.0
"""Seconds until a lost login node is called again."""


class JobBackend:
    """See `Backend`: a job that was submitted."""

    def __init__(self, record: RunWriter, site: Site, emit: Emit, signals: list[int]) -> None:
        """Go on where the last follower of this run has stopped; `signals` that arrive end a wait between two polls."""
        self.site = site
        self.emit = emit
        self.signals = signals
        self.job = reference(record)
        self.follower = Follower(record, self.job, site, emit)
        self.is_running = True
        self._cancelled_by: int | None = None
        self._is_lost = self._is_waiting = False
        self._poll_s = POLL_S if isinstance(site, LocalSite) else POLL_AWAY_S
        self._delay_s = FIRST_POLL_S

    def start(self) -> bool:
        """Slurm has it already."""
        return True

    def poll(self) -> None:
        """Look once, and wait if nothing is new."""
        try:
            news = self.follower.look()
            self._is_lost = False
        except ConnectError as exc:
            if not self._is_lost:
                text = f"{exc}; the job continues, and {self.site.name} is called again"
                self.emit(Note(node=self.site.name, text=text))
            self._is_lost = True
            self._wait(AGAIN_S)
            return
        if self.follower.slurm.never and not self.follower.is_cancelled:
            self.emit(Stopping(reason=f"it can never start: {self.follower.slurm.never}"))
            cancel(self.site, self.job.job)
            self.follower.is_cancelled = True
        is_waiting = self.follower.slurm.is_waiting
        if is_waiting is not self._is_waiting:
            self._is_waiting, self._delay_s = is_waiting, FIRST_POLL_S
        if news:
            return
        self.is_running = not self.follower.settled
        if self.is_running:
            self._delay_s = min(self._delay_s * 1.2, QUEUE_POLL_S if is_waiting else self._poll_s)
            self._wait(max(self._delay_s, self._poll_s / 2))

    def interrupt(self, number: int, *, again: bool) -> None:
        """Cancel the job; at a second signal, or when the terminal is closed, leave it to Slurm.

        Raises:
            LaunchError: Slurm does not take the request.
            Interrupted: it is left.
        """
        if number == signal.SIGHUP:
            # The terminal is gone, and there is no request to end the job.
            raise Interrupted(f"job {self.job.job} goes on; `dtctl watch` follows it", signal=number)
        if self._cancelled_by is None:
            self.emit(Stopping(reason=f"signal {number}"))
            cancel(self.site, self.job.job)
            self._cancelled_by, self.follower.is_cancelled = number, True
            self.follower.mirror.is_stop_told = True
        elif again:
            raise Interrupted(f"job {self.job.job} is left to Slurm, which was asked to end it", signal=number)

    def restart(self) -> bool:
        """Never: what there was to start again, the job has."""
        return False

    def close(self) -> None:
        """Nothing is held."""

    def result(self) -> Result:
        """Return how the job ended."""
        return self.follower.result(stopped_by=self._cancelled_by)

    def _wait(self, seconds: float) -> None:
        """Wait unless a signal has to be handled; a handler that returns does not end `time.sleep`."""
        until, handled = time.monotonic() + seconds, int(self._cancelled_by is not None)
        while (remaining_s := until - time.monotonic()) > 0 and len(self.signals) <= handled:
            time.sleep(min(remaining_s, 0.1))
