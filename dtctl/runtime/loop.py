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
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dtctl.errors import PlanError, SnapshotError, WorkerFailed
from dtctl.runtime import blocks, diagnose, optim, resume, snapshot_saver
from dtctl.runtime.automatic import Subject, settle
from dtctl.runtime.best import Best
from dtctl.runtime.console import say
from dtctl.runtime.data_loading import datasets
from dtctl.runtime.data_loading.feed import Feed
from dtctl.runtime.data_loading.order import InSequence, Order, Schedule
from dtctl.runtime.data_loading.reading import Reader
from dtctl.runtime.distributed.agreement import Agreement
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.ema import Ema
from dtctl.runtime.evaluation import Score, evaluate
from dtctl.runtime.exactness import account, circumstances, determinism, randomness
from dtctl.runtime.exactness.consistency import fingerprint, require_equal, settings
from dtctl.runtime.guards.nonfinite import NonFiniteGuard
from dtctl.runtime.guards.oom import MemoryWatch, enough_memory, smaller
from dtctl.runtime.guards.origin import spoilt
from dtctl.runtime.precision import LossScale, autocast, multiply
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.snapshot.state import configured
from dtctl.runtime.step import Loss, Passes, Step
from dtctl.runtime.stop import Outcome, StopRequest
from dtctl.runtime.strategies import choose, deferred_init
from dtctl.runtime.strategies.frozen import Frozen
from dtctl.runtime.telemetry.profile import Profiler, kept_buffers
from dtctl.runtime.telemetry.report import Report
from dtctl.runtime.token_weighting import correction
from dtctl.runtime.training_state import TrainingState
from dtctl.train.batch import Batch, batch, length
from dtctl.train.config import DEFAULT_SNAPSHOT_S, TrainConfig
from dtctl.train.mesh import Coordinate


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
    """

    def __init__(
        self,
        config: TrainConfig,
        worker: Worker,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        samples: datasets.Samples | datasets.Batches | datasets.SampleStream,
        *,
        validation: datasets.Samples | datasets.Batches | None = None,
        score: Score | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        rate: Callable[[int], float] | None = None,
        extra_state: Mapping[str, Any] | None = None,
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
            extra_state: what else belongs to the state of the training, by name: objects with `state_dict` and
                `load_state_dict` (a module, an optimizer, a scheduler), or random generators of torch, NumPy or
                Python. Every snapshot has it, of each worker its own where they differ, and a resume puts it back.
            tensorboard: folder for TensorBoard's event files. None: none are written.

        Raises:
            PlanError: the configuration does not fit these workers or this data, or the workers differ.
            SpecError: the configuration asks for what this version does not have.
        """
        require_equal(settings(config), worker)
        if determinism.is_wanted(config, worker.device.type):  # for scripts that call `start` themselves
            determinism.apply()
        if config.tf32:
            torch.set_float32_matmul_precision("high")
        self.folder = snapshot_saver.folder(config.snapshot, os.environ)
        self.settled = settle(config, worker, Subject(model=model, loss=loss, samples=samples), self.folder)
        config, degrees = self.settled.config, self.settled.degrees
        self.config, self.worker, self.loss = config, worker, loss
        self.place = Coordinate(degrees=degrees, rank=worker.rank)
        self.batch = self.asked = batch(config, degrees.data, stages=degrees.pp)
        self.samples, tokens = datasets.size(samples), getattr(samples, "tokens_per_sample", None)
        self.steps, self.end = length(config, samples=self.samples, batch=self.batch)
        self.model = deferred_init.build(model, worker, degrees)
        require_equal(fingerprint(self.model, degrees, samples=self.samples, steps=self.steps), worker)
        blocks.prepare(self.model, config)
        self.feed = Feed(Reader(samples, config.seed), config, worker.device)
        self.report = Report(config, worker, self.model, tokens_per_sample=tokens, board=tensorboard)
        self.strategy = choose(config, worker, degrees, self.batch, self.model, self._probe)
        self.optimizer = optimizer(self.model) if optimizer else optim.optimizer(config, self.model)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.strategy.prepare(self.optimizer)
        self.configured = configured(self.optimizer)
        self.configured_rate, self.rate_factor = optim.schedule(config, self.steps), 1.0
        self.rate = rate or self.configured_rate
        self.scales = [group["lr"] / config.lr for group in self.optimizer.param_groups]
        self.autocast = autocast(config.precision, worker.device)
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        blame = partial(spoilt, self.model, self.optimizer.param_groups)
        self.guard = NonFiniteGuard(config.on_nan, self.loss_scale, worker, blame)
        self.ema = Ema(self.model, config.ema) if config.ema else None
        self.elastic = config.exact == "elastic"
        exchanging = worker.backend is not None and not self.elastic
        self.frozen = Frozen(self.model, self.strategy.name) if exchanging else None
        halve = config.on_oom == "halve" and not self.elastic
        self.memory = MemoryWatch(self.strategy.module, self.parameters, worker, wanted=halve)
        self.passes = Passes(
            loss=loss,
            feed=self.feed,
            worker=worker,
            autocast=self.autocast,
            loss_scale=self.loss_scale,
            clock=self.report.progress,
            mark=self.report.clock.mark,
            poison=self.memory.poison,
        )
        self.order = InSequence() if isinstance(samples, datasets.SampleStream) else Order(self.samples, config.seed)
        self.schedule = Schedule(self.order, self.batch, rank=self.place.data, end=self.end)
        self.validation, self.score = validation, score
        self.best = Best(config.best, keep=config.snapshot.keep_best) if config.best else None
        self.profiler = Profiler(config.profile, worker)
        self.saver = snapshot_saver.saver(
            config.snapshot, self.folder, worker, self.model, progress=self.report.progress,
            sharded_state=self.strategy.sharded_state,
        )  # fmt: skip
        self.every_s = config.snapshot.every_s
        if self.every_s is None and config.snapshot.every_steps is None:
            self.every_s = DEFAULT_SNAPSHOT_S
        self.extra_state = dict(extra_state or {})
        account.require_stateful(self.extra_state)
        self.circumstances = circumstances.settings(config, worker, self.batch, samples=self.samples, steps=self.steps)
        self.circumstances |= {} if self.elastic else {"mesh": str(degrees)}
        self.step = self.position = self.began_at = 0
        self._account: account.Account | None = None
        self.saved_s = time.monotonic()

    def run(self) -> Outcome:
        """Train until all steps are done or a signal asks to stop; there is a snapshot of the end in both cases.

        Raises:
            SnapshotError: a snapshot does not fit this model, or cannot be written.
        """
        self.account  # noqa: B018  # taken before anything trains
        snapshot_saver.begin(self.saver, self.worker)
        try:
            return self._train()
        finally:
            self.saver.close()

    def _train(self) -> Outcome:
        if self.config.profile.communication:  # before the state is restored, since it costs passes
            self._measure_communication()
        self._resume()
        self.began_at = self.step
        config, first, outcome = self.config, self.worker.is_first, Outcome.FINISHED
        agreement, report = Agreement(self.worker, step=self.step), self.report
        listening = StopRequest().listening()
        reporting, saving = report.open(self.step, self.steps), self.saver
        with listening as asked, self.profiler.listening(), self.feed.running(), reporting, saving:
            while self.step < self.steps:
                last = self.step + 1 == self.steps
                evaluated = self.validation is not None and (last or _due(self.step + 1, config.eval_every))
                logged = last or evaluated or _due(self.step + 1, config.log_every)
                self.profiler.before(self.step + 1)
                lr = self._set_rate()
                loss = self.backward()
                self.guard.note(self.step + 1, loss)
                norm = self._clip(logged)
                verdict = self.guard.judge(self.step + 1, norm, wanted=logged or self.guard.always)
                if verdict == "rollback":
                    self._go_back()
                    agreement.restart(self.step)
                    report.rewind(self.step)
                    continue
                if verdict == "take":
                    self._update()
                else:
                    self.strategy.discard()
                self.position += self.schedule.samples(self.position)
                self.step += 1
                if self.ema is not None:
                    self.ema.update(self.step)
                report.step(self.step)
                self.profiler.after(self.step)
                scores = self.evaluate() if evaluated else {}
                if logged:
                    report.log(self.step, loss, lr, norm, self.batch, scores)
                best = bool(scores) and self.best is not None and self.best.take(self.step, scores)
                decision = agreement.after(self.step, stop=asked.signal is not None, save=first and self._is_time())
                if last or best or decision.stop or decision.save or _due(self.step, config.snapshot.every_steps):
                    self.save(needed=last or best or decision.stop)
                if decision.stop and not last:
                    outcome = asked.granted()
                    break
            report.through()
            agreement.close()
        if first and outcome is Outcome.STOPPED:
            say(f"stopped after step {self.step} of {self.steps}, with a snapshot")
        return outcome

    def _probe(self, model: nn.Module) -> torch.Tensor:
        """The loss of the first samples, the same on all workers."""
        indices = np.arange(min(self.batch.micro, self.samples), dtype=np.int64)
        loss = self.loss(model, datasets.to_device(self.feed.single(indices), self.worker.device))
        return loss[0] if isinstance(loss, tuple) else loss

    def backward(self) -> torch.Tensor:
        """Gradients of the next global batch, in smaller passes if a worker runs out of memory; collective.

        Returns:
            This worker's share of the mean loss, not yet added up over workers.
        """
        while True:
            for parameter in self.parameters:  # as `zero_grad` does it, which spends 15 us on being profiled
                parameter.grad = None
            step = self._next_step()
            loss, short = self.memory.attempt(
                partial(self.strategy.gradients, step), partial(step.spoil, self.strategy.module)
            )
            if loss is not None and not short:
                break
            self.strategy.discard()
            self._use(smaller(self.batch))
            if self.worker.is_first:
                ranks = ", ".join(map(str, short))
                say(f"out of memory on rank {ranks} in step {self.step + 1}: again with {self.batch.describe()}")
        if step.own is not None:
            self.report.times.own(*step.own)
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
            replicas=self.place.degrees.data,
        )

    def _use(self, sizes: Batch) -> None:
        """Go on from here with these sizes of a batch; by epochs the number of steps follows them."""
        self.batch = sizes
        if self.config.steps is not None:
            self.end = self.position + (self.steps - self.step) * sizes.total
        else:
            self.steps = self.step - (self.position - self.end) // sizes.total
            own = self.rate is not self.configured_rate
            self.configured_rate = optim.schedule(self.config, self.steps)
            self.rate = self.rate if own else self.configured_rate
        self.schedule = Schedule(self.order, sizes, rank=self.place.data, end=self.end)

    def _measure_communication(self) -> None:
        """Say what share of a step is exchange of gradients; collective. Leaves the model as it was."""
        with kept_buffers(self.model):
            pairs = self.config.profile.communication
            cost = diagnose.communication(self.backward, self.strategy.module, pairs=pairs)
        if self.worker.is_first:
            say(cost.describe())

    def gradients(self) -> list[torch.Tensor]:
        """Of the parameters that have one."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _set_rate(self) -> float:
        rate = self.rate(self.step) * self.rate_factor
        if len(self.optimizer.param_groups) != len(self.scales):
            raise WorkerFailed(
                f"the optimizer had {len(self.scales)} parameter groups when training began, and has "
                f"{len(self.optimizer.param_groups)} before step {self.step + 1}",
                where="optimizer.add_param_group",
                hint="clipping, other workers and snapshots know the groups of the beginning: make all of them there",
            )
        for group, scale in zip(self.optimizer.param_groups, self.scales, strict=True):
            group["lr"] = rate * scale
        return rate

    def _clip(self, wanted: bool) -> torch.Tensor | None:
        """Scale the gradient down if it is too long. Its length before that; None if neither clipping nor wanted."""
        if self.loss_scale is not None:
            multiply(self.gradients(), 1 / self.loss_scale.scale)
        limit = self.config.clip_norm
        if limit is None:
            return self._norm() if wanted or self.guard.always else None
        norm = self._norm()
        if norm.device.type != "cpu" or not norm + 1e-6 <= limit:  # a GPU would have to be waited for to know
            self.strategy.clip(limit, norm)
        return norm

    def _norm(self) -> torch.Tensor:
        return self.strategy.norm()

    def _update(self) -> None:
        """Take the optimizer's step."""
        hint = (
            "its state takes as much in the first step as later, whatever the batch: divide it with `strategy: zero1` "
            "or `fsdp`, or look at `dtctl advise`"
        )
        with enough_memory(f"the optimizer's step {self.step + 1}", hint, self.worker):
            self.optimizer.step()

    def evaluate(self) -> dict[str, float]:
        """The means of the scores over the validation set as `val_NAME`; collective over all workers."""
        if self.validation is None or self.score is None:
            raise PlanError("an evaluation needs both `validation` and `score`", where="Trainer")
        averaged = self.ema is not None and self.config.ema is not None and self.config.ema.evaluate
        drawn = randomness.preserved(self.worker.device, self.config.seed)  # what a score draws is the same each time
        hint = "an evaluation takes `micro_batch` samples at a time: lower it, or let `score` keep less"
        enough = enough_memory(f"the evaluation after step {self.step}", hint, self.worker)
        with enough, drawn, self.report.evaluating(), self.ema.applied() if self.ema and averaged else nullcontext():
            found = evaluate(
                self.strategy.inference,
                self.validation,
                self.score,
                self.worker,
                batch=self.batch.micro,
                autocast=self.autocast,
                place=self.place,
                lockstep=self.strategy.lockstep,
            )
        return {f"val_{name}": value for name, value in found.items()}

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
                self.saver.save(self.step, parts, facts={**self._counters(), **facts}, best=best, needed=needed)
        self.saved_s = time.monotonic()

    def full_weights(self) -> dict[str, Any]:
        """The whole model's state on rank 0, whatever the strategy; empty elsewhere. Collective over all workers."""
        return self.state.full_weights()

    def _counters(self) -> dict[str, Any]:
        """What a snapshot keeps of the loop itself; JSON."""
        return {
            "position": self.position,
            "circumstances": self.circumstances,
            "batch": resume.sizes(self.asked, self.batch),
            "rate_factor": self.rate_factor,
            "chosen": self.settled.kept,
            "best": self.best and self.best.state(),
            "loss_scale": self.loss_scale and self.loss_scale.state(),
        }

    @property
    def account(self) -> account.Account:
        """What this program was before its first step; taken when first asked for, collective over all workers."""
        if self._account is None:
            subject = account.AccountSubject(
                model=self.model,
                loss=self.loss,
                optimizer=self.optimizer,
                rate=None if self.rate is self.configured_rate else self.rate,
                extra_state=self.extra_state,
                apart=[self, self.config, self.config.data, self.config.model],
                feed=self.feed,
                first=np.asarray(self.schedule.positions(0)[0]),
            )
            self._account = account.take(subject, self.worker, elastic=self.elastic)
        return self._account

    @property
    def state(self) -> TrainingState:
        """What snapshots hold beside the counters of the loop."""
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
        """Take the newest good snapshot, or begin; and say which on rank 0."""
        found = resume.find(self.folder, self.worker)
        lines = [f"snapshot passed over: {reason}" for reason in found.rejected]
        resumed = self.restore(found) if found.path is not None else None
        lines.append(self.report.introduction(self.strategy.name, self.batch, self.steps))
        if resumed is None:
            randomness.begin(self.config.seed, self.place.stream)
        else:
            lines.append(f"resumed at step {self.step} of {self.steps}: {resumed}")
        if self.worker.is_first:
            say("\n".join(lines))

    def _go_back(self) -> None:
        """To the newest snapshot, and past the samples that were seen since: among them is what spoilt the gradient."""
        step, position = self.step + 1, self.position + self.schedule.samples(self.position)
        self.saver.wait()  # the newest may still be on its way
        found = resume.find(self.folder, self.worker)
        if found.path is None:
            raise WorkerFailed(f"the gradient of step {step} is not finite, and there is no snapshot to go back to")
        self.restore(found, going_back=True)
        if self.worker.is_first:
            skipped = position - self.position
            say(f"the gradient of step {step} is not finite: back to step {self.step}, {skipped} samples are left out")
        self.position = position
        self._use(self.batch)

    def restore(self, found: resume.ResumePoint, *, going_back: bool = False) -> str:
        """Go on from a snapshot, one of this process's own if it is `going_back`.

        Returns:
            Whether that is exact, and why not.
        """
        self.step, self.position = found.step, found.facts["position"]
        sizes, factor = resume.batch(self.config, self.asked, found.facts)
        self.rate_factor = factor
        self._use(sizes)
        if self.loss_scale is not None and found.facts.get("loss_scale"):
            self.loss_scale.load(found.facts["loss_scale"])
        held: dict[str, Any] = {}
        if self.strategy.has_warm_up and self.step < self.steps:
            # Before anything is restored, so that what it changes (gradients, buffers, random state) is put right.
            held = self.account.program.hold()
            step = self._next_step()
            step.backward(self.strategy.module, step.first_alone(), 1.0, 1)
            self.strategy.finish()
            for parameter in self.parameters:
                parameter.grad = None
        parts = found.parts(self.model, self.optimizer, self.worker)
        if self.best is not None:
            self.best.load(found.facts.get("best"))
        differing = self.state.load(parts, found.facts, step=self.step, held=held, going_back=going_back)
        differing += account.differences(self.account, parts, found.facts, self.worker.rank)
        if self.worker.is_first:
            differing += circumstances.differences(found.facts["circumstances"], self.circumstances)
        told = gathered_json(differing, self.worker)  # else one worker might stop where the others go on
        differing = list(dict.fromkeys(phrase for phrases in told for phrase in phrases))
        doubt = determinism.doubt(self.worker, elastic=self.elastic)
        if doubt is not None and self.config.require_exact:
            differing.append(doubt)
        if differing and self.config.require_exact:
            raise SnapshotError(
                f"going on from step {self.step} would not be exact: {'; '.join(differing)}",
                where=found.path,
                hint="undo these differences, or do without `train.require_exact`",
            )
        return (doubt or "exact") if not differing else "not exact: " + "; ".join(differing)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
