"""State of a job in Slurm's newest answer, and the time since it changed."""

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
"""States in which a job has started and not ended. All states that are neither here nor in `WAITING` are ends."""
TIME_IS_UP: Final = frozenset({"TIMEOUT", "DEADLINE"})


def is_job_active(job: JobFacts) -> bool:
    """Return whether a job waits or runs."""
    return job.state in WAITING | RUNNING


class JobState:
    """Newest answer of Slurm about one job."""

    def __init__(self, job: str, emit: Emit) -> None:
        """Create the state of job `job`, without an answer yet."""
        self.job = job
        self.emit = emit
        self.facts = JobFacts(state="UNKNOWN")
        self.never = ""
        """Reason why Slurm will never start the job; empty if there is none that is known."""
        self._over_since: float | None = None
        self._shown = ""

    def update(self, facts: JobFacts) -> None:
        """Store an answer."""
        self.facts = facts
        if is_job_active(facts):
            self._over_since = None
        elif self._over_since is None:
            self._over_since = time.monotonic()

    @property
    def is_waiting(self) -> bool:
        """Return whether Slurm has not started the job, or will restart it."""
        return self.facts.state in WAITING

    @property
    def is_over(self) -> bool:
        """Return whether Slurm reports that the job has ended."""
        return not is_job_active(self.facts)

    @property
    def seconds_since_end(self) -> float:
        """Return the seconds since the end of the job was first observed; 0 while it has not ended."""
        return 0.0 if self._over_since is None else time.monotonic() - self._over_since

    @property
    def ended_at(self) -> float | None:
        """Return the end of the job in seconds since the epoch; None if Slurm does not report one."""
        return self.facts.end if self.is_over else None  # for a running job, `end` is the time limit

    def exit_code(self) -> int | None:
        """Return the exit code of the batch script, 128 + N for signal N; None if Slurm no longer reports the job."""
        code, _, number = self.facts.exit_code.partition(":")
        if not code.isdigit():
            return None
        return 128 + int(number) if number.isdigit() and int(number) else int(code)

    def emit_new_state(self) -> bool:
        """Emit a changed state, or a changed reason to wait; return whether the job waits."""
        state, reason = self.facts.state, self.facts.reason
        if self._shown == f"{state} {reason}":
            return False
        self._shown = f"{state} {reason}"
        if not self.is_waiting:
            return False
        self.never = explain_wait(self.job, reason) if reason in NEVER else ""
        self.emit(JobQueued(job=self.job, state=state, reason=reason, start=self.facts.start))
        return True
