"""Forward and backward passes of a step, over the model as its strategy has wrapped it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import nn

from dtctl.runtime.console import say
from dtctl.runtime.data_loading import datasets
from dtctl.runtime.data_loading.feed import BatchLoader
from dtctl.runtime.distributed.device_mesh import limit_groups
from dtctl.runtime.guards.nonfinite import NonFiniteGuard
from dtctl.runtime.guards.oom import OomGuard, raise_out_of_memory, reduce_micro_batch
from dtctl.runtime.guards.origin import find_nonfinite_gradients
from dtctl.runtime.live.repeated import require_repeated
from dtctl.runtime.moe import balance
from dtctl.runtime.precision import make_autocast, multiply_tensors
from dtctl.runtime.step import Loss, PassSettings, Step
from dtctl.runtime.strategies import Strategy, SupportsRejoin, build_strategy
from dtctl.runtime.strategies.frozen import FrozenParameters
from dtctl.runtime.strategies.single import Single
from dtctl.runtime.telemetry.report import TrainingReport
from dtctl.runtime.token_weighting import compute_gradient_correction
from dtctl.runtime.training_settings import TrainingSettings
from dtctl.train.batch import BatchSizes

if TYPE_CHECKING:
    from dtctl.runtime.position import TrainingPosition
    from dtctl.runtime.trained_model import TrainedModel

PROBED: Final = 2
"""Samples of the pass that compares a divided model; two show the same differences as a whole micro batch."""


class TrainingEngine:
    """Forward and backward passes of one run on this worker.

    Attributes:
        model: the user's model, not wrapped.
        strategy: distribution of the model over the workers, and the module that the loss function is called with.
        feed: reader of batches.
        balance: counts of the tokens that experts are sent; None without experts.
        passes: settings of all passes.
        guard: check for gradients that are not finite.
        memory: recovery of passes that run out of memory.
        passed: passes of the newest step; kept only with live recovery.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        model: nn.Module,
        loss: Loss,
        feed: BatchLoader,
        report: TrainingReport,
        batch: BatchSizes,
    ) -> None:
        """Spread a model over the workers; collective.

        Args:
            settings: settings of the run.
            model: the model as this worker has built it.
            loss: mean loss of a batch, or a sum over its tokens and their number.
            feed: reader of batches.
            report: metrics and progress of the run; it has the clock.
            batch: sizes of a batch.

        Raises:
            PlanError: the model cannot be divided in this way.
        """
        self.settings, self.model, self.loss, self.feed, self.report = settings, model, loss, feed, report
        mixtures = balance.list_counted_layers(model)
        self.strategy = self._distribute_model(batch)
        worker, place = settings.worker, settings.place
        self.balance = balance.ExpertBalance(mixtures, model, worker, place) if mixtures else None
        self.autocast = make_autocast(settings.config.precision, worker.device)
        self.passed: Step | None = None

    def _distribute_model(self, batch: BatchSizes) -> Strategy:
        """Return the strategy that has distributed the model over the workers; collective."""
        settings, worker = self.settings, self.settings.worker
        probe = partial(self._compute_probe_loss, min(batch.micro, settings.samples, PROBED))
        with worker.making_groups():
            return build_strategy(settings.config, worker, settings.place.degrees, batch, self.model, probe)

    def _compute_probe_loss(self, count: int, model: nn.Module) -> torch.Tensor:
        """Return the loss of the first samples, the same on all workers."""
        batch = self.feed.single(np.arange(count, dtype=np.int64))
        loss = self.loss(model, datasets.move_to_device(batch, self.settings.worker.device))
        return loss[0] if isinstance(loss, tuple) else loss

    def attach_optimizer(self, trained: TrainedModel, resize: Callable[[BatchSizes], None]) -> None:
        """Store the trained parameters, and watch the passes for bad gradients, unfrozen parameters and lack of memory.

        Args:
            trained: the model with its optimizer.
            resize: called with the sizes of the smaller passes when memory has run out.
        """
        config, worker, report = self.settings.config, self.settings.worker, self.report
        self.trained, self._resize = trained, resize
        blame = partial(find_nonfinite_gradients, self.model, trained.optimizer.param_groups)
        self.guard = NonFiniteGuard(config.on_nan, trained.loss_scale, worker, blame)
        self.watch_strategy()
        self.passes = PassSettings(
            loss=self.loss,
            feed=self.feed,
            worker=worker,
            autocast=self.autocast,
            loss_scale=trained.loss_scale,
            clock=report.progress,
            mark=report.clock.mark,
            poison=self._poison_loss,
            load=self.balance.load if self.balance is not None else None,
        )

    def _poison_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self.memory.inject_nan(loss)  # looked up at each call, since a change of the strategy replaces the guard

    def watch_strategy(self) -> None:
        """Watch the wrapped model and the parameters of the optimizer."""
        config, worker, elastic = self.settings.config, self.settings.worker, self.settings.is_elastic
        exchanging = worker.backend is not None and not elastic
        self.frozen = FrozenParameters(self.model, self.strategy.name) if exchanging else None
        halve = config.on_oom == "halve" and not elastic
        self.memory = OomGuard(self.strategy.module, self.trained.parameters, worker, wanted=halve)

    def detach_model(self) -> None:
        """Unwrap the model, before the process group is left."""
        self.strategy.release()
        if not isinstance(self.strategy, SupportsRejoin):
            self.strategy = Single(self.model)
        self.watch_strategy()

    def reshard_model(self, batch: BatchSizes) -> bool:
        """Spread the model over a new process group, as at the start of an attempt; collective.

        Returns:
            True if the parameters of the model were replaced, so that the optimizer must take the new ones.
        """
        settings, worker = self.settings, self.settings.worker
        if isinstance(self.strategy, SupportsRejoin):
            with worker.making_groups():
                self.strategy.rejoin(worker, settings.place.degrees)
            limit_groups(settings.config.timeout_s)
            return False
        self.strategy = self._distribute_model(batch)
        return isinstance(self.strategy, SupportsRejoin)

    def compute_gradients(self, position: TrainingPosition) -> torch.Tensor:
        """Compute the gradients of the next global batch, in smaller passes if a worker runs out of memory; collective.

        Returns:
            This worker's share of the mean loss, not yet added up over workers; a scalar.
        """
        worker, strategy = self.settings.worker, self.strategy
        before, self.passed = self.passed, None
        while True:
            self.trained.drop_gradients()
            if self.balance is not None:
                self.balance.load.clear()
            if strategy.present is not None:
                strategy.present.begin()
            step = self.build_step(position)
            self.passed = step if worker.live is not None else None
            loss, short = self.memory.attempt(
                partial(strategy.gradients, step), partial(step.inject_nan_gradients, strategy.module)
            )
            if loss is not None and not short:
                break
            strategy.discard()
            self._resize(reduce_micro_batch(position.batch))
            if worker.is_first:
                ranks, sizes = ", ".join(map(str, short)), position.batch.describe()
                say(f"out of memory on rank {ranks} in step {position.step + 1}: again with {sizes}")
        if before is not None and self.passed is not None:
            require_repeated(before, self.passed, worker)
        self.report.times.record_passes(step.own, step.waited_s)
        if self.frozen is not None:
            self.frozen.require(position.step)
        strategy.finish()
        if step.weights:
            degrees = self.settings.place.degrees
            factor = compute_gradient_correction(step.weights, step.samples, worker, copies=degrees.tp * degrees.cp)
            multiply_tensors(self.trained.list_gradients(), factor)
            loss = loss * factor
        return loss

    def build_step(self, position: TrainingPosition) -> Step:
        """Return the passes of the next step."""
        return Step(
            passes=self.passes,
            number=position.step,
            position=position.samples,
            batch=position.batch,
            schedule=position.schedule,
            replicas=self.settings.averaged_replicas,
        )

    def unscale_gradients(self) -> None:
        """Remove the factor from the gradients that kept them within the range of fp16."""
        scale = self.trained.loss_scale
        if scale is not None:
            multiply_tensors(self.trained.list_gradients(), self.settings.averaged_replicas / scale.scale)

    def clip_gradients(self, *, is_wanted: bool) -> torch.Tensor | None:
        """Scale the gradient down if its norm exceeds the limit.

        Args:
            is_wanted: True if the norm is needed in any case.

        Returns:
            Norm before clipping; None if nothing needs it.
        """
        limit = self.settings.config.clip_norm
        if limit is None:
            return self.strategy.norm() if is_wanted or self.guard.must_check_step else None
        norm = self.strategy.norm()
        if norm.device.type != "cpu" or not norm + 1e-6 <= limit:  # a check on a GPU would wait for its kernels
            self.strategy.clip(limit, norm)
        return norm

    def check_newest_gradient(self, step: int) -> None:
        """Check the gradient of a step before its snapshot is written, unless every step is checked anyway.

        Raises:
            WorkerFailed: the gradient is not finite.
        """
        if not self.guard.must_check_step:
            self.guard.decide_step_action(step, self.strategy.norm())

    def update_parameters(self, step: int) -> None:
        """Make the optimizer's step after `step` earlier ones.

        Raises:
            WorkerFailed: memory has run out.
        """
        try:
            self.trained.optimizer.step()
        except RuntimeError as exc:
            hint = (
                "its state does not depend on the batch: divide it with "
                "`strategy: zero1` or `fsdp`, or look at `dtctl advise`"
            )
            raise_out_of_memory(exc, f"the optimizer's step {step + 1}", hint, self.settings.worker)
            raise
