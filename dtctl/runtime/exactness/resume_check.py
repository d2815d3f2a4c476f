"""Check of a resumed run by the steps that it repeats, and the actions that wait for the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtctl.runtime.console import say
from dtctl.runtime.exactness.confirmation import refuse_inexact_resume, start_resume_comparison
from dtctl.runtime.exactness.record import StepRecorder
from dtctl.runtime.exactness.verdict import ExactnessVerdict
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.storage.place import Place

if TYPE_CHECKING:
    from dtctl.runtime.hooks import HookRunner
    from dtctl.runtime.position import TrainingPosition
    from dtctl.runtime.resume import ResumePoint
    from dtctl.runtime.telemetry.report import TrainingReport
    from dtctl.runtime.trained_model import TrainedModel
    from dtctl.runtime.training_settings import TrainingSettings
    from dtctl.runtime.training_state import TrainingState


class ResumeCheck:
    """The check of one run.

    Attributes:
        recorder: of the bits of steps.
        verdict: newest result of a resume in this process; None without one, and until it is known.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        folder: Place,
        trained: TrainedModel,
        report: TrainingReport,
        hooks: HookRunner,
    ) -> None:
        """Prepare to record steps.

        Args:
            settings: settings of the run.
            folder: place of its snapshots.
            trained: model and optimizer.
            report: receives the verdict; its lines may have to wait for it.
            hooks: hooks of the program; their calls may have to wait as well.
        """
        self._settings, self._folder, self._trained = settings, folder, trained
        self._report, self._hooks = report, hooks
        self.recorder = self._build_recorder()
        self.verdict: ExactnessVerdict | None = None

    def _build_recorder(self) -> StepRecorder:
        return StepRecorder(self._settings.worker, self._trained.model, self._trained.optimizer)

    @property
    def is_held(self) -> bool:
        """Return whether nothing may be saved yet, because the verdict on the resume is still open."""
        return self._settings.config.require_exact and self.recorder.is_pending

    def record_following_steps(self, position: TrainingPosition, saver: Saver) -> None:
        """Record the bits of the next steps next to the snapshot that has just begun; collective."""
        if position.step < position.steps:
            self.recorder.start_recording(position.step, saver)

    def start_comparison(
        self, state: TrainingState, position: TrainingPosition, point: ResumePoint, known: Sequence[str]
    ) -> ExactnessVerdict | None:
        """Compare the loaded state with the snapshot's sum, and the next steps with their record; collective.

        Args:
            state: state of the run, as it was loaded.
            position: position of the run.
            point: the snapshot that was loaded.
            known: known differences, a phrase each.

        Returns:
            The verdict, if it is known without the steps; else None.

        Raises:
            SnapshotError: the resume must be exact, a difference is known, and there is no record that could show
                whether it matters.
        """
        settings = self._settings
        then, now = point.facts["circumstances"], settings.circumstances
        same_shares = all(then.get(key) == now.get(key) for key in ("workers", "micro_batch", "accumulate"))
        return start_resume_comparison(
            point, known, state=state, recorder=self.recorder, end=position.steps,
            losses=same_shares and not settings.is_elastic, require_exact=settings.config.require_exact,
        )  # fmt: skip

    def stop_comparison(self, why: str) -> None:
        """End the comparison under way, and report its result so far.

        Args:
            why: the reason.
        """
        self.conclude(self.recorder.stop_comparison(why))

    def restart_recorder(self) -> None:
        """Record the parameters that the optimizer has now."""
        losses, self.recorder = self.recorder.losses, self._build_recorder()
        self.recorder.losses = losses

    def conclude(self, verdict: ExactnessVerdict | None) -> None:
        """Report the verdict on the repeated steps, once it is known, and release what has waited for it.

        Raises:
            SnapshotError: the resume had to be exact and is not; raised on every worker.
        """
        if verdict is None:
            return
        self.verdict = verdict
        config, is_first = self._settings.config, self._settings.worker.is_first
        if is_first:
            self._report.progress.report_resume(confirmed=verdict.document())
        if config.require_exact:
            refuse_inexact_resume(verdict, self._folder)
        if is_first:
            say(verdict.describe())
        self._report.release()
        self._hooks.release()
