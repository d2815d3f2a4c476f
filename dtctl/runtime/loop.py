"""The training loop, top to bottom: read `Trainer.run` first.

    with start(seed=config.seed) as worker:
        trainer = Trainer(config, worker, model, loss, data)
        outcome = trainer.run()

`loss(model, batch)` returns the mean over the samples of a batch, or a sum and its weight. It is all that the loop
knows of the model, so that models stay unmodified.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dtctl import names
from dtctl.errors import PlanError, SnapshotError, WorkerFailed
from dtctl.runtime import blocks, diagnose, kernels, optim, resume, snapshot_saver
from dtctl.runtime.automatic import Subject, settle
from dtctl.runtime.batch_norm import describe_batch_norm
from dtctl.runtime.best import Best
from dtctl.runtime.console import complain, say
from dtctl.runtime.data_loading import datasets
from dtctl.runtime.data_loading.feed import Feed
from dtctl.runtime.data_loading.order import InSequence, Order, Schedule
from dtctl.runtime.data_loading.reading import Reader
from dtctl.runtime.data_loading.shares import of_replicas
from dtctl.runtime.distributed.agreement import Agreement
from dtctl.runtime.distributed.device_mesh import limit_groups
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.ema import Ema
from dtctl.runtime.evaluation import Score, evaluate
from dtctl.runtime.exactness import account, circumstances, randomness
from dtctl.runtime.exactness.record import STEPS, StepRecorder, read_record
from dtctl.runtime.exactness.verdict import Verdict
from dtctl.runtime.guards import other_optimizers
from dtctl.runtime.guards.consistency import fingerprint, require_equal, settings
from dtctl.runtime.guards.nonfinite import NonFiniteGuard
from dtctl.runtime.guards.oom import MemoryWatch, enough_memory, raise_lack_of_memory, smaller
from dtctl.runtime.guards.origin import spoilt
from dtctl.runtime.hooks import Hook, Hooks, TrainingView
from dtctl.runtime.live import recovery
from dtctl.runtime.memory_snapshots import MemorySnapshots
from dtctl.runtime.moe import balance
from dtctl.runtime.precision import LossScale, autocast, multiply
from dtctl.runtime.snapshot import state_sum
from dtctl.runtime.snapshot.format.pieces import find_buffers
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.state import configured
from dtctl.runtime.step import Loss, Passes, Step, StepResult
from dtctl.runtime.stop import Outcome, StopRequest
from dtctl.runtime.strategies import Lasting, Strategy, choose, deferred_init
from dtctl.runtime.strategies.frozen import Frozen
from dtctl.runtime.strategies.single import Single
from dtctl.runtime.telemetry.profile import Profiler, kept_buffers
from dtctl.runtime.telemetry.report import Report
from dtctl.runtime.token_weighting import correction
from dtctl.runtime.training_state import TrainingState
from dtctl.train.batch import Batch, batch, length
from dtctl.train.config import DEFAULT_SNAPSHOT_S, TrainConfig
from dtctl.train.mesh import Coordinate

Data = datasets.Samples | datasets.Batches | datasets.SampleStream


AHEAD: Final = 0.3
"""Share of the grace that the steps after an agreed stop may take."""


class Trainer:
    """A training from its newest snapshot, or its beginning, to its end.

    Attributes:
        model: the user's model, on the worker's device, not wrapped; a part of it, if the strategy divides it.
        place: where this worker stands in the mesh.
        parameters: those that are trained, as this worker has them.
        step: optimizer steps done.
        steps: length of the training.
        position: samples consumed, over all workers and attempts.
        began_at: step that this attempt began after.
        newest: what the newest step has shown; None before the first one.
        unused: numbers of the parameters that no worker had a gradient of in the newest step.
        ready: takes the step under way, given what `unused` is to be; None unless nothing else is missing.
        is_torn: whether a change of the state has begun and not ended.
        is_ended: whether a hook has ended it before its last step.
        is_owed: whether what is due after the newest step has not been done yet.
    """

    def __init__(
        self,
        config: TrainConfig,
        worker: Worker,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        samples: Data,
        *,
        validation: datasets.Samples | datasets.Batches | None = None,
        score: Score | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        rate: Callable[[int], float] | None = None,
        extra_state: Mapping[str, Any] | None = None,
        hooks: Sequence[Hook] = (),
        tensorboard: Path | None = None,
    ) -> None:
        """Put the parts together; nothing is trained yet.

        Args:
            config: how to train.
            worker: this worker.
            model: any module, or a function that makes it; the same on all workers. Given a function, fsdp and hsdp
                train models that are too large for one worker (strategies/deferred_init.py).
            loss: mean loss of a batch, or a sum over its tokens and their number.
            samples: what to train on; the same on all workers. With an attribute `tokens_per_sample`, metrics have
                `tokens_per_s`.
            validation: what to evaluate on, every `eval_every` steps and at the end; needs `score`.
            score: values per sample whose means are logged as `val_NAME`.
            optimizer: makes the optimizer. None: the one that the configuration names. All of its state is in
                snapshots, what it counts in `param_groups` too.
            rate: the learning rate of each step, from 0; groups keep their ratio to `lr`. None: the schedule that the
                configuration names.
            extra_state: further objects with a state of the training, by name: objects with `state_dict` and
                `load_state_dict` (a module, an optimizer, a scheduler), or random generators of torch, NumPy or
                Python. Every snapshot has it, for each worker its own if they differ, and a resume restores it.
            hooks: called on every worker after steps, evaluations and snapshots; see `Hook`.
            tensorboard: folder for TensorBoard's event files, if `train.tensorboard` names none. None: none is
                written.

        Raises:
            PlanError: the configuration does not fit these workers or this data, or the workers differ.
            SpecError: the configuration asks for what this version does not have.
        """
        self._settle(config, worker, Subject(model=model, loss=loss, samples=samples))
        self._build(model, samples, tensorboard)
        self._optimize(optimizer, rate)
        self._watch()
        self._order(samples)
        self.hooks = Hooks(hooks, worker)
        self._keep({**(extra_state or {}), **self.hooks.list_stateful()})
        self.validation, self.score = validation, score
        self.profiler = Profiler(self.config.profile, worker)
        self.step = self.position = self.began_at = 0
        self.newest: StepResult | None = None
        self.unused: Sequence[int] = ()
        self.passed: Step | None = None
        """The passes of the newest step, with live recovery."""
        self.ready: Callable[[Sequence[int]], None] | None = None
        self.is_torn = self.is_owed = self.is_ended = False
        self.agreement: Agreement | None = None
        self.constants: int | None = None
        self.scale_before: Mapping[str, Any] = {}
        self._account: account.Account | None = None
        self.recorder = StepRecorder(worker, self.model, self.optimizer)
        self.others: other_optimizers.OtherOptimizers | None = None

    def _settle(self, config: TrainConfig, worker: Worker, subject: Subject) -> None:
        """Settle everything that all workers have to agree on: configuration, mesh, batch and length; collective."""
        require_equal(settings(config), worker)
        kernels.choose(config, worker.device.type)
        self.folder = snapshot_saver.folder(config.snapshot, os.environ)
        self.settled = settle(config, worker, subject, self.folder)
        self.config, self.worker = self.settled.config, worker
        self.loss: Loss = subject.loss
        self.elastic = self.config.exact == "elastic"
        self.place = Coordinate(degrees=self.settled.degrees, rank=worker.rank)
        degrees = self.place.degrees
        shares = of_replicas(self.settled.shares, degrees)
        self.batch = self.asked = batch(self.config, degrees.data, stages=degrees.pp, shares=shares)
        self.samples = datasets.size(subject.samples)
        self.steps, self.end = length(self.config, samples=self.samples, batch=self.batch)

    def _build(self, model: nn.Module | Callable[[], nn.Module], samples: Data, board: Path | None) -> None:
        """The model as this worker trains it, what feeds it, and what reports on it; collective."""
        config, worker, degrees = self.config, self.worker, self.place.degrees
        self.model = deferred_init.build(model, worker, degrees)
        kernels.lay_out(self.model, config, degrees)
        require_equal(fingerprint(self.model, degrees, samples=self.samples, steps=self.steps), worker)
        blocks.prepare(self.model, config)
        self.feed = Feed(Reader(samples, config.seed), config, worker.device)
        tokens = getattr(samples, "tokens_per_sample", None)
        self.report = Report(config, worker, self.model, tokens_per_sample=tokens, board=board)
        mixtures = balance.counted(self.model)
        self.strategy = self._spread()
        self.balance = balance.Balance(mixtures, self.model, worker, self.place) if mixtures else None

    def _spread(self) -> Strategy:
        """Return the model over the workers; collective."""
        with self.worker.making_groups():
            return choose(self.config, self.worker, self.place.degrees, self.batch, self.model, self._probe)

    def _optimize(
        self, optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None, rate: Callable[[int], float] | None
    ) -> None:
        """The optimizer, its learning rate, and number formats."""
        config = self.config
        self.optimizer = optimizer(self.model) if optimizer else optim.optimizer(config, self.model)
        self._take_parameters(rate)
        self.autocast = autocast(config.precision, self.worker.device)
        self.loss_scale = LossScale() if config.precision == "fp16" else None

    def _take_parameters(self, rate: Callable[[int], float] | None) -> None:
        """Take the parameters of the optimizer before the first training step; collective."""
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.strategy.prepare(self.optimizer)
        self.rate = optim.LearningRate(self.config, self.optimizer, self.steps, own=rate)
        self.configured = configured(self.optimizer)
        self.ema = Ema(self.model, self.config.ema) if self.config.ema else None

    def _watch(self) -> None:
        """Watch the passes: gradients that are not finite, thawed parameters, and memory that runs out."""
        config, worker = self.config, self.worker
        blame = partial(spoilt, self.model, self.optimizer.param_groups)
        self.guard = NonFiniteGuard(config.on_nan, self.loss_scale, worker, blame)
        self._watch_strategy()
        self.passes = Passes(
            loss=self.loss,
            feed=self.feed,
            worker=worker,
            autocast=self.autocast,
            loss_scale=self.loss_scale,
            clock=self.report.progress,
            mark=self.report.clock.mark,
            poison=self._poison,
            load=self.balance.load if self.balance is not None else None,
        )

    def _watch_strategy(self) -> None:
        """Watch the model as the strategy has wrapped it."""
        exchanging = self.worker.backend is not None and not self.elastic
        self.frozen = Frozen(self.model, self.strategy.name) if exchanging else None
        halve = self.config.on_oom == "halve" and not self.elastic
        self.memory = MemoryWatch(self.strategy.module, self.parameters, self.worker, wanted=halve)

    def _poison(self, loss: torch.Tensor) -> torch.Tensor:
        return self.memory.poison(loss)

    def let_go(self) -> None:
        """Unwrap the model, before the process group is left."""
        self.strategy.release()
        if not isinstance(self.strategy, Lasting):
            self.strategy = Single(self.model)
        self._watch_strategy()
        if self.agreement is not None:
            self.agreement.forget()
        if self.ready is None:
            self._drop_gradients()

    def conclude(self, unused: Sequence[int] | None) -> None:
        """Take the interrupted step if this worker was ready for it and another worker has taken it; else discard it.

        Args:
            unused: the unused parameters, from the workers that have taken the step; None if none has.
        """
        if self.ready is not None and unused is not None:
            self.ready(unused)
        self.ready = None
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:  # as `zero_grad` does it, which spends 15 us on being profiled
            parameter.grad = None

    def spread_again(self) -> None:
        """Spread the model over a new process group, as at the start of an attempt; collective."""
        if isinstance(self.strategy, Lasting):
            with self.worker.making_groups():
                self.strategy.rejoin(self.worker, self.place.degrees)
            limit_groups(self.config.timeout_s)
        else:
            whole = dict(self.model.named_parameters())
            self.strategy = self._spread()
            if isinstance(self.strategy, Lasting):
                optim.exchange(self.optimizer, whole, dict(self.model.named_parameters()))
                self._take_parameters(self.rate.own)
                self._account = self._take_account(replace(self.worker, backend=None))
            else:
                self.strategy.prepare(self.optimizer)
        self._watch_strategy()
        self._conclude_resume(self.recorder.forget(f"a worker was replaced in step {self.step + 1}"))
        losses, self.recorder = self.recorder.losses, StepRecorder(self.worker, self.model, self.optimizer)
        self.recorder.losses = losses
        if snapshot_saver.is_in_pieces(self.config.snapshot, sharded_state=self.strategy.sharded_state):
            self._write_together()
        self.account.program.load(self._warm_up())

    def _order(self, samples: Data) -> None:
        """Set the samples and the random numbers of each step."""
        is_stream = isinstance(samples, datasets.SampleStream)
        self.draws = randomness.StepStream(self.config.seed, self.place.stream, self.worker.device)
        self.order = InSequence() if is_stream else Order(self.samples, self.config.seed)
        self.schedule = Schedule(self.order, self.batch, rank=self.place.data, end=self.end)

    def _keep(self, extra_state: Mapping[str, Any]) -> None:
        """Make the writers of snapshots, with their schedule and the state besides the model; collective."""
        config, worker = self.config, self.worker
        self.best = Best(config.best, keep=config.snapshot.keep_best) if config.best else None
        with worker.making_groups():
            self.saver: Saver = self._saver()
        memory = config.snapshot.memory
        self.in_memory = MemorySnapshots(memory, worker, self.model) if memory is not None else None
        self.every_s = config.snapshot.every_s
        if self.every_s is None and config.snapshot.every_steps is None:
            self.every_s = DEFAULT_SNAPSHOT_S
        self.saved_s = time.monotonic()
        self.extra_state = dict(extra_state)
        account.require_stateful(self.extra_state)
        self.circumstances = circumstances.settings(config, worker, self.batch, samples=self.samples, steps=self.steps)
        self.circumstances |= {} if self.elastic else {"mesh": str(self.place.degrees)}

    def _saver(self) -> Saver:
        return snapshot_saver.saver(
            self.config.snapshot, self.folder, self.worker, self.model, progress=self.report.progress,
            sharded_state=self.strategy.sharded_state,
        )  # fmt: skip

    def _write_together(self) -> None:
        """Make the snapshot saver again, if all workers write snapshots; collective."""
        with self.worker.making_groups():
            if self.saver.collective:
                self.saver.rejoin()
            else:  # on a new worker, whose saver was alone so far
                self.saver.close()
                self.saver = self._saver()
        snapshot_saver.begin(self.saver, self.worker)

    def run(self) -> Outcome:
        """Train until all steps are done or a signal asks to stop; there is a snapshot of the end in both cases.

        After a stop, that snapshot is what counts: the model may have taken two more steps. The next attempt repeats
        them to check that it continues with the same bits.

        Raises:
            SnapshotError: a snapshot does not fit this model, or cannot be written.
        """
        self.account  # noqa: B018  # taken before anything trains
        snapshot_saver.begin(self.saver, self.worker)
        try:
            return self._train()
        finally:
            self.recorder.losses.close(remove=self.step == self.steps)
            if self.others is not None:  # torch would hold on to it, and so to the model
                self.others.stop()
                self.others = None
            self.saver.close()
            if self.in_memory is not None:
                self.in_memory.close()

    def _train(self) -> Outcome:
        if self.config.profile.communication:  # before the state is restored, since it costs passes
            self._measure_communication()
        recovery.prepare(self)
        if self.worker.replaces:
            recovery.enter(self)
        else:
            self._resume()
        recovery.begin(self)
        self.began_at = self.step
        if self.worker.backend is not None and self.step - self.is_owed < max(other_optimizers.STEPS):
            self.others = other_optimizers.OtherOptimizers(self.optimizer, self.model, self.loss)
        outcome, error = Outcome.FINISHED, None
        listening = StopRequest().listening()
        kept = self.step - self.is_owed
        reporting = self.report.open(self.step, self.steps, kept=kept, hold=self._is_held)
        with listening as asked, self.profiler.listening(), self.feed.running(), reporting, self.saver:
            while True:
                self.agreement = Agreement(self.worker, step=self.step)
                try:
                    outcome = self._steps(asked)
                    self.report.through()
                    self.agreement.close()
                    recovery.end(self)
                    break
                except Exception as exc:  # noqa: BLE001  # what a lost peer looks like depends on where it is noticed
                    error = exc
                # Not in the handler, which would hold on to the passes that are to be repeated.
                if not recovery.heal(self, error):
                    raise error
            saved = (
                "without a snapshot, before it was known whether it is exact" if self._is_held else "with a snapshot"
            )
            if outcome is Outcome.STOPPED:
                self._step_ahead()
        if self.worker.is_first and outcome is Outcome.STOPPED:
            say(f"stopped after step {self.step} of {self.steps}, {saved}")
        return outcome

    def _steps(self, asked: StopRequest) -> Outcome:
        """Step after step, to the end or until all agree to stop."""
        while self.is_owed or self.step < self.steps:
            if not self.is_owed and not self._advance():
                continue
            stop = self._attend(asked)
            self.is_owed = False
            if stop and self.step < self.steps:
                return asked.granted()
        return Outcome.FINISHED

    def _step_ahead(self) -> None:
        """Take the next steps for their record alone: this process ends, and the next attempt repeats them.

        Whatever happens in them has no consequence. They are taken if they can be expected to take a small part of the
        grace: the launcher waits for this worker no longer than that.
        """
        step_s, stopped_at = self.report.progress.slowest_s, (self.step, self.position)
        limit_s = AHEAD * float(os.environ.get(names.GRACE_S, "10"))
        try:
            if not self.recorder.is_recording or max(gathered_json(step_s, self.worker)) * STEPS > limit_s:
                return
            while self.step < self.steps and self.recorder.is_wanted(self.step + 1) and self._advance():
                self.recorder.exchange(self.step)
        except Exception as exc:  # noqa: BLE001  # a peer that is gone, data that end: the snapshot is there
            complain(WorkerFailed(f"step {self.step + 1} could not be recorded for the next attempt: {exc}"))
        self.step, self.position = stopped_at

    def _advance(self) -> bool:
        """Return one optimizer step; False if it went back to a snapshot instead.

        Until the end the state is that before.
        """
        recovery.before_step(self)
        number = self.step + 1
        self.draws.begin(self.step)
        self.profiler.before(number)
        lr = self.rate.set(self.step)
        loss = self.backward()
        self.guard.note(number, loss)
        is_logged = self._is_logged(number)
        self._unscale()
        self.recorder.losses.note(number, loss)
        if self.recorder.is_wanted(number):
            self.recorder.take_gradient(number, loss)
        norm = self._clip(is_logged)
        verdict = self.guard.judge(number, norm, wanted=is_logged or self.guard.always)
        if verdict == "rollback":
            self._go_back()
            assert self.agreement is not None  # noqa: S101  # for the type checker
            self.agreement.restart(self.step)
            self.report.rewind(self.step)
            return False
        is_taken = verdict == "take"
        counts = self.balance.counts(taken=is_taken, logged=is_logged) if self.balance is not None else []
        is_told = is_logged or not is_taken
        mean = self.report.mean(loss) if is_told and self.worker.live is not None else None
        use = balance.use(counts) if is_logged else {}
        result = StepResult(loss, lr, norm, use, mean, is_taken=is_taken, is_logged=is_logged)
        self.ready = partial(self._take_step, result, counts, is_taken=is_taken)
        # The last exchange of a step, and nothing of the state is changed before: if any worker has come through, all
        # have entered it with all they need but its result, and can take the step even if one of them is lost in it.
        self.ready(self.strategy.present.agree() if self.strategy.present is not None else ())
        return True

    def _take_step(self, result: StepResult, counts: balance.Counts, unused: Sequence[int], *, is_taken: bool) -> None:
        """Change the state by what all have exchanged; local.

        Args:
            result: what the step has shown.
            counts: what experts were sent; empty unless it matters.
            unused: numbers of the parameters that no worker has a gradient of.
            is_taken: whether the optimizer makes its step.
        """
        self.ready, self.is_torn = None, True
        if self.strategy.present is not None:
            self.strategy.present.take_away(unused)
        if is_taken:
            if self.balance is not None:
                self.balance.move(counts)
            self._update()
        else:
            self.strategy.discard()
        self.position += self.schedule.samples(self.position)
        self.step += 1
        if self.ema is not None:
            self.ema.update(self.step)
        if self.recorder.is_wanted(self.step):
            self.recorder.take_update(self.step)
        self.newest, self.unused, self.is_owed = result, unused, True
        self.is_torn = False

    def _attend(self, asked: StopRequest) -> bool:
        """Return what is due after a step: evaluation, a line of metrics, a snapshot; whether all stop.

        May be repeated.
        """
        agreement, newest = self.agreement, self.newest
        assert agreement is not None and newest is not None  # noqa: S101, PT018  # for the type checker
        self.report.step(self.step)
        self.profiler.after(self.step, last=self.step == self.steps)
        if self.recorder.is_wanted(self.step):
            verdict = self.recorder.exchange(self.step)
            if verdict is not None and verdict.is_open and self._compute_again(verdict):
                return False
            self._conclude_resume(verdict)
        if self.others is not None:
            self.others.require_equal(self.step, self.worker)
        view = TrainingView(self.step, self.steps, self.model, self.optimizer) if self.hooks else None
        if view is not None:
            self.hooks.call("after_step", view, is_held=self._is_held)
        scores = self.evaluate() if self._is_evaluated(self.step) else {}
        if scores and view is not None:
            self.hooks.decide(view, scores)
            self.rate.factor *= view.rate_factor
            self.is_ended = view.is_stopped
        if self.is_ended:
            self.steps = self.step
        last = self.step == self.steps
        if newest.is_logged or last or not newest.is_taken:
            use = newest.use if newest.is_taken else {**newest.use, "skipped": 1.0}
            self.report.log(self.step, newest.loss, newest.lr, newest.norm, self.batch, scores, use, newest.mean)
        best = bool(scores) and self.best is not None and self.best.take(self.step, scores)
        save = self.worker.is_first and self._is_time()
        decision = agreement.after(self.step, stop=asked.signal is not None, save=save)
        if self._is_held:
            return decision.stop
        if last or best or decision.stop or decision.save or _due(self.step, self.config.snapshot.every_steps):
            self.save(needed=last or best or decision.stop)
            if view is not None:
                self.hooks.call("after_snapshot", view, is_held=False)
        elif self.in_memory is not None and self.in_memory.is_due(self.step):
            self._save_in_memory(self.in_memory)
        return decision.stop

    def _compute_again(self, verdict: Verdict) -> bool:
        """Go back to the step after the snapshot, to see whether it repeats itself; whether that can be done."""
        point = self._newest_snapshot()
        if point.path is None or point.step != verdict.step:
            return False
        self.recorder.doubt(verdict)
        self.passed, self.is_torn = None, True
        self.restore(point, going_back=True)
        self.is_torn = False
        assert self.agreement is not None  # noqa: S101  # for the type checker
        self.agreement.restart(self.step)
        self.report.rewind(self.step)
        return True

    def _conclude_resume(self, verdict: Verdict | None) -> None:
        """Report the result of the repeated steps, once it is known, and continue or stop.

        Raises:
            SnapshotError: the resume had to be exact, and is not; on every worker.
        """
        if verdict is None:
            return
        if self.worker.is_first:
            self.report.progress.tell_resume(confirmed=verdict.document())
        if verdict.verdict == "not-exact" and self.config.require_exact:
            is_late = verdict.at > verdict.step + STEPS
            kept = (
                f"snapshots after step {verdict.step} are not those of before" if is_late else "nothing was kept since"
            )
            raise SnapshotError(
                f"going on from step {verdict.step} is {verdict.describe()}",
                where=str(self.folder),
                hint=f"undo what differs, or remove `train.require_exact`; {kept}",
            )
        if self.worker.is_first:
            say(verdict.describe())
        self.report.release()
        self.hooks.release()

    @property
    def _is_held(self) -> bool:
        """Return whether nothing may be kept yet, since it is not known whether the resume is exact."""
        return self.config.require_exact and self.recorder.is_pending

    def _is_evaluated(self, step: int) -> bool:
        return self.validation is not None and (step == self.steps or _due(step, self.config.eval_every))

    def _is_logged(self, step: int) -> bool:
        return step == self.steps or self._is_evaluated(step) or _due(step, self.config.log_every)

    def _probe(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of the first samples, the same on all workers; two show what a whole micro batch would."""
        indices = np.arange(min(self.batch.micro, self.samples, 2), dtype=np.int64)
        loss = self.loss(model, datasets.to_device(self.feed.single(indices), self.worker.device))
        return loss[0] if isinstance(loss, tuple) else loss

    def backward(self) -> torch.Tensor:
        """Gradients of the next global batch, in smaller passes if a worker runs out of memory; collective.

        Returns:
            This worker's share of the mean loss, not yet added up over workers.
        """
        before, self.passed = self.passed, None
        while True:
            self._drop_gradients()
            if self.balance is not None:
                self.balance.load.clear()
            if self.strategy.present is not None:
                self.strategy.present.begin()
            step = self._next_step()
            self.passed = step if self.worker.live is not None else None
            loss, short = self.memory.attempt(
                partial(self.strategy.gradients, step), partial(step.spoil, self.strategy.module)
            )
            if loss is not None and not short:
                break
            self.strategy.discard()
            self.use(smaller(self.batch))
            if self.worker.is_first:
                ranks = ", ".join(map(str, short))
                say(f"out of memory on rank {ranks} in step {self.step + 1}: again with {self.batch.describe()}")
        if before is not None and self.passed is not None:
            recovery.require_repeated(before, self.passed, self.worker)
        self.report.times.record_passes(step.own, step.waited_s)
        if self.frozen is not None:
            self.frozen.require(self.step)
        self.strategy.finish()
        if self.elastic and self.step == self.began_at:
            self.account.require_elastic()
        if step.weights:
            copies = self.place.degrees.tp * self.place.degrees.cp
            factor = correction(step.weights, step.samples, self.worker, copies=copies)
            multiply(self.gradients(), factor)
            loss = loss * factor
        return loss

    def _next_step(self) -> Step:
        return Step(
            passes=self.passes,
            number=self.step,
            position=self.position,
            batch=self.batch,
            schedule=self.schedule,
            replicas=self._replicas,
        )

    @property
    def _replicas(self) -> int:
        """Workers over which gradients are averaged; with `exact: elastic` they are added up."""
        return 1 if self.elastic else self.place.degrees.data

    def use(self, sizes: Batch) -> None:
        """Go on from here with these sizes of a batch; by epochs the number of steps follows them."""
        self.batch = sizes
        if self.config.steps is not None:
            self.end = self.position + (self.steps - self.step) * sizes.total
        else:
            self.steps = self.step - (self.position - self.end) // sizes.total
            self.rate.stretch(self.steps)
            self.circumstances["steps"] = self.steps
        self.schedule = Schedule(self.order, sizes, rank=self.place.data, end=self.end)

    def _measure_communication(self) -> None:
        """Say what share of a step is exchange of gradients; collective. Leaves the model as it was."""
        with kept_buffers(self.model):
            pairs = self.config.profile.communication
            cost = diagnose.communication(self.backward, self.strategy.module, pairs=pairs)
        if self.worker.is_first:
            say(cost.describe())

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the parameters that have one."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _unscale(self) -> None:
        """Take the factor out of the gradients that kept them within the range of fp16."""
        if self.loss_scale is not None:
            multiply(self.gradients(), self._replicas / self.loss_scale.scale)

    def _clip(self, is_due: bool) -> torch.Tensor | None:
        """Scale the gradient down if it is too long. Its length before that; None if neither clipping nor wanted."""
        limit = self.config.clip_norm
        if limit is None:
            return self._norm() if is_due or self.guard.always else None
        norm = self._norm()
        if norm.device.type != "cpu" or not norm + 1e-6 <= limit:  # on a GPU a check would have to wait
            self.strategy.clip(limit, norm)
        return norm

    def _norm(self) -> torch.Tensor:
        return self.strategy.norm()

    def _update(self) -> None:
        """Take the optimizer's step."""
        try:
            if self.others is None:
                self.optimizer.step()
            else:
                with self.others.ignoring():
                    self.optimizer.step()
        except RuntimeError as exc:
            hint = (
                "its state takes as much in the first step as later, whatever the batch: divide it with "
                "`strategy: zero1` or `fsdp`, or look at `dtctl advise`"
            )
            raise_lack_of_memory(exc, f"the optimizer's step {self.step + 1}", hint, self.worker)
            raise

    def evaluate(self) -> dict[str, float]:
        """Return the means of the scores over the validation set as `val_NAME`; collective over all workers."""
        if self.validation is None or self.score is None:
            raise PlanError("an evaluation needs both `validation` and `score`", where="Trainer")
        averaged = self.ema is not None and self.config.ema is not None and self.config.ema.evaluate
        drawn = randomness.preserved(self.worker.device, self.config.seed)  # what a score draws is the same each time
        hint = "an evaluation takes `micro_batch` samples at a time: lower it, or let `score` keep less"
        enough = enough_memory(f"the evaluation after step {self.step}", hint, self.worker)
        with enough, drawn, self.report.evaluating(), self.ema.applied() if self.ema and averaged else nullcontext():
            evaluated = evaluate(
                self.strategy.inference,
                self.validation,
                self.score,
                self.worker,
                batch=self.batch.micro,
                autocast=self.autocast,
                place=self.place,
                lockstep=self.strategy.lockstep,
            )
        return {f"val_{name}": value for name, value in evaluated.items()}

    def save(self, *, needed: bool = True) -> None:
        """Begin a snapshot of this step; collective over all workers, which write beside training (snapshot_saver.py).

        Args:
            needed: whether it must not be skipped, should another one be under way.
        """
        with self.report.saving():
            if not self.guard.always:
                self.guard.judge(self.step, self._norm())
            parts, facts = self.state.collect(in_pieces=self.saver.in_pieces)
            if self.worker.is_first or self.saver.collective:
                best = self.best.steps if self.best else ()
                self.saver.save(self.step, parts, facts={**self.counters(), **facts}, best=best, needed=needed)
        self.saved_s = time.monotonic()
        self._record_next_steps(self.saver)

    def _record_next_steps(self, saver: Saver) -> None:
        """Have the bits of the steps after this one recorded, beside the snapshot that was just begun; collective."""
        if self.step < self.steps:
            self.recorder.follow(self.step, saver)

    def _save_in_memory(self, memory: MemorySnapshots) -> None:
        """Begin a snapshot of this step in the memory of the nodes; collective over all workers."""
        began_s = time.perf_counter()
        with self.report.saving():
            if not self.guard.always:
                self.guard.judge(self.step, self._norm())
            parts, facts = self.state.collect(in_pieces=True)
            # How often they are made follows from what they cost, and the sums of steps are a part of it.
            began_s -= self.recorder.take_spent_s()
            memory.save(self.step, parts, {**self.counters(), **facts}, began_s=began_s)
        self._record_next_steps(memory.saver)

    def _newest_snapshot(self) -> resume.ResumePoint:
        """Return the newest good snapshot, in memory or on disk; collective over all workers."""
        return resume.find(self.folder, self.worker, memory=self.in_memory.folder if self.in_memory else None)

    def full_weights(self) -> dict[str, Any]:
        """Return the whole model's state on rank 0, whatever the strategy; empty elsewhere.

        Collective over all workers.
        """
        return self.state.full_weights()

    def counters(self) -> dict[str, Any]:
        """Return what a snapshot keeps of the loop itself; JSON."""
        return {
            "position": self.position,
            "lineage": self.recorder.losses.lineage,
            "circumstances": self.circumstances,
            "batch": resume.sizes(self.asked, self.batch),
            "rate_factor": self.rate.factor,
            "ended": self.is_ended,
            "chosen": self.settled.kept,
            "best": self.best and self.best.state(),
            "loss_scale": self.loss_scale and self.loss_scale.state(),
        }

    def _take_account(self, worker: Worker) -> account.Account:
        subject = account.AccountSubject(
            model=self.model,
            loss=self.loss,
            optimizer=self.optimizer,
            rate=self.rate.own,
            extra_state=self.extra_state,
            apart=[self, self.config, self.config.data, self.config.model],
            feed=self.feed,
            first=np.asarray(self.schedule.positions(0)[0]),
        )
        return account.take(subject, worker, elastic=self.elastic)

    @property
    def account(self) -> account.Account:
        """Fingerprint of this program before its first step; taken on first use, collective over all workers."""
        if self._account is None:
            self._account = self._take_account(self.worker)
        return self._account

    @property
    def state(self) -> TrainingState:
        """Return what snapshots hold beside the counters of the loop."""
        return TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            configured=self.configured,
            strategy=self.strategy,
            ema=self.ema,
            worker=self.worker,
            account=self.account,
            seed=self.config.seed,
            stream=self.place.stream,
            elastic=self.elastic,
        )

    def _is_time(self) -> bool:
        return self.every_s is not None and time.monotonic() - self.saved_s >= self.every_s

    def _resume(self) -> None:
        """Load the newest good snapshot, or begin at step 0; report which on rank 0."""
        point = self._newest_snapshot()
        lineage = point.facts.get("lineage", "")
        self.recorder.losses.begin(self.folder, self.worker, before=lineage, step=point.step)
        lines = [f"snapshot skipped: {reason}" for reason in point.rejected]
        known = self.restore(point) if point.path is not None else None
        lines.append(self.report.introduction(self.strategy.name, self.batch, self.steps))
        lines += describe_batch_norm(self.model, self._replicas)
        verdict = None
        if known is None:
            randomness.begin(self.config.seed, self.place.stream)
            if os.environ.get(names.ATTEMPT, "0") != "0":
                lines.append("there is no snapshot yet: this attempt begins at step 0 again")
        else:
            origin = " from memory" if point.is_in_memory else ""
            verdict = self._expect(point, known)
            differing = f"known to differ: {'; '.join(known)}" if known else "nothing known differs"
            lines.append(f"resumed at step {self.step} of {self.steps}{origin}: {differing}")
            if self.step >= self.steps:
                lines.append(
                    f"nothing is left to do: raise `train.steps` to go on, or start over without {self.folder}"
                )
        if self.worker.is_first:
            say("\n".join(lines))
            if known is not None:
                told = {"step": self.step, "verdict": None, "steps": 0, "differs": None, "why": known}
                self.report.progress.tell_resume(resumed=told)
        self._conclude_resume(verdict)

    def _expect(self, point: resume.ResumePoint, known: Sequence[str]) -> Verdict | None:
        """Have the next steps compared with what was recorded of them; collective over all workers.

        Args:
            point: what was resumed from.
            known: what is known to differ.

        Returns:
            The verdict, if it is known without them.

        Raises:
            SnapshotError: it is to be exact, something is known to differ, and nothing was recorded that could show
                whether that matters.
        """
        assert point.path is not None  # noqa: S101  # for the type checker
        saved = point.facts.get(state_sum.FACT)
        total = state_sum.sum_state(self.state.own_parts(), self.worker, find_buffers(self.model))
        if saved is not None and saved != state_sum.to_fact(total):
            return Verdict(verdict="not-exact", step=self.step, steps=0, differs="state", why=tuple(known))
        rows = read_record(point.path, self.worker) if self.step < self.steps else []
        then, now = point.facts["circumstances"], self.circumstances
        same_shares = all(then.get(key) == now.get(key) for key in ("workers", "micro_batch", "accumulate"))
        verdict = self.recorder.expect(self.step, rows, known, end=self.steps, losses=same_shares and not self.elastic)
        if verdict is not None and known and self.config.require_exact:
            raise SnapshotError(
                f"going on from step {self.step} would not be exact: {'; '.join(known)}",
                where=point.path,
                hint="undo these differences, or remove `train.require_exact`",
            )
        return verdict if self.step < self.steps else None

    def _go_back(self) -> None:
        """Go back to the newest snapshot, and past the samples seen since: one of them has spoilt the gradient."""
        step, position = self.step + 1, self.position + self.schedule.samples(self.position)
        self.saver.wait()  # the newest may still be on its way
        if self.in_memory is not None:
            self.in_memory.saver.wait()
        point = self._newest_snapshot()
        if point.path is None:
            raise WorkerFailed(f"the gradient of step {step} is not finite, and there is no snapshot to go back to")
        self.is_torn = True
        self._conclude_resume(self.recorder.forget(f"the gradient of step {step} is not finite"))
        self.restore(point, going_back=True)
        if self.worker.is_first:
            skipped = position - self.position
            say(f"the gradient of step {step} is not finite: back to step {self.step}, {skipped} samples are left out")
        self.position = position
        self.use(self.batch)
        self.recorder.losses.begin(self.folder, self.worker)  # the steps that were taken back are not repeated
        self.is_torn = False

    def restore(self, found: resume.ResumePoint, *, going_back: bool = False) -> list[str]:
        """Go on from a snapshot, one of this process's own if it is `going_back`.

        Returns:
            What is known to be another than when the snapshot was made, a phrase each.
        """
        self.step, self.position = found.step, found.facts["position"]
        sizes, self.rate.factor = resume.batch(self.config, self.asked, found.facts)
        self.use(sizes)
        self.is_ended = bool(found.facts.get("ended"))
        if self.is_ended:
            self.steps = self.step
        if self.loss_scale is not None and found.facts.get("loss_scale"):
            self.loss_scale.load(found.facts["loss_scale"])
        held = self._warm_up()  # before anything is restored, so that what it changes is put right
        parts = found.parts(self.model, self.optimizer, self.worker)
        if self.best is not None:
            self.best.load(found.facts.get("best"))
        differing = self.state.load(parts, found.facts, step=self.step, held=held, going_back=going_back)
        differing += account.differences(self.account, parts, found.facts, self.worker.rank)
        if self.worker.is_first:
            differing += circumstances.differences(found.facts["circumstances"], self.circumstances)
        reports = gathered_json(differing, self.worker)  # else one worker might stop where the others continue
        return list(dict.fromkeys(phrase for phrases in reports for phrase in phrases))

    def _warm_up(self) -> dict[str, Any]:
        """Return a pass that is thrown away, if the strategy needs one: it changes gradients, buffers and random state.

        Returns:
            What the program had before.
        """
        if not self.strategy.has_warm_up or not 0 < self.step < self.steps:  # the first step of a run has had none
            return {}
        held = self.account.program.hold()
        step = self._next_step()
        step.backward(self.strategy.module, step.first_alone(), 1.0, 1)
        self.strategy.finish()
        self._drop_gradients()
        return held


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
