"""The training loop, top to bottom: read `Trainer.run` first.

    with start(seed=config.seed) as worker:
        trainer = Trainer(config, worker, model, loss, data)
        outcome = trainer.run()

`loss(model, batch)` returns the mean over the samples of a batch, or a sum and its weight. The loop uses
nothing else of the model, so models need no changes. The parts of the loop are in training.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dtctl.errors import WorkerFailed
from dtctl.runtime import diagnose, restore
from dtctl.runtime.automatic import TrainingInputs
from dtctl.runtime.console import say, write_error_to_stderr
from dtctl.runtime.data_loading import datasets
from dtctl.runtime.distributed.agreement import DecisionExchange
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.evaluation import Evaluation, Score
from dtctl.runtime.exactness.resume_check import has_time_to_record
from dtctl.runtime.guards import other_optimizers
from dtctl.runtime.hooks import Hook, TrainingView
from dtctl.runtime.live import recovery
from dtctl.runtime.moe import balance
from dtctl.runtime.step import Loss, StepResult
from dtctl.runtime.stop import Outcome, StopRequest
from dtctl.runtime.telemetry.profile import Profiler, keep_buffers
from dtctl.runtime.training import Training, build_training
from dtctl.train.config import TrainConfig

Data = datasets.MapDataset | datasets.BatchDataset | datasets.SampleStream | DataLoader[Any] | IterableDataset[Any]


class Trainer:
    """Trainer of a model on all workers, from the newest snapshot, or the first step, to the last step.

    Attributes:
        training: parts of the run on this worker.
    """

    def __init__(
        self,
        config: TrainConfig,
        worker: Worker,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        samples: Data,
        *,
        validation: datasets.MapDataset | datasets.BatchDataset | DataLoader[Any] | None = None,
        score: Score | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        rate: Callable[[int], float] | None = None,
        extra_state: Mapping[str, Any] | None = None,
        hooks: Sequence[Hook] = (),
        tensorboard: Path | None = None,
    ) -> None:
        """Build all parts of the run; `run` trains.

        Args:
            config: settings of the run.
            worker: this worker.
            model: any module, or a function that makes it; the same on all workers. Given a function, fsdp and hsdp
                train models that are too large for one worker (strategies/deferred_init.py).
            loss: mean loss of a batch, or a sum over its tokens and their number.
            samples: data to train on, the same on all workers: a data set, or a DataLoader of all samples, which the
                Trainer divides (data_loading/loaders.py). If the data set has an attribute `tokens_per_sample`, metrics
                include `tokens_per_s`.
            validation: data of the evaluations, every `eval_every` steps and at the end; needs `score`.
            score: returns values per sample, whose means are logged as `val_NAME`.
            optimizer: makes the optimizer. None: the one that the configuration names. Snapshots hold all of its state,
                the counters in `param_groups` included.
            rate: returns the learning rate of a step, counted from 0; groups keep their ratio to `lr`. None: the
                schedule that the configuration names.
            extra_state: further objects with a state, by name: objects with `state_dict` and `load_state_dict` (a
                module, an optimizer, a scheduler), or random generators of torch, NumPy or Python. Every snapshot holds
                their state, for each worker its own if the states differ, and a resume restores it.
            hooks: objects whose methods are called on every worker after steps, evaluations and snapshots; see `Hook`.
            tensorboard: folder for TensorBoard's event files, if `train.tensorboard` names none. None: no event files.

        Raises:
            PlanError: the configuration does not fit these workers or this data, or the workers differ.
            SpecError: the configuration requests a feature that this version does not have.
        """
        self.training = build_training(
            config,
            worker,
            TrainingInputs(model=model, loss=loss, samples=samples),
            optimizer=optimizer,
            rate=rate,
            extra_state=extra_state or {},
            hooks=hooks,
            board=tensorboard,
        )
        self._config, self._worker = self.training.settings.config, worker
        self._evaluation = Evaluation(self._config, validation, score)
        self._profiler = Profiler(self._config.profile, worker)
        self._others: other_optimizers.OtherOptimizers | None = None

    @property
    def model(self) -> nn.Module:
        """Return the user's model, or this worker's part of it, on the worker's device and not wrapped."""
        return self.training.trained.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.training.trained.optimizer

    @property
    def step(self) -> int:
        """Return the number of optimizer steps done."""
        return self.training.position.step

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of the whole run."""
        return self.training.position.steps

    def run(self) -> Outcome:
        """Train until all steps are done or a signal requests a stop; in both cases the last step has a snapshot.

        After a stop the next attempt resumes from that snapshot. The model may have taken two more steps, which the
        next attempt repeats to check that it continues with the same bits.

        Raises:
            SnapshotError: a snapshot does not fit this model, or cannot be written.
        """
        training = self.training
        training.account  # noqa: B018  # taken before anything trains
        training.snapshots.open()
        try:
            return self._run_training()
        finally:
            training.check.recorder.losses.close(remove=self.step == self.steps)
            if self._others is not None:  # torch would keep a reference to this object, and so to the model
                self._others.stop()
                self._others = None
            training.snapshots.close()

    def _run_training(self) -> Outcome:
        training, position, report = self.training, self.training.position, self.training.report
        if self._config.profile.communication:  # before the state is restored, since the measurement runs passes
            _measure_communication(training)
        recovery.listen_for_lost_peers(training)
        if self._worker.is_replacement:
            recovery.join_as_replacement(training)
        else:
            restore.resume_training(training)
        recovery.record_buffers_checksum(training)
        if training.frozen is not None:
            training.frozen.record()
        position.began_at = position.step
        kept = position.step - training.transaction.is_owed
        if self._worker.backend is not None and kept < max(other_optimizers.STEPS):
            self._others = other_optimizers.OtherOptimizers(
                training.trained.optimizer, training.trained.model, training.engine.loss
            )
        outcome, error = Outcome.FINISHED, None
        listening = StopRequest().handling_stop_signals()
        profiling, reading = self._profiler.handling_profile_signal(), training.engine.feed.running()
        reporting = report.open(position.step, position.steps, kept=kept, hold=training.check.is_held)
        with listening as asked, profiling, reading, reporting, training.snapshots.saver:
            while True:
                training.agreement = DecisionExchange(self._worker, step=position.step)
                try:
                    outcome = self._run_remaining_steps(asked)
                    report.end_steps()
                    training.agreement.close()
                    recovery.wait_for_all_workers(training)
                    break
                except Exception as exc:  # noqa: BLE001  # what a lost peer looks like depends on where it is noticed
                    error = exc
                # Called outside of the handler: its exception would keep the activations of the failed passes alive.
                if not recovery.recover_from_lost_peer(training, error):
                    raise error
            saved = (
                "without a snapshot: the resume was not confirmed to be exact yet"
                if training.check.is_held
                else "with a snapshot"
            )
            if outcome is Outcome.STOPPED:
                self._step_ahead()
        if self._worker.is_first and outcome is Outcome.STOPPED:
            say(f"stopped after step {position.step} of {position.steps}, {saved}")
        return outcome

    def _run_remaining_steps(self, asked: StopRequest) -> Outcome:
        """Take one step after another, until the end or until all workers agree to stop."""
        position, transaction = self.training.position, self.training.transaction
        while transaction.is_owed or position.step < position.steps:
            if not transaction.is_owed and not self._run_optimizer_step():
                continue
            stop = self._finish_step(asked)
            transaction.is_owed = False
            if stop and position.step < position.steps:
                return asked.build_stop_outcome()
        return Outcome.FINISHED

    def _run_optimizer_step(self) -> bool:
        """Make one optimizer step; return False if the run went back to a snapshot instead.

        The state changes only at the end of the step.
        """
        training = self.training
        engine, position, recorder, transaction = (
            training.engine, training.position, training.check.recorder, training.transaction
        )  # fmt: skip
        recovery.keep_small_state(training)
        number = position.step + 1
        training.draws.begin(position.step)
        self._profiler.begin_profile_step(number)
        lr = training.trained.rate.set(position.step)
        loss = engine.compute_gradients(position)
        if training.settings.is_elastic and position.step == position.began_at:
            training.account.require_elastic()
        engine.guard.record_step_loss(number, loss)
        is_logged = (
            number == position.steps
            or self._evaluation.is_due(number, position.steps)
            or number % self._config.log_every == 0
        )
        engine.unscale_gradients()
        recorder.losses.record_loss(number, loss)
        if recorder.is_wanted(number):
            recorder.take_gradient(number, loss)
        norm = engine.clip_gradients(is_wanted=is_logged)
        verdict = engine.guard.decide_step_action(number, norm, wanted=is_logged or engine.guard.must_check_step)
        if verdict == "rollback":
            restore.roll_back_training(training)
            return False
        is_taken = verdict == "take"
        counts = engine.balance.counts(taken=is_taken, logged=is_logged) if engine.balance is not None else []
        has_line = is_logged or not is_taken
        mean = training.report.mean(loss) if has_line and self._worker.live is not None else None
        use = balance.compute_expert_use(counts) if is_logged else {}
        result = StepResult(loss, lr, norm, use, mean, is_taken=is_taken, is_logged=is_logged)
        transaction.ready = partial(self._take_step, result, counts, is_taken=is_taken)
        # This is the last exchange of a step, and no state changes before it. If any worker has completed it, all
        # workers have entered it with everything that the step needs except its result. So they can take the step even
        # if one of them is lost during the exchange.
        present = engine.strategy.present
        transaction.ready(present.find_unused_numbers() if present is not None else ())
        return True

    def _take_step(self, result: StepResult, counts: balance.Counts, unused: Sequence[int], *, is_taken: bool) -> None:
        """Change the state by the results that all workers have exchanged; local.

        Args:
            result: result of the passes.
            counts: numbers of tokens that each expert was sent; empty unless the step needs them.
            unused: numbers of the parameters of which no worker has a gradient.
            is_taken: True if the optimizer makes its step.
        """
        training = self.training
        engine, position, recorder, transaction = (
            training.engine, training.position, training.check.recorder, training.transaction
        )  # fmt: skip
        transaction.ready, transaction.is_torn = None, True
        if engine.strategy.present is not None:
            engine.strategy.present.drop_unused(unused)
        if is_taken:
            if engine.balance is not None:
                engine.balance.update_biases(counts)
            if self._others is None:
                engine.update_parameters(position.step)
            else:
                with self._others.ignoring_optimizer_steps():
                    engine.update_parameters(position.step)
        else:
            engine.strategy.discard()
        position.advance()
        if training.trained.ema is not None:
            training.trained.ema.update(position.step)
        if recorder.is_wanted(position.step):
            recorder.take_update(position.step)
        transaction.newest, transaction.unused, transaction.is_owed = result, unused, True
        transaction.is_torn = False

    def _finish_step(self, asked: StopRequest) -> bool:
        """Evaluate, log and save as far as it is due after a step; return True if all workers stop.

        The call may be repeated for the same step.
        """
        training, position, check = self.training, self.training.position, self.training.check
        agreement, newest = training.agreement, training.transaction.newest
        assert agreement is not None and newest is not None  # noqa: S101, PT018  # for the type checker
        step = position.step
        training.report.step(step)
        self._profiler.end_profile_step(step, last=step == position.steps)
        if check.recorder.is_wanted(step):
            verdict = check.recorder.exchange(step)
            if verdict is not None and verdict.is_open and restore.repeat_step(training, verdict):
                return False
            check.conclude(verdict)
        if self._others is not None:
            self._others.require_equal(step, self._worker)
        scores = _evaluate_and_call_hooks(training, self._evaluation)
        last = step == position.steps
        if newest.is_logged or last or not newest.is_taken:
            figures = _collect_figures(training, newest)
            training.report.log(step, newest.loss, newest.lr, newest.norm, position.batch, scores, figures, newest.mean)
        snapshots = training.snapshots
        best = bool(scores) and snapshots.best is not None and snapshots.best.record_scores(step, scores)
        decision = agreement.exchange_wishes(
            step, stop=asked.signal is not None, save=self._worker.is_first and snapshots.is_time()
        )
        if check.is_held:
            return decision.stop
        if last or best or decision.stop or decision.save or snapshots.is_due(step):
            self.save(needed=last or best or decision.stop)
            if training.hooks:
                training.hooks.call_snapshot_hooks(_build_view(training))
        elif snapshots.in_memory is not None and snapshots.in_memory.is_due(step):
            training.save_in_memory(snapshots.in_memory)
        return decision.stop

    def _step_ahead(self) -> None:
        """Take the next steps for their record alone: this process ends, and the next attempt repeats them.

        A failure in these steps has no consequence. The steps are only taken if they probably need a small part of the
        grace period, since the launcher kills this worker after it.
        """
        training, position, recorder = self.training, self.training.position, self.training.check.recorder
        step_s, stopped_at = training.report.progress.slowest_s, (position.step, position.samples)
        try:
            if not recorder.is_recording or not has_time_to_record(step_s, self._worker):
                return
            while (
                position.step < position.steps and recorder.is_wanted(position.step + 1) and self._run_optimizer_step()
            ):
                recorder.exchange(position.step)
                if training.hooks:
                    training.hooks.repeat_step_hooks(_build_view(training))
                    # A hook may change the rate by the scores of an evaluation, and there is none here.
                    if self._evaluation.is_due(position.step, position.steps):
                        break
        except Exception as exc:  # noqa: BLE001  # a peer that is gone, data that end: the snapshot is there
            write_error_to_stderr(
                WorkerFailed(f"step {position.step + 1} could not be recorded for the next attempt: {exc}")
            )
        position.step, position.samples = stopped_at

    def evaluate(self) -> dict[str, float]:
        """Return the means of the scores over the validation set as `val_NAME`; collective over all workers.

        Raises:
            PlanError: the Trainer was given no validation set or no score.
        """
        return self._evaluation.run(self.training)

    def save(self, *, needed: bool = True) -> None:
        """Begin a snapshot of this step; collective. All workers write it while they train (snapshot_saver.py).

        Args:
            needed: True if the snapshot must not be skipped, even if another one is still being written.
        """
        self.training.save(needed=needed)

    def full_weights(self) -> dict[str, Any]:
        """Return the whole model's state on rank 0, with any strategy; empty elsewhere.

        Collective over all workers.
        """
        return self.training.state.full_weights()


def _measure_communication(training: Training) -> None:
    """Print the share of a step that the exchange of gradients takes; collective. The model stays as it was."""
    engine, pairs = training.engine, training.settings.config.profile.communication
    with keep_buffers(training.trained.model):
        passes = partial(engine.compute_gradients, training.position)
        cost = diagnose.measure_gradient_exchange(passes, engine.strategy.module, pairs=pairs)
    if training.settings.worker.is_first:
        say(cost.describe())


def _collect_figures(training: Training, newest: StepResult) -> dict[str, float]:
    """Return figures of the newest step for metrics alone, by name."""
    figures, verdict = dict(newest.use), training.check.verdict
    if not newest.is_taken:
        figures["skipped"] = 1.0
    if training.trained.loss_scale is not None:
        figures["loss_scale"] = training.trained.loss_scale.scale
    if verdict is not None and verdict.verdict != "not-confirmed":
        figures["resume_exact"] = float(verdict.verdict == "exact")
    return figures


def _build_view(training: Training) -> TrainingView:
    """Return what hooks see of a training."""
    position, trained = training.position, training.trained
    return TrainingView(
        position.step,
        position.steps,
        trained.model,
        trained.optimizer,
        loss_scale=None if trained.loss_scale is None else trained.loss_scale.scale,
        skipped_steps=training.engine.guard.skipped,
        verdict=training.check.verdict,
    )


def _evaluate_and_call_hooks(training: Training, evaluation: Evaluation) -> dict[str, float]:
    """Return the scores of the evaluation that is due after a step, and call the hooks; collective.

    Returns:
        Scores as `val_NAME`; empty if no evaluation is due.
    """
    position, hooks = training.position, training.hooks
    is_due = evaluation.is_due(position.step, position.steps)
    if not hooks:
        return evaluation.run(training) if is_due else {}
    view = _build_view(training)
    hooks.call_step_hooks(view, is_held=training.check.is_held)
    scores = evaluation.run(training) if is_due else {}
    if scores:
        hooks.call_evaluation_hooks(view, scores)
        training.trained.rate.factor *= view.rate_factor
        if view.is_stopped:
            position.end()
    return scores
