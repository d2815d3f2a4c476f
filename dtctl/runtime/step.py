"""One optimizer step, as strategies see it: the micro batches of a worker, and their forward and backward passes."""

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
from dtctl.runtime.data_loading.feed import Feed
from dtctl.runtime.data_loading.order import Indices, Schedule
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.explain import explained
from dtctl.runtime.moe import accounting
from dtctl.runtime.moe.accounting import Load
from dtctl.runtime.precision import LossScale
from dtctl.runtime.token_weighting import Weighted
from dtctl.train.batch import Batch

Loss = Callable[[nn.Module, Any], "torch.Tensor | Weighted"]
"""Mean loss of the samples of a batch, a scalar, or a sum and how much it is a sum of (see token_weighting.py); called
with the model as the strategy wraps it."""


class Clock(Protocol):
    """Receiver of the progress of a step."""

    def forward(self) -> None:
        """A forward pass begins."""

    def backward(self) -> None:
        """A backward pass begins."""


@dataclass(slots=True)
class StepResult:
    """Result of a step, for its line of metrics."""

    loss: torch.Tensor | None
    """This worker's share of the mean; None for one that has taken over the step from another worker."""
    lr: float
    norm: torch.Tensor | None
    """Norm of the gradient before clipping."""
    use: Mapping[str, float] = field(default_factory=dict)
    """Figures of how evenly experts were used, if the model has any."""
    mean: float | None = None
    """Mean loss of all workers; known before the line is written where a worker may be lost in between and replaced."""
    is_taken: bool = True
    """True if the optimizer has made its step; not if the gradient was not finite."""
    is_logged: bool = False
    """True if the step has a line of metrics."""


@dataclass(slots=True, kw_only=True)
class Passes:
    """Settings of the passes of a run; the same in all of its steps."""

    loss: Loss
    feed: Feed
    worker: Worker
    autocast: AbstractContextManager[Any] | None
    """The number format of forward passes; None if that is fp32."""
    loss_scale: LossScale | None
    clock: Clock
    mark: Callable[[], Any]
    """Clock of `StepTimes`."""
    poison: Callable[[torch.Tensor], torch.Tensor]
    """Function that makes the gradient of a loss NaN on all workers."""
    load: Load | None = None
    """Counts what experts are sent."""


@dataclass(slots=True, kw_only=True)
class Step:
    """The passes of one step on this worker."""

    passes: Passes
    number: int
    """Steps done before."""
    position: int
    """Samples consumed before, over all workers."""
    batch: Batch
    schedule: Schedule
    replicas: int
    """Workers over which the gradients of parts of a global batch are averaged; 1 where they are added up."""
    micro_batches: list[Indices] = field(default_factory=list)
    """The indices of this worker's; some are empty at the end of a training."""
    samples: int = 0
    """Samples of the global batch."""
    weights: list[torch.Tensor] = field(default_factory=list)
    """Weights of the losses of the passes, if these were sums; scalars on the worker's device."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Losses of the passes that this worker has made; scalars on its device."""
    began: Any = None
    """Mark of when."""
    forwarded: Any = None
    """Mark of when the last forward pass was done."""
    own: tuple[Any, Any] | None = None
    """Begin and end of the time in which this worker waited for no other: to the end of the last forward pass."""
    waited_s: float = 0.0
    """Seconds that it waited for data."""

    def __post_init__(self) -> None:
        """Look up the micro-batches and samples of this step."""
        self.began = self.passes.mark()
        self.micro_batches = self.schedule(self.position)
        self.samples = self.schedule.samples(self.position)

    @property
    def scale(self) -> float:
        """Factor of the losses beside their weights; 1 but with fp16.

        Weights are those of a mean over replicas, which comes after the backward pass. Without this share, gradients
        would overflow fp16 on several workers where they do not in one process.
        """
        scale = self.passes.loss_scale
        return 1.0 if scale is None else scale.scale / self.replicas

    def read(self, index: int) -> Any:
        """Return the micro batch of that number, on the worker's device; a stand-in for an empty one.

        The peers expect this worker's part of every exchange.
        """
        indices, feed = self.micro_batches[index], self.passes.feed
        if not len(indices):
            return self.stand_in()
        asked_s = time.perf_counter()
        batch = feed.batch(indices, self.schedule, self.position, index)
        self.waited_s += time.perf_counter() - asked_s
        return datasets.to_device(batch, self.passes.worker.device)

    def first_alone(self) -> Any:
        """Return the first micro batch, read out of turn, on the worker's device."""
        indices = self.micro_batches[0] if len(self.micro_batches[0]) else self.schedule.stand_in
        return datasets.to_device(self.passes.feed.single(indices), self.passes.worker.device)

    def stand_in(self) -> Any:
        """Return a micro batch for a pass that does not count, on the worker's device."""
        return datasets.to_device(self.passes.feed.single(self.schedule.stand_in), self.passes.worker.device)

    def loss(self, model: nn.Module, batch: Any, samples: int, weight: float) -> torch.Tensor:
        """Return the mean loss of a micro batch; a loss with weights is divided by the samples, and the weight noted.

        Args:
            model: what the loss function is called with.
            batch: the micro batch, on the worker's device.
            samples: how many of it count; 0 for a stand-in.
            weight: what the backward pass multiplies the loss with.
        """
        passes = self.passes
        with accounting.Pass(weight, samples, passes.load):
            if passes.autocast is None:
                loss = passes.loss(model, batch)
            else:
                with passes.autocast:
                    loss = passes.loss(model, batch)
        if not isinstance(loss, tuple):
            return loss
        total, amount = loss
        if not samples or not isinstance(amount, torch.Tensor):
            # Filled there: to copy a number of the host's to a GPU waits for all that it has to do.
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
        """Add the gradients of a micro batch to those that are there.

        Args:
            model: what the loss function is called with.
            batch: the micro batch, on the worker's device.
            weight: of its mean loss; NaN spoils the gradients of all workers.
            samples: how many of it count; 0 for a stand-in.
            beside: called after the forward pass; scalars that the backward pass goes back from as well.

        Returns:
            The loss times its weight, detached; a scalar.

        Raises:
            PlanError: torch cannot do it the way that a key of the configuration asks for.
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
            known = explained(exc)
            if known is None:
                raise
            raise known from exc
        return loss.detach()

    def spoil(self, model: nn.Module) -> None:
        """Run a short pass whose gradients are NaN on all workers, in place of one that failed."""
        self.backward(model, self.stand_in(), math.nan, 2)
