"""Return of a run to a snapshot: when an attempt begins, after a bad gradient, and to repeat a step."""

from __future__ import annotations

import os
from typing import Any

from dtctl import names
from dtctl.errors import WorkerFailed
from dtctl.runtime import randomness, resume
from dtctl.runtime.batch_norm import describe_batch_norm
from dtctl.runtime.console import say
from dtctl.runtime.exactness import program_fingerprint, run_conditions
from dtctl.runtime.exactness.verdict import ExactnessVerdict
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.training import Training


def resume_training(training: Training) -> None:
    """Load the newest good snapshot, or begin at step 0, and report the result; collective over all workers.

    Raises:
        SnapshotError: a snapshot does not fit this model, or the resume is not exact although it must be.
    """
    settings, position, check = training.settings, training.position, training.check
    worker, folder = settings.worker, training.snapshots.folder
    point = training.snapshots.find_newest()
    check.recorder.losses.begin(folder, worker, before=point.facts.get("lineage", ""), step=point.step)
    lines = [f"snapshot skipped: {reason}" for reason in point.rejected]
    known = restore_training(training, point) if point.path is not None else None
    lines.append(training.report.build_introduction(training.engine.strategy.name, position.batch, position.steps))
    lines += describe_batch_norm(training.trained.model, settings.averaged_replicas)
    verdict = None
    if known is None:
        randomness.seed_worker_generators(settings.config.seed, settings.place.stream)
        if os.environ.get(names.ATTEMPT, "0") != "0":
            lines.append("there is no snapshot yet: this attempt begins at step 0 again")
    else:
        origin = " from memory" if point.is_in_memory else ""
        then, now = point.facts["circumstances"], settings.circumstances
        same_shares = all(then.get(key) == now.get(key) for key in ("workers", "micro_batch", "accumulate"))
        verdict = check.start_comparison(
            training.state, point, known, end=position.steps, losses=same_shares and not settings.is_elastic
        )
        differing = f"known to differ: {'; '.join(known)}" if known else "nothing known differs"
        lines.append(f"resumed at step {position.step} of {position.steps}{origin}: {differing}")
        if position.step >= position.steps:
            lines.append(f"all steps are done: raise `train.steps` to continue, or start over without {folder}")
    if worker.is_first:
        say("\n".join(lines))
        if known is not None:
            resumed = {"step": position.step, "verdict": None, "steps": 0, "differs": None, "why": known}
            training.report.progress.report_resume(resumed=resumed)
    check.conclude(verdict)


def restore_training(training: Training, found: resume.ResumePoint, *, going_back: bool = False) -> list[str]:
    """Load a snapshot; collective over all workers.

    Args:
        training: the run to restore.
        found: the snapshot.
        going_back: True if this process made the snapshot and has trained on since.

    Returns:
        Known differences from the conditions under which the snapshot was made, a phrase each.

    Raises:
        SnapshotError: the snapshot does not fit this model.
    """
    settings, position, trained = training.settings, training.position, training.trained
    worker = settings.worker
    position.step, position.samples = found.step, found.facts["position"]
    sizes, trained.rate.factor = resume.resolve_resumed_batch(settings.config, position.asked, found.facts)
    trained.rate.accept_loaded_rates()
    training.set_batch_sizes(sizes)
    position.is_ended = False
    if found.facts.get("ended"):
        position.end()
    if trained.loss_scale is not None and found.facts.get("loss_scale"):
        trained.loss_scale.load(found.facts["loss_scale"])
    held = warm_up(training)  # before anything is restored, so that the restored state replaces what the pass changes
    parts = found.parts(trained.model, trained.optimizer, worker)
    if training.snapshots.best is not None:
        training.snapshots.best.load(found.facts.get("best"))
    differing = training.state.load(parts, found.facts, step=position.step, held=held, going_back=going_back)
    differing += program_fingerprint.find_program_differences(training.account, parts, found.facts, worker.rank)
    if worker.is_first:
        differing += run_conditions.describe_changed_facts(found.facts["circumstances"], settings.circumstances)
    reports = gather_json(differing, worker)  # without the exchange one worker might stop while the others continue
    return list(dict.fromkeys(phrase for phrases in reports for phrase in phrases))


def warm_up(training: Training) -> dict[str, Any]:
    """Run a pass and discard its result, if the strategy needs one; it changes gradients, buffers and random state.

    Returns:
        State of the program's own objects before the pass; empty if no pass was needed.
    """
    engine, position = training.engine, training.position
    # a run's first step has no such pass before it
    if not engine.strategy.has_warm_up or not 0 < position.step < position.steps:
        return {}
    held = training.account.program.copy_states()
    step = engine.build_step(position)
    step.backward(engine.strategy.module, step.read_first_batch(), 1.0, 1)
    engine.strategy.finish()
    training.trained.drop_gradients()
    return held


def roll_back_training(training: Training) -> None:
    """Go back to the newest snapshot, and skip the samples seen since, as they led to a bad gradient; collective.

    Raises:
        WorkerFailed: there is no snapshot.
    """
    position, worker, snapshots = training.position, training.settings.worker, training.snapshots
    step, samples = position.step + 1, position.samples + position.next_samples
    snapshots.wait()  # the newest snapshot may still be being written
    point = snapshots.find_newest()
    if point.path is None:
        raise WorkerFailed(f"the gradient of step {step} is not finite, and there is no snapshot to go back to")
    training.transaction.is_torn = True
    training.check.stop_comparison(f"the gradient of step {step} is not finite")
    restore_training(training, point, going_back=True)
    if worker.is_first:
        skipped = samples - position.samples
        say(f"the gradient of step {step} is not finite: back to step {position.step}, {skipped} samples are left out")
    position.samples = samples
    training.set_batch_sizes(position.batch)
    # The steps that were taken back are not repeated.
    training.check.recorder.losses.begin(snapshots.folder, worker)
    _restart_from_here(training)


def repeat_step(training: Training, verdict: ExactnessVerdict) -> bool:
    """Go back to the snapshot of a resume, to compute the first step after it once more; collective.

    Returns:
        False if the snapshot is gone.
    """
    point = training.snapshots.find_newest()
    if point.path is None or point.step != verdict.step:
        return False
    training.check.recorder.recheck_step(verdict)
    training.engine.passed, training.transaction.is_torn = None, True
    restore_training(training, point, going_back=True)
    _restart_from_here(training)
    return True


def _restart_from_here(training: Training) -> None:
    """Count steps from the position that was restored."""
    training.transaction.is_torn = False
    assert training.agreement is not None  # noqa: S101  # for the type checker
    training.agreement.restart(training.position.step)
    training.report.rewind(training.position.step)
