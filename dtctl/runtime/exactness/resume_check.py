"""Check of a resumed run by the steps that it repeats, and the actions that wait for the verdict.

The Trainer and the session start it after they have loaded a snapshot. record.py compares the steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from dtctl import names
from dtctl.errors import SnapshotError
from dtctl.runtime.console import say
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness.record import STEPS, StepRecorder, gather_step_record
from dtctl.runtime.exactness.verdict import ExactnessVerdict
from dtctl.runtime.frozen_weights import list_left_out
from dtctl.runtime.snapshot import state_sum
from dtctl.runtime.snapshot.format.pieces import find_buffers
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.storage.place import Place
from dtctl.train.config import TrainConfig

if TYPE_CHECKING:
    from dtctl.runtime.resume import ResumePoint
    from dtctl.runtime.telemetry.report import TrainingReport
    from dtctl.runtime.training_state import TrainingState

AHEAD: Final = 0.3
"""Largest share of the grace period for the steps after an agreed stop."""


def has_time_to_record(step_s: float, worker: Worker) -> bool:
    """Return whether the steps after an agreed stop can be recorded within the grace; collective over all workers.

    Args:
        step_s: seconds of a step on this worker; 0 if unknown.
        worker: this worker.
    """
    limit_s = AHEAD * float(os.environ.get(names.GRACE_S, "10"))
    slowest_s: float = max(gather_json(step_s, worker))
    return slowest_s * STEPS <= limit_s


class ResumeCheck:
    """The check of one run.

    Attributes:
        recorder: of the bits of steps.
        verdict: newest result of a resume in this process; None without one, and until it is known.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        *,
        config: TrainConfig,
        worker: Worker,
        folder: Place,
        report: TrainingReport,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to record steps.

        Args:
            recorder: recorder of the steps after each snapshot.
            config: settings of the run.
            worker: this worker.
            folder: place of its snapshots.
            report: receives the verdict; its lines may have to wait for it.
            release: called when the verdict is known, for calls that have to wait as well.
        """
        self.recorder, self._release = recorder, release
        self._worker, self._folder, self._report = worker, folder, report
        self._must_be_exact = config.require_exact
        self.verdict: ExactnessVerdict | None = None

    @property
    def is_held(self) -> bool:
        """Return whether nothing may be saved yet, because the verdict on the resume is still open."""
        return self._must_be_exact and self.recorder.is_pending

    def start_comparison(
        self, state: TrainingState, point: ResumePoint, known: Sequence[str], *, end: int, losses: bool
    ) -> ExactnessVerdict | None:
        """Compare the loaded state with the snapshot's sum, and the next steps with their record; collective.

        Args:
            state: state of the run, as it was loaded.
            point: the snapshot that was loaded.
            known: known differences, a phrase each.
            end: last step of the run.
            losses: True if each worker has the same samples as before.

        Returns:
            The verdict, if it is known without the steps; else None.

        Raises:
            SnapshotError: the resume must be exact, a difference is known, and there is no record that could show
                whether it matters.
        """
        assert point.path is not None  # noqa: S101  # for the type checker
        step, saved = point.step, point.facts.get(state_sum.FACT)
        parts = state.collect_own_parts(list_left_out(point.facts))
        total = state_sum.sum_state(parts, self._worker, find_buffers(state.model))
        if saved is not None and saved != state_sum.format_sum(total):
            return ExactnessVerdict(verdict="not-exact", step=step, steps=0, differs="state", why=tuple(known))
        rows = gather_step_record(point.path, self._worker) if step < end else []
        verdict = self.recorder.start_step_comparison(step, rows, known, end=end, losses=losses)
        if verdict is not None and known and self._must_be_exact:
            raise SnapshotError(
                f"going on from step {step} would not be exact: {'; '.join(known)}",
                where=point.path,
                hint="undo these differences, or remove `train.require_exact`",
            )
        return verdict if step < end else None

    def stop_comparison(self, why: str) -> None:
        """End the comparison under way, and report its result so far.

        Args:
            why: the reason.
        """
        self.conclude(self.recorder.stop_comparison(why))

    def conclude(self, verdict: ExactnessVerdict | None) -> None:
        """Report the verdict on the repeated steps, once it is known, and release what has waited for it.

        Raises:
            SnapshotError: the resume had to be exact and is not; raised on every worker.
        """
        if verdict is None:
            return
        self.verdict = verdict
        if self._worker.is_first:
            self._report.progress.report_resume(confirmed=verdict.document())
        if self._must_be_exact and verdict.verdict == "not-exact":
            kept = "nothing was kept since"
            if verdict.at > verdict.step + STEPS:
                kept = f"snapshots after step {verdict.step} differ from the earlier ones"
            raise SnapshotError(
                f"going on from step {verdict.step} is {verdict.describe()}",
                where=str(self._folder),
                hint=f"undo what differs, or remove `train.require_exact`; {kept}",
            )
        if self._worker.is_first:
            say(verdict.describe())
        self._report.release()
        self._release()
