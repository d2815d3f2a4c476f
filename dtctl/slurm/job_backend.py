"""Back end of the controller that follows a job of Slurm, cancels it, and reports it like a run on nodes.

The launcher inside the job (job_control.py) restarts the workers when they fail; it works without a follower.
"""

from __future__ import annotations

import signal
import time

from dtctl.errors import ConnectError, Interrupted
from dtctl.launch.control.controller import Result
from dtctl.launch.records.events import Emit, Note, RunStopping
from dtctl.launch.records.run_writer import RunWriter
from dtctl.slurm.job_watcher import JobWatcher, cancel_job, read_job_reference
from dtctl.slurm.site import CommandHost, LocalCommandHost

POLL_S, POLL_AWAY_S = 0.5, 2.0
"""Seconds between two polls of a running job from this machine, and from a login node."""
QUEUE_POLL_S = 8.0
"""Seconds between two polls of a job that has waited for a while."""
FIRST_POLL_S = 0.2
AGAIN_S = 5.0
"""Seconds until dtctl connects to a lost login node again."""


class JobBackend:
    """Back end for a job that was submitted; see `Backend`."""

    def __init__(self, record: RunWriter, site: CommandHost, emit: Emit, signals: list[int]) -> None:
        """Continue where the last follower of this run has stopped; new `signals` end a wait between two polls."""
        self.site = site
        self.emit = emit
        self.signals = signals
        self.job = read_job_reference(record)
        self.follower = JobWatcher(record, self.job, site, emit)
        self.is_running = True
        self._cancelled_by: int | None = None
        self._is_lost = self._is_waiting = False
        self._poll_s = POLL_S if isinstance(site, LocalCommandHost) else POLL_AWAY_S
        self._delay_s = FIRST_POLL_S

    def start(self) -> bool:
        """Return True: Slurm has the job already."""
        return True

    def poll(self) -> None:
        """Poll the job once, and wait if nothing is new."""
        try:
            news = self.follower.poll_job()
            self._is_lost = False
        except ConnectError as exc:
            if not self._is_lost:
                text = f"{exc}; the job continues, and {self.site.name} is called again"
                self.emit(Note(node=self.site.name, text=text))
            self._is_lost = True
            self._wait_for_signal(AGAIN_S)
            return
        if self.follower.slurm.never and not self.follower.is_cancelled:
            self.emit(RunStopping(reason=f"it can never start: {self.follower.slurm.never}"))
            cancel_job(self.site, self.job.job)
            self.follower.is_cancelled = True
        is_waiting = self.follower.slurm.is_waiting
        if is_waiting is not self._is_waiting:
            self._is_waiting, self._delay_s = is_waiting, FIRST_POLL_S
        if self.follower.has_more:
            return
        if news:
            self._wait_for_signal(FIRST_POLL_S)
            return
        self.is_running = not self.follower.has_ended_finally
        if self.is_running:
            self._delay_s = min(self._delay_s * 1.2, QUEUE_POLL_S if is_waiting else self._poll_s)
            self._wait_for_signal(max(self._delay_s, self._poll_s / 2))

    def interrupt(self, number: int, *, again: bool) -> None:
        """Cancel the job; leave the job to Slurm at a second signal, or when the terminal is closed.

        Raises:
            LaunchError: Slurm rejects the request.
            Interrupted: the job is left to Slurm.
        """
        if number == signal.SIGHUP:
            # The terminal was closed, which is no request to end the job.
            raise Interrupted(f"job {self.job.job} goes on; `dtctl watch` follows it", signal=number)
        if self._cancelled_by is None:
            self.emit(RunStopping(reason=signal.Signals(number).name))
            cancel_job(self.site, self.job.job)
            self._cancelled_by, self.follower.is_cancelled = number, True
            self.follower.mirror.is_stop_told = True
        elif again:
            raise Interrupted(f"job {self.job.job} is left to Slurm, which was asked to end it", signal=number)

    def restart(self) -> bool:
        """Return False: the launcher inside the job has made all restarts."""
        return False

    def close(self) -> None:
        """Do nothing, since no connection and no file is open."""

    def result(self) -> Result:
        """Return the result of the job."""
        return self.follower.result(stopped_by=self._cancelled_by)

    def _wait_for_signal(self, seconds: float) -> None:
        """Wait for a signal to handle, or the given time; a handler that returns does not end `time.sleep`."""
        until, handled = time.monotonic() + seconds, int(self._cancelled_by is not None)
        while (remaining_s := until - time.monotonic()) > 0 and len(self.signals) <= handled:
            time.sleep(min(remaining_s, 0.1))
