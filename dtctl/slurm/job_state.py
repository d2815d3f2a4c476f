"""State of a job by Slurm, as it was read last, and since when."""

from __future__ import annotations

import time
from typing import Final

from dtctl.launch.records.events import Emit, JobQueued
from dtctl.slurm.answers import JobFacts
from dtctl.slurm.wait_reasons import NEVER, explain_wait

WAITING: Final = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"}
)
RUNNING: Final = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING", "UNKNOWN"})
"""States in which the job is still running. All others are ends."""
TIME_IS_UP: Final = frozenset({"TIMEOUT", "DEADLINE"})


def is_on(job: JobFacts) -> bool:
    """Return whether a job waits or runs."""
    return job.state in WAITING | RUNNING


class JobState:
    """The newest answer of Slurm about one job."""

    def __init__(self, job: str, emit: Emit) -> None:
        """Create the state of job `job`, without facts yet."""
        self.job = job
        self.emit = emit
        self.facts = JobFacts(state="UNKNOWN")
        self.never = ""
        """Reason why Slurm will never start it; empty as far as is known."""
        self._over_since: float | None = None
        self._shown = ""

    def update(self, facts: JobFacts) -> None:
        """Take an answer in."""
        self.facts = facts
        if is_on(facts):
            self._over_since = None
        elif self._over_since is None:
            self._over_since = time.monotonic()

    @property
    def is_waiting(self) -> bool:
        """Return whether Slurm has not started it, or will start it again."""
        return self.facts.state in WAITING

    @property
    def is_over(self) -> bool:
        """Return whether Slurm reports that the job has ended."""
        return not is_on(self.facts)

    @property
    def over_s(self) -> float:
        """Seconds since it was first seen that the job has ended; 0 while it has not."""
        return 0.0 if self._over_since is None else time.monotonic() - self._over_since

    @property
    def ended_at(self) -> float | None:
        """Return the end of the job, in seconds since the epoch; None where Slurm has none, or none yet."""
        return self.facts.end if self.is_over else None  # of a job that runs it is the time limit

    def exit_code(self) -> int | None:
        """Exit code of the batch script, 128 + N for a signal; None where Slurm has forgotten the job."""
        code, _, number = self.facts.exit_code.partition(":")
        if not code.isdigit():
            return None
        return 128 + int(number) if number.isdigit() and int(number) else int(code)

    def tell(self) -> bool:
        """Emit a new state, or a new reason to wait; return whether the job waits in it."""
        state, reason = self.facts.state, self.facts.reason
        if self._shown == f"{state} {reason}":
            return False
        self._shown = f"{state} {reason}"
        if not self.is_waiting:
            return False
        self.never = explain_wait(self.job, reason) if reason in NEVER else ""
        self.emit(JobQueued(job=self.job, state=state, reason=reason, start=self.facts.start))
        return True
