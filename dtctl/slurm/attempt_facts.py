"""One attempt of a job, as its log and its record tell of it: a fold over their events. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from dtctl.launch.control.culprit import Output, first_failure
from dtctl.launch.control.failure import AGENT, Failure
from dtctl.launch.control.progress import Standing
from dtctl.slurm import batchlog, job_record
from dtctl.slurm.batchlog import Ended, Start


@dataclass(slots=True, kw_only=True)
class AttemptFacts:
    """Facts about an attempt so far."""

    number: int
    begun: float
    """In seconds since the epoch."""
    workers_apart: bool
    """True if each worker is a task of its own (kind direct)."""
    failures: list[Failure] = field(default_factory=list)
    hangs: bool = False
    """True if it was ended because it made no progress; what ends from then on was ended."""
    aborted: bool = False
    """True if srun ends what is left of it; who is ended by its signals from then on has not failed."""
    taken_back: str = ""
    """Reason why Slurm ended the job, or the batch file had it requeued."""
    ended: float | None = None
    exit_code: int | None = None
    """With which its tasks ended, all together; 0: each with success. None before that."""
    first_step: int | None = None
    """The step that it began after; None when the job tells none."""
    last_step: int | None = None
    """The last step that is known to have been done, of the whole run; None when the job tells none."""
    _left_early: tuple[Standing, ...] = ()

    def apply(self, at: float, event: job_record.Event) -> None:
        """Take an event into account that belongs to the attempt; `at`: when it was, in seconds since the epoch."""
        match event:
            case batchlog.Aborted():
                self.aborted = bool(self.failures)
            case Ended() if not (self.hangs or (self.aborted and event.signal in (signal.SIGTERM, signal.SIGKILL))):
                self.failures.append(
                    Failure(
                        node=event.node,
                        rank=self._rank_of(event),
                        exit_code=event.exit_code,
                        signal=event.signal,
                        time=at,
                        node_reason=event.reason,
                    )
                )
            case batchlog.TakenBack():
                self.taken_back = self.taken_back or event.reason  # a requeue by the script says so too
            case batchlog.StepEnded():
                self.ended, self.exit_code = event.time, event.exit_code
            case job_record.RecordedProgress():
                self.first_step, self.last_step = event.worker.first, event.worker.step
            case job_record.LeftEarly():
                self._left_early = tuple(event.workers)
            case job_record.Verdict():
                self.hangs = True
                self.failures.append(event.failure)

    def first_failure(self, output: Output) -> Failure | None:
        """Return the failure that the others follow from; None when there was none."""
        failed = {failure.rank for failure in self.failures}
        left_early = [worker for worker in self._left_early if worker.rank not in failed]
        return first_failure(self.failures, left_early, output)

    def _rank_of(self, event: Ended) -> int | None:
        return event.task if self.workers_apart else None

    def rank_of(self, event: Ended) -> int:
        """Return the rank that has ended; that of torchrun's agent where srun knows only those."""
        rank = self._rank_of(event)
        return AGENT if rank is None else rank


def begin(event: Start, *, workers_apart: bool) -> AttemptFacts:
    """Return an attempt that begins with this event."""
    return AttemptFacts(number=event.attempt, begun=event.time, workers_apart=workers_apart)
