"""The training loop, top to bottom: read `Trainer.run` first.

    with start(seed=config.seed) as worker:
        trainer = Trainer(config, worker, model, loss, data)
        outcome = trainer.run()

`loss(model, batch)` returns the mean over the samples of a batch. It is all that the loop knows of the model, so that
models stay unmodified.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dtctl import names
from dtctl.errors import PlanError, SpecError
from dtctl.runtime import data, optim, randomness, resume
from dtctl.runtime.agreement import Agreement
from dtctl.runtime.config import DEFAULT_SNAPSHOT_S, TrainConfig, batch, length
from dtctl.runtime.console import complain, say
from dtctl.runtime.equality import fingerprint, require_equal
from dtctl.runtime.evaluation import Score, evaluate
from dtctl.runtime.mesh import Place, resolve
from dtctl.runtime.metrics import Metrics
from dtctl.runtime.order import Indices, Order, Schedule
from dtctl.runtime.precision import autocast
from dtctl.runtime.snapshot import state
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.whole import gathered, gathered_optimizer
from dtctl.runtime.stop import Outcome, StopRequest
from dtctl.runtime.strategies import choose
from dtctl.runtime.strategies.pipeline import Pipeline
from dtctl.runtime.worker import Worker

Loss = Callable[[nn.Module, Any], torch.Tensor]
"""Mean loss over the samples of a batch, a scalar; called with the model as the strategy wraps it."""


class Trainer:
    """A training from its newest snapshot, or its beginning, to its end.

    Attributes:
        model: the user's model, on the worker's device, not wrapped; a part of it, if the strategy divides it.
        place: where this worker stands in the mesh.
        parameters: those that are trained, as this worker has them.
        step: optimizer steps done.
        steps: length of the training.
        position: samples consumed, over all workers and attempts.
    """

    def __init__(
        self,
        config: TrainConfig,
        worker: Worker,
        model: nn.Module,
        loss: Loss,
        samples: data.Samples | data.Batches,
        *,
        validation: data.Samples | data.Batches | None = None,
        score: Score | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        tensorboard: Path | None = None,
    ) -> None:
        """Put the parts together; nothing is trained yet.

        Args:
            config: how to train.
            worker: this worker.
            model: any module; the same on all workers.
            loss: mean loss of a batch.
            samples: what to train on; the same on all workers. With an attribute `tokens_per_sample`, metrics have
                `tokens_per_s`.
            validation: what to evaluate on, every `eval_every` steps and at the end; needs `score`.
            score: values per sample whose means are logged as `val_NAME`.
            optimizer: makes the optimizer. None: the one that the configuration names.
            tensorboard: folder for TensorBoard's event files. None: none are written.

        Raises:
            PlanError: the configuration does not fit these workers or this data, or the workers differ.
            SpecError: the configuration asks for what this version does not have.
        """
        self.config, self.worker, self.loss = config, worker, loss
        degrees = resolve(config.strategy, workers=worker.world_size, per_node=worker.local_world_size)
        self.place = Place(degrees=degrees, rank=worker.rank)
        self.batch = batch(config, degrees.data, stages=degrees.pp)
        self.samples = len(samples)
        self.steps, end = length(config, samples=len(samples), batch=self.batch)
        require_equal(fingerprint(model, config, samples=len(samples), steps=self.steps), worker)
        self.model = model.to(worker.device)
        self.numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.read = data.reader(samples)
        self.strategy = choose(config, worker, degrees, self.batch, self.model, self._probe)
        self.optimizer = optimizer(self.model) if optimizer else optim.optimizer(config, self.model)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.strategy.prepare(self.optimizer)
        self.rate = optim.schedule(config, self.steps)
        self.scales = [group["lr"] / config.lr for group in self.optimizer.param_groups]
        self.autocast = autocast(config.precision, worker.device)
        self.schedule = Schedule(Order(len(samples), config.seed), self.batch, rank=self.place.data, end=end)
        self.tokens_per_sample: int | None = getattr(samples, "tokens_per_sample", None)
        self.validation, self.score, self.tensorboard = validation, score, tensorboard
        if config.snapshot.replicas:
            raise SpecError("replicas of snapshots are not available in this version", where="train.snapshot.replicas")
        self.folder = Path(config.snapshot.dir or os.environ.get(names.SNAPSHOT_DIR) or "snapshots").expanduser()
        self.saver = Saver(
            self.folder,
            keep=config.snapshot.keep,
            when_busy=config.snapshot.when_busy,
            max_failed=config.snapshot.max_failed_saves,
            complain=complain,
        )
        self.every_s = config.snapshot.every_s
        if self.every_s is None and config.snapshot.every_steps is None:
            self.every_s = DEFAULT_SNAPSHOT_S
        self.circumstances = resume.circumstances(config, worker, self.batch, samples=len(samples), steps=self.steps)
        self.circumstances["mesh"] = str(degrees)
        self.step = self.position = 0
        self.saved_s = time.monotonic()

    def run(self) -> Outcome:
        """Train until all steps are done or a signal asks to stop; there is a snapshot of the end in both cases.

        Raises:
            SnapshotError: a snapshot does not fit this model, or cannot be written.
        """
        self._resume()
        config, first, outcome = self.config, self.worker.is_first, Outcome.FINISHED
        agreement = Agreement(self.worker, step=self.step)
        writing = closing(self._metrics()) if first else nullcontext()
        with StopRequest().listening() as asked, writing as metrics, self.saver:
            while self.step < self.steps:
                last = self.step + 1 == self.steps
                evaluated = self.validation is not None and (last or _due(self.step + 1, config.eval_every))
                logged = last or evaluated or _due(self.step + 1, config.log_every)
                lr = self._set_rate()
                loss = self._accumulate()
                norm = self._clip(logged)
                self.optimizer.step()
                self.position += self.schedule.samples(self.position)
                self.step += 1
                if logged:
                    self._log(metrics, loss, lr, norm, evaluated=evaluated)
                decision = agreement.after(self.step, stop=asked.signal is not None, save=first and self._is_time())
                if last or decision.stop or decision.save or _due(self.step, config.snapshot.every_steps):
                    self.save(metrics, needed=last or decision.stop)
                if decision.stop and not last:
                    outcome = Outcome.STOPPED
                    break
            agreement.close()
        if first and outcome is Outcome.STOPPED:
            say(f"stopped after step {self.step} of {self.steps}, with a snapshot")
        return outcome

    def _accumulate(self) -> torch.Tensor:
        """Gradients of one global batch, and this worker's share of its mean loss, not yet added up over workers."""
        self._clear()
        batches = self.schedule(self.position)
        count = self.schedule.samples(self.position)
        if isinstance(self.strategy, Pipeline):  # which orders the passes of a step in its own way
            return self.strategy.run([self._weighted(indices, count) for indices in batches], self._loss)
        parts = []
        for index, indices in enumerate(batches):
            # Every sample weighs the same, in a short last batch too; gradients are averaged over the workers.
            weight = len(indices) * self.place.degrees.data / count
            with nullcontext() if index + 1 == len(batches) else self.strategy.accumulating():
                parts.append(self._backward(indices, weight))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def _weighted(self, indices: Indices, count: int) -> tuple[Any, float]:
        """A micro batch and the weight of its loss, in a step of `count` samples."""
        chosen = indices if len(indices) else self.schedule.stand_in
        weight = len(indices) * self.place.degrees.data / count
        return data.to_device(self.read(chosen), self.worker.device), weight

    def _loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with self.autocast:
            return self.loss(model, batch)

    def _backward(self, indices: Indices, weight: float) -> torch.Tensor:
        """Add the gradients of one micro batch to those that are there."""
        if len(indices) == 0:  # the peers have samples and expect this worker's part of the exchange
            indices = self.schedule.stand_in
        batch = data.to_device(self.read(indices), self.worker.device)
        with self.autocast:
            loss = self.loss(self.strategy.module, batch)
        if weight != 1.0:
            loss = loss * weight
        torch.autograd.backward(loss)
        return loss.detach()

    def _clear(self) -> None:
        """Forget all gradients; the optimizer may have a share of the parameters only."""
        for parameter in self.parameters:
            parameter.grad = None

    def _probe(self, model: nn.Module) -> torch.Tensor:
        """The loss of the first samples, the same on all workers."""
        indices = np.arange(min(self.batch.micro, self.samples), dtype=np.int64)
        return self.loss(model, data.to_device(self.read(indices), self.worker.device))

    def _set_rate(self) -> float:
        rate = self.rate(self.step)
        for group, scale in zip(self.optimizer.param_groups, self.scales, strict=True):
            group["lr"] = rate * scale
        return rate

    def _clip(self, wanted: bool) -> torch.Tensor | None:
        """Scale the gradient down if it is too long. Its length before that; None if neither clipping nor wanted."""
        return self.strategy.clip(self.config.clip_norm) if wanted or self.config.clip_norm is not None else None

    def _log(
        self, metrics: Metrics | None, loss: torch.Tensor, lr: float, norm: torch.Tensor | None, *, evaluated: bool
    ) -> None:
        """Evaluate if it is time, and write a line; collective over all workers."""
        mean = self.worker.sum(loss.double().cpu()) / self.worker.world_size
        extra = self.evaluate(metrics) if evaluated else {}
        if metrics is not None:
            metrics.log(
                self.step,
                loss=float(mean),
                lr=lr,
                grad_norm=float(norm) if norm is not None else 0.0,
                samples=self.batch.total,
                tokens=self.tokens_per_sample and self.tokens_per_sample * self.batch.total,
                extra=extra,
            )

    def evaluate(self, metrics: Metrics | None = None) -> dict[str, float]:
        """The means of the scores over the validation set as `val_NAME`; collective over all workers."""
        if self.validation is None or self.score is None:
            raise PlanError("an evaluation needs both `validation` and `score`", where="Trainer")
        began_s = time.perf_counter()
        found = evaluate(
            self.strategy.inference,
            self.validation,
            self.score,
            self.worker,
            batch=self.batch.micro,
            autocast=self.autocast,
            place=self.place,
            together=self.strategy.together,
        )
        if metrics is not None:
            metrics.pause(time.perf_counter() - began_s)
        return {f"val_{name}": value for name, value in found.items()}

    def save(self, metrics: Metrics | None = None, *, needed: bool = True) -> None:
        """Begin a snapshot of this step; collective over all workers, of which rank 0 writes, beside training.

        Args:
            metrics: told of the time that it takes.
            needed: whether it must not be skipped, should another one be under way.
        """
        began_s = time.perf_counter()
        everyone, model, optimizer = randomness.gather(self.worker), self.weights(), self._optimizer_state()
        if self.worker.is_first:
            parts = {"model": model, "optimizer": optimizer, "random": everyone}
            facts = {"position": self.position, "circumstances": self.circumstances}
            self.saver.save(self.step, parts, facts=facts, needed=needed)
        if metrics is not None:
            metrics.pause(time.perf_counter() - began_s)
        self.saved_s = time.monotonic()

    def weights(self) -> dict[str, Any]:
        """The whole model's state on rank 0, whatever the strategy; empty elsewhere. Collective over all workers."""
        own = dict(self.model.state_dict()) if self.strategy.spread or self.worker.is_first else {}
        return (gathered(own, self.worker) or {}) if self.strategy.spread else own

    def _optimizer_state(self) -> dict[str, Any]:
        """The whole optimizer's state on rank 0, as `weights`."""
        if not self.strategy.spread:
            return state.optimizer_tree(self.model, self.optimizer) if self.worker.is_first else {}
        return gathered_optimizer(state.optimizer_tree(self.model, self.optimizer), self.worker)

    def _is_time(self) -> bool:
        return self.every_s is not None and time.monotonic() - self.saved_s >= self.every_s

    def _metrics(self) -> Metrics:
        path = Path(os.environ.get(names.METRICS) or names.METRICS_FILE)
        return Metrics(path, step=self.step, steps=self.steps, tensorboard=self.tensorboard)

    def _resume(self) -> None:
        """Take the newest good snapshot, or begin; and say which on rank 0."""
        found = resume.find(self.folder, self.worker)
        lines = [f"snapshot passed over: {reason}" for reason in found.rejected]
        if found.path is None:
            randomness.begin(self.config.seed, self.place.stream)
            lines.append(self._introduction())
        else:
            lines += [self._introduction(), f"resumed at step {found.step} of {self.steps}: {self._restore(found)}"]
        if self.worker.is_first:
            say("\n".join(lines))

    def _introduction(self) -> str:
        batch, worker = self.batch, self.worker
        return (
            f"{self.strategy.name} on {worker.world_size} x {worker.device.type}, {self.numbers:,} parameters, "
            f"{self.config.precision}, global batch {batch.total} = {batch.micro} x {batch.world_size} x "
            f"{batch.accumulate}, {self.steps} steps"
        )

    def _restore(self, found: resume.Found) -> str:
        """Go on from a snapshot. Returns whether that is exact, and why not."""
        self.step, self.position = found.step, found.facts["position"]
        if self.strategy.has_warm_up and self.step < self.steps:
            # Before anything is restored, so that what it changes (gradients, buffers, random state) is put right.
            self._backward(self.schedule(self.position)[0], 1.0)
            self._clear()
        state.load_model(self.model, found.parts["model"], elsewhere=self.strategy.elsewhere)
        state.load_optimizer(self.model, self.optimizer, found.parts["optimizer"], whole=not self.strategy.spread)
        differing = resume.differences(found.facts["circumstances"], self.circumstances)
        differing += [self.strategy.inexact] if self.strategy.inexact else []
        # Last, since all of the above may draw random numbers.
        mine = randomness.of_rank(found.parts["random"], self.place.stream)
        if mine is None:
            randomness.begin(self.config.seed, self.place.stream, step=self.step)
        else:
            randomness.restore(mine, self.worker.device)
        return "exact" if not differing else "not exact: " + "; ".join(differing)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
