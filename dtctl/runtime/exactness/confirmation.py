"""Comparison of a resumed run with the run that it continues: its start, and the refusal of a resume that differs.

The Trainer and the session start it after they have loaded a snapshot. record.py compares the steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from dtctl import names
from dtctl.errors import SnapshotError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness.record import STEPS, StepRecorder, gather_step_record
from dtctl.runtime.exactness.verdict import ExactnessVerdict
from dtctl.runtime.frozen_weights import list_left_out
from dtctl.runtime.resume import ResumePoint
from dtctl.runtime.snapshot import state_sum
from dtctl.runtime.snapshot.format.pieces import find_buffers
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.snapshot.storage.place import Place
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
    slowest_s: float = max(gathered_json(step_s, worker))
    return slowest_s * STEPS <= limit_s


def start_resume_comparison(
    point: ResumePoint,
    known: Sequence[str],
    *,
    state: TrainingState,
    recorder: StepRecorder,
    end: int,
    losses: bool,
    require_exact: bool,
) -> ExactnessVerdict | None:
    """Start to compare the next steps with their record; collective over all workers.

    Args:
        point: the snapshot that was loaded.
        known: known differences, a phrase each.
        state: state of the run, as it was loaded.
        recorder: recorder of the steps.
        end: last step of the run.
        losses: True if each worker has the same samples as before.
        require_exact: True if a difference ends the run.

    Returns:
        The verdict, if it is known without the steps; else None.

    Raises:
        SnapshotError: the resume must be exact, a difference is known, and there is no record that could show whether
            it matters.
    """
    assert point.path is not None  # noqa: S101  # for the type checker
    step, worker = point.step, state.worker
    saved = point.facts.get(state_sum.FACT)
    parts = state.collect_own_parts(list_left_out(point.facts))
    total = state_sum.sum_state(parts, worker, find_buffers(state.model))
    if saved is not None and saved != state_sum.to_fact(total):
        return ExactnessVerdict(verdict="not-exact", step=step, steps=0, differs="state", why=tuple(known))
    rows = gather_step_record(point.path, worker) if step < end else []
    verdict = recorder.start_step_comparison(step, rows, known, end=end, losses=losses)
    if verdict is not None and known and require_exact:
        raise SnapshotError(
            f"going on from step {step} would not be exact: {'; '.join(known)}",
            where=point.path,
            hint="undo these differences, or remove `train.require_exact`",
        )
    return verdict if step < end else None


def refuse_inexact_resume(verdict: ExactnessVerdict, folder: Place) -> None:
    """Raise an error if the resume had to be exact and is not.

    Args:
        verdict: verdict on the resume.
        folder: place of the snapshots.

    Raises:
        SnapshotError: the resume is not exact; raised on every worker.
    """
    if verdict.verdict != "not-exact":
        return
    is_late = verdict.at > verdict.step + STEPS
    kept = f"snapshots after step {verdict.step} are not those of before" if is_late else "nothing was kept since"
    raise SnapshotError(
        f"going on from step {verdict.step} is {verdict.describe()}",
        where=str(folder),
        hint=f"undo what differs, or remove `train.require_exact`; {kept}",
    )
