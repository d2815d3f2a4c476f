"""Passes of an optimizer step, as strategies use them: a worker's micro batches, forward and backward."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from dtctl.runtime.data_loading import datasets
from dtctl.runtime.data_loading.feed import BatchLoader
from dtctl.runtime.data_loading.order import Indices, WorkerSampler
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.explain import explain_error
from dtctl.runtime.moe import accounting
from dtctl.runtime.moe.accounting import ExpertLoad
from dtctl.runtime.precision import LossScale
from dtctl.runtime.token_weighting import Weighted
from dtctl.train.batch import BatchSizes

Loss = Callable[[nn.Module, Any], "torch.Tensor | Weighted"]
"""Function that returns the mean loss of a batch, a scalar, or a sum and its weight (see token_weighting.py). It is
called with the model as the strategy wraps it."""


class StepProgressReceiver(Protocol):
    """Receiver of the progress of a step."""

    def forward(self) -> None:
        """Report that a forward pass begins."""

    def backward(self) -> None:
        """Report that a backward pass begins."""


@dataclass(slots=True)
class StepResult:
    """Result of a step, for its line of metrics."""

    loss: torch.Tensor | None
    """This worker's share of the mean loss; None if it has taken over the step from another worker."""
    lr: float
    norm: torch.Tensor | None
    """Norm of the gradient before clipping."""
    use: Mapping[str, float] = field(default_factory=dict)
    """Figures of how evenly experts were used, if the model has any."""
    mean: float | None = None
    """Mean loss of all workers; computed early only with live recovery, where a worker may be lost before the line of
    metrics is written."""
    is_taken: bool = True
    """True if the optimizer has made its step; False if the gradient was not finite."""
    is_logged: bool = False
    """True if the step has a line of metrics."""


@dataclass(slots=True, kw_only=True)
class PassSettings:
    """Settings of the passes of a run; the same in all of its steps."""

    loss: Loss
    feed: BatchLoader
    worker: Worker
    autocast: AbstractContextManager[Any] | None
    """Context that sets the number format of forward passes; None for fp32."""
    loss_scale: LossScale | None
    clock: StepProgressReceiver
    mark: Callable[[], Any]
    """Function that returns the current time as a mark of `StepTimes`."""
    poison: Callable[[torch.Tensor], torch.Tensor]
    """Function that makes the gradient of a loss NaN on all workers."""
    load: ExpertLoad | None = None
    """Counter of the tokens that experts are sent."""


@dataclass(slots=True, kw_only=True)
class Step:
    """The passes of one step on this worker."""

    passes: PassSettings
    number: int
    """Number of steps done before this one."""
    position: int
    """Samples that all workers together have consumed before."""
    batch: BatchSizes
    schedule: WorkerSampler
    replicas: int
    """Number of workers over which the gradients of parts of a global batch are averaged; 1 if they are added up."""
    micro_batches: list[Indices] = field(default_factory=list)
    """Sample indices of this worker's micro batches; some are empty at the end of a run."""
    samples: int = 0
    """Samples of the global batch."""
    weights: list[torch.Tensor] = field(default_factory=list)
    """Weights of the losses of the passes, if these were sums; scalars on the worker's device."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Losses of the passes that this worker has made; scalars on its device."""
    began: Any = None
    """Mark of the time when the step began."""
    forwarded: Any = None
    """Mark of the time when the last forward pass ended."""
    own: tuple[Any, Any] | None = None
    """Marks of the begin and the end of the time before this worker waits for others; it ends with the last forward
    pass."""
    waited_s: float = 0.0
    """Seconds that this worker waited for data."""

    def __post_init__(self) -> None:
        """Look up the micro-batches and samples of this step."""
        self.began = self.passes.mark()
        self.micro_batches = self.schedule(self.position)
        self.samples = self.schedule.samples(self.position)

    @property
    def scale(self) -> float:
        """Return the factor of the losses in addition to their weights; 1 except with fp16.

        The weights assume that gradients are averaged over replicas after the backward pass. Without the division by
        the number of replicas, gradients on several workers would overflow fp16 where those of one process do not.
        """
        scale = self.passes.loss_scale
        return 1.0 if scale is None else scale.scale / self.replicas

    def read(self, index: int) -> Any:
        """Return the micro batch of this number on the worker's device; a stand-in if it is empty.

        An empty micro batch needs a pass, too, since every exchange needs all workers.
        """
        indices, feed = self.micro_batches[index], self.passes.feed
        if not len(indices):
            return self.stand_in()
        asked_s = time.perf_counter()
        batch = feed.batch(indices, self.schedule, self.position, index)
        self.waited_s += time.perf_counter() - asked_s
        return datasets.move_to_device(batch, self.passes.worker.device)

    def read_first_batch(self) -> Any:
        """Return the first micro batch, outside of the usual order of reading, on the worker's device."""
        indices = self.micro_batches[0] if len(self.micro_batches[0]) else self.schedule.stand_in
        return datasets.move_to_device(self.passes.feed.single(indices), self.passes.worker.device)

    def stand_in(self) -> Any:
        """Return a micro batch for a pass that does not count, on the worker's device."""
        return datasets.move_to_device(self.passes.feed.single(self.schedule.stand_in), self.passes.worker.device)

    def loss(self, model: nn.Module, batch: Any, samples: int, weight: float) -> torch.Tensor:
        """Return the mean loss of a micro batch. A sum is divided by the number of samples, and its weight is recorded.

        Args:
            model: the module that the loss function is called with.
            batch: the micro batch, on the worker's device.
            samples: number of its samples that count; 0 for a stand-in.
            weight: factor of the loss in the backward pass.
        """
        passes = self.passes
        with accounting.ForwardPass(weight, samples, passes.load):
            if passes.autocast is None:
                loss = passes.loss(model, batch)
            else:
                with passes.autocast:
                    loss = passes.loss(model, batch)
        if not isinstance(loss, tuple):
            return loss
        total, amount = loss
        if not samples or not isinstance(amount, torch.Tensor):
            # Filled on the device: a copy from the host would wait for all kernels of the GPU.
            amount = torch.full((), float(amount) if samples else 0.0, device=total.device)
        self.weights.append(amount.detach().to(total.device, torch.float32))
        return total / max(1, samples)

    def backward(
        self,
        model: nn.Module,
        batch: Any,
        weight: float,
        samples: int,
        *,
        beside: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> torch.Tensor:
        """Add the gradients of a micro batch to the existing ones.

        Args:
            model: the module that the loss function is called with.
            batch: the micro batch, on the worker's device.
            weight: weight of the mean loss; NaN makes the gradients of all workers NaN.
            samples: number of its samples that count; 0 for a stand-in.
            beside: called after the forward pass; returns scalars that the backward pass starts from in addition to the
                loss.

        Returns:
            The loss times its weight, detached; a scalar.

        Raises:
            PlanError: torch cannot run the passes with one of the configured settings.
        """
        passes = self.passes
        try:
            passes.clock.forward()
            scale = self.scale
            loss = self.loss(model, batch, samples, weight * scale)
            if weight != weight:
                loss = passes.poison(loss)
            elif weight != 1.0:
                loss = loss * weight
            self.losses.append(loss.detach())
            passes.clock.backward()
            self.forwarded = passes.mark()
            scaled = loss if passes.loss_scale is None else loss.float() * scale
            torch.autograd.backward([scaled, *beside()])
        except (AssertionError, RuntimeError, ValueError) as exc:
            known = explain_error(exc)
            if known is None:
                raise
            raise known from exc
        return loss.detach()

    def inject_nan_gradients(self, model: nn.Module) -> None:
        """Run a short pass whose gradients are NaN on all workers, in place of a pass that failed."""
        self.backward(model, self.stand_in(), math.nan, 2)
