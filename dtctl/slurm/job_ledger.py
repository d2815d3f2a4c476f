"""Ledger of a job's time, from its log and its record: the same for every reader at every time."""

from __future__ import annotations

from dataclasses import replace

from dtctl.launch.control.progress import Standing
from dtctl.launch.records.ledger import Ledger


class JobLedger:
    """A ledger whose clock is the time of the newest event."""

    def __init__(self, begun: float) -> None:
        """The job is being submitted.

        Args:
            begun: when the run began, in seconds since the epoch.
        """
        self._now = begun
        self.ledger = Ledger(lambda: self._now, begun=begun)
        self._runs = False
        """True if an attempt is on, or was and is not closed yet."""
        self._over_at: float | None = None
        """Time when that attempt was over; its last records may be read later."""
        self._failed = False
        self._hung_s = 0.0
        self._noted_at = begun
        """Time when the workers last noted anything."""
        self._ended_at = begun

    def _advance(self, at: float) -> None:
        self._now = max(self._now, at)  # the clocks of two nodes may differ

    def start(self, at: float, attempt: int, *, idle_s: float = 0.0) -> None:
        """An attempt begins, after a wait of `idle_s` on purpose."""
        self._close_attempt(self._noted_at)  # where nothing has told its end, the job was lost with its node
        self._advance(at)
        self.ledger.attempts = attempt + 1
        if attempt:
            between_s = self._now - self._ended_at
            self.ledger.move("stop", "idle", min(idle_s, between_s))
            self.ledger.move("stop", "restart", between_s - min(idle_s, between_s))
            self.ledger.mark("restart", self._ended_at)
        self.ledger.enter("start")
        self.ledger.started()
        self._runs, self._over_at, self._failed, self._hung_s = True, None, False, 0.0

    def progress(self, at: float, worker: Standing) -> None:
        """Count the progress of the worker that stands for all, at the time when it noted that."""
        if not self._runs:
            return
        self._noted_at = at - worker.stale_s
        self._advance(self._noted_at)
        self.ledger.watch([replace(worker, begun_s=max(0.0, worker.begun_s - worker.stale_s), stale_s=0.0)])

    def fail(self, *, hung_s: float = 0.0) -> None:
        """The attempt has failed; `hung_s`: after it had made no progress for so long."""
        self._failed = True
        self._hung_s = max(self._hung_s, hung_s)

    def end(self, at: float) -> None:
        """The attempt is over."""
        self._over_at = at

    def _close_attempt(self, default: float) -> None:
        if not self._runs:
            return
        self._advance(default if self._over_at is None else self._over_at)
        since_noted_s = self._now - self._noted_at
        failed_s = max(0.0, since_noted_s - self._hung_s) if self._failed else 0.0
        self.ledger.ended(failed_s=failed_s, hung_s=self._hung_s)
        self._runs, self._ended_at = False, self._now

    def close(self, at: float, *, succeeded: bool) -> None:
        """The job is over."""
        self._close_attempt(at)
        self._advance(at)
        self.ledger.close(succeeded=succeeded)
