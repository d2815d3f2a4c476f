"""The training loop, top to bottom: read `Trainer.run` first.

    with start(seed=config.seed) as worker:
        trainer = Trainer(config, worker, model, loss, data)
        outcome = trainer.run()

`loss(model, batch)` returns the mean over the samples of a batch, or a sum and its weight. It is all that the loop
knows of the model, so that models stay unmodified.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl import names
from dtctl.errors import PlanError, SpecError, WorkerFailed
from dtctl.runtime import blocks, data, optim, randomness, resume
from dtctl.runtime.agreement import Agreement
from dtctl.runtime.config import DEFAULT_SNAPSHOT_S, Batch, TrainConfig, batch, length
from dtctl.runtime.console import say
from dtctl.runtime.ema import Ema
from dtctl.runtime.equality import fingerprint, require_equal
from dtctl.runtime.evaluation import Score, evaluate
from dtctl.runtime.feed import Feed
from dtctl.runtime.guard import Guard
from dtctl.runtime.metrics import Metrics
from dtctl.runtime.oom import MemoryWatch, smaller
from dtctl.runtime.order import InSequence, Order, Schedule
from dtctl.runtime.precision import LossScale, autocast, multiply
from dtctl.runtime.reading import Reader
from dtctl.runtime.snapshot import state, write
from dtctl.runtime.stop import Outcome, StopRequest
from dtctl.runtime.strategies import choose
from dtctl.runtime.weighing import Weighted, correction
from dtctl.runtime.worker import Worker

Loss = Callable[[nn.Module, Any], "torch.Tensor | Weighted"]
"""Mean loss over the samples of a batch, a scalar, or a sum and how much it is a sum of (see weighing.py); called with
the model as the strategy wraps it."""


class Trainer:
    """A training from its newest snapshot, or its beginning, to its end.

    Attributes:
        model: the user's model, on the worker's device, not wrapped.
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
        samples: data.Samples | data.Batches | data.Stream,
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
            loss: mean loss of a batch, or a sum over its tokens and their number.
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
        self.batch = self.asked = batch(config, worker.world_size)
        self.steps, end = length(config, samples=data.size(samples), batch=self.batch)
        require_equal(fingerprint(model, samples=data.size(samples), steps=self.steps), worker)
        self.model = model.to(worker.device)
        blocks.prepare(self.model, config)
        self.strategy = choose(config, worker, self.model)
        self.optimizer = optimizer(self.model) if optimizer else optim.optimizer(config, self.model)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.rate, self.rate_factor = optim.schedule(config, self.steps), 1.0
        self.scales = [group["lr"] / config.lr for group in self.optimizer.param_groups]
        self.autocast = autocast(config.precision, worker.device)
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self.guard = Guard(config.on_nan, self.loss_scale, worker)
        self.ema = Ema(self.model, config.ema) if config.ema else None
        self.weights: list[torch.Tensor] = []
        self.memory = MemoryWatch(self.strategy.module, self.parameters, worker, wanted=config.on_oom == "halve")
        self.feed = Feed(Reader(samples, config.seed), config, worker.device)
        self.order = InSequence() if isinstance(samples, data.Stream) else Order(len(samples), config.seed)
        self.end = end
        self.schedule = Schedule(self.order, self.batch, rank=worker.rank, end=end)
        self.tokens_per_sample: int | None = getattr(samples, "tokens_per_sample", None)
        self.validation, self.score, self.tensorboard = validation, score, tensorboard
        if config.snapshot.replicas:
            raise SpecError("replicas of snapshots are not available in this version", where="train.snapshot.replicas")
        self.folder = Path(config.snapshot.dir or os.environ.get(names.SNAPSHOT_DIR) or "snapshots").expanduser()
        self.every_s = config.snapshot.every_s
        if self.every_s is None and config.snapshot.every_steps is None:
            self.every_s = DEFAULT_SNAPSHOT_S
        self.circumstances = resume.circumstances(
            config, worker, self.batch, samples=data.size(samples), steps=self.steps
        )
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
        with (
            StopRequest().listening() as asked,
            self.feed.running(),
            closing(self._metrics()) if first else nullcontext() as metrics,
        ):
            while self.step < self.steps:
                last = self.step + 1 == self.steps
                evaluated = self.validation is not None and (last or _due(self.step + 1, config.eval_every))
                logged = last or evaluated or _due(self.step + 1, config.log_every)
                lr = self._set_rate()
                loss = self._accumulate()
                norm = self._clip(logged)
                verdict = self.guard.judge(self.step + 1, norm if logged or self.guard.always else None)
                if verdict == "rollback":
                    self._go_back()
                    agreement.restart(self.step)
                    if metrics is not None:
                        metrics.rewind(self.step)
                    continue
                if verdict == "take":
                    self.optimizer.step()
                self.position += self.schedule.samples(self.position)
                self.step += 1
                if self.ema is not None:
                    self.ema.update(self.step)
                if logged:
                    self._log(metrics, loss, lr, norm, evaluated=evaluated)
                decision = agreement.after(self.step, stop=asked.signal is not None, save=first and self._is_time())
                if last or decision.stop or decision.save or _due(self.step, config.snapshot.every_steps):
                    self.save(metrics)
                if decision.stop and not last:
                    outcome = Outcome.STOPPED
                    break
            agreement.close()
        if first and outcome is Outcome.STOPPED:
            say(f"stopped after step {self.step} of {self.steps}, with a snapshot")
        return outcome

    def _accumulate(self) -> torch.Tensor:
        """Gradients of one global batch, in smaller passes if a worker runs out of memory.

        Returns:
            This worker's share of the mean loss, not yet added up over workers.
        """
        while True:
            # Two samples to stand in, since BatchNorm refuses one.
            loss, short = self.memory.attempt(
                self._passes, lambda: self._backward(self.feed.single(self.schedule.stand_in.repeat(2)), math.nan, 2)
            )
            if loss is not None and not short:
                break
            self._use(smaller(self.batch))
            if self.worker.is_first:
                ranks = ", ".join(map(str, short))
                say(f"out of memory on rank {ranks} in step {self.step + 1}: again with {self.batch.describe()}")
        if self.weights:
            factor = correction(self.weights, self.schedule.samples(self.position), self.worker)
            multiply(self._gradients(), factor)
            loss = loss * factor
        return loss

    def _passes(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        self.weights.clear()
        batches = self.schedule(self.position)
        count = self.schedule.samples(self.position)
        parts = []
        for index, indices in enumerate(batches):
            # Every sample weighs the same, in a short last batch too; gradients are averaged over the workers.
            weight = len(indices) * self.worker.world_size / count
            if len(indices):
                samples = self.feed.batch(self.schedule, self.position, index)
            else:  # the peers have samples and expect this worker's part of the exchange
                samples = self.feed.single(self.schedule.stand_in)
            with nullcontext() if index + 1 == len(batches) else self.strategy.accumulating():
                parts.append(self._backward(samples, weight, len(indices)))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def _backward(self, samples: Any, weight: float, count: int) -> torch.Tensor:
        """Add the gradients of a micro batch to those that are there.

        Args:
            samples: the micro batch, on the CPU.
            weight: of its mean loss; NaN spoils the gradients of all workers.
            count: of samples that count in it; 0 for one that is there for the exchange only.
        """
        batch = data.to_device(samples, self.worker.device)
        with self.autocast:
            loss = self.loss(self.strategy.module, batch)
        if isinstance(loss, tuple):
            loss, tokens = loss
            self.weights.append(torch.as_tensor(tokens if count else 0.0, dtype=torch.float32, device=loss.device))
            weight /= max(1, count)
        if weight != weight:
            loss = self.memory.poison(loss)
        elif weight != 1.0:
            loss = loss * weight
        torch.autograd.backward(loss if self.loss_scale is None else loss.float() * self.loss_scale.scale)
        return loss.detach()

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _use(self, sizes: Batch) -> None:
        """Go on from here with these sizes of a batch; by epochs the number of steps follows them."""
        self.batch = sizes
        if self.config.steps is not None:
            self.end = self.position + (self.steps - self.step) * sizes.total
        else:
            self.steps = self.step - (self.position - self.end) // sizes.total
            self.rate = optim.schedule(self.config, self.steps)
        self.schedule = Schedule(self.order, sizes, rank=self.worker.rank, end=self.end)

    def _go_back(self) -> None:
        """To the newest snapshot, and past the samples that were seen since: among them is what spoilt the gradient."""
        step, position = self.step + 1, self.position + self.schedule.samples(self.position)
        found = resume.find(self.folder, self.worker)
        if found.path is None:
            raise WorkerFailed(f"the gradient of step {step} is not finite, and there is no snapshot to go back to")
        self._restore(found)
        if self.worker.is_first:
            skipped = position - self.position
            say(f"the gradient of step {step} is not finite: back to step {self.step}, {skipped} samples are left out")
        self.position = position
        self._use(self.batch)

    def _set_rate(self) -> float:
        rate = self.rate(self.step) * self.rate_factor
        for group, scale in zip(self.optimizer.param_groups, self.scales, strict=True):
            group["lr"] = rate * scale
        return rate

    def _clip(self, wanted: bool) -> torch.Tensor | None:
        """Scale the gradient down if it is too long. Its length before that; None if neither clipping nor wanted."""
        if self.loss_scale is not None:
            multiply(self._gradients(), 1 / self.loss_scale.scale)
        if self.config.clip_norm is not None:
            return nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        return self._norm() if wanted or self.guard.always else None

    def _norm(self) -> torch.Tensor:
        return nn.utils.get_total_norm(self._gradients())

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
        with self.ema.applied() if self.ema and self.config.ema and self.config.ema.evaluate else nullcontext():
            found = evaluate(
                self.model, self.validation, self.score, self.worker, batch=self.batch.micro, autocast=self.autocast
            )
        if metrics is not None:
            metrics.pause(time.perf_counter() - began_s)
        return {f"val_{name}": value for name, value in found.items()}

    def save(self, metrics: Metrics | None = None) -> None:
        """Write a snapshot of this step; collective over all workers, of which rank 0 writes."""
        began_s = time.perf_counter()
        if not self.guard.always:
            self.guard.judge(self.step, self._norm())
        everyone = randomness.gather(self.worker)
        if self.worker.is_first:
            parts = {
                "model": dict(self.model.state_dict()),
                "optimizer": state.optimizer_tree(self.model, self.optimizer),
                "random": everyone,
            }
            if self.ema is not None:
                parts["ema"] = self.ema.state()
            facts = {"position": self.position, "circumstances": self.circumstances} | {
                "batch": resume.sizes(self.asked, self.batch),
                "rate_factor": self.rate_factor,
                "loss_scale": self.loss_scale and self.loss_scale.state(),
            }
            write.save(self.folder, self.step, parts, facts=facts, keep=self.config.snapshot.keep)
        if metrics is not None:
            metrics.pause(time.perf_counter() - began_s)
        self.saved_s = time.monotonic()

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
            randomness.begin(self.config.seed, self.worker.rank)
            lines.append(self._introduction())
        else:
            lines += [self._introduction(), f"resumed at step {found.step} of {self.steps}: {self._restore(found)}"]
        if self.worker.is_first:
            say("\n".join(lines))

    def _introduction(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters)
        batch, worker = self.batch, self.worker
        return (
            f"{self.strategy.name} on {worker.world_size} x {worker.device.type}, {count:,} parameters, "
            f"{self.config.precision}, {batch.describe()}, {self.steps} steps"
        )

    def _restore(self, found: resume.Found) -> str:
        """Go on from a snapshot. Returns whether that is exact, and why not."""
        self.step, self.position = found.step, found.facts["position"]
        sizes, factor = resume.batch(self.config, self.asked, found.facts)
        self.rate_factor = factor
        self._use(sizes)
        if self.loss_scale is not None and found.facts.get("loss_scale"):
            self.loss_scale.load(found.facts["loss_scale"])
        if self.strategy.has_warm_up and self.step < self.steps:
            # Before anything is restored, so that what it changes (gradients, buffers, random state) is put right.
            self._backward(self.feed.single(self.schedule(self.position)[0]), 1.0, 1)
            self.optimizer.zero_grad()
        state.load_model(self.model, found.parts["model"])
        state.load_optimizer(self.model, self.optimizer, found.parts["optimizer"])
        if self.ema is not None:
            self.ema.load(found.parts.get("ema"))
        differing = resume.differences(found.facts["circumstances"], self.circumstances)
        # Last, since all of the above may draw random numbers.
        mine = randomness.of_rank(found.parts["random"], self.worker.rank)
        if mine is None:
            randomness.begin(self.config.seed, self.worker.rank, step=self.step)
        else:
            randomness.restore(mine, self.worker.device)
        return "exact" if not differing else "not exact: " + "; ".join(differing)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
