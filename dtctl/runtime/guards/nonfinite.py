"""Check for gradients that are not finite: no step is taken with them, and a setting chooses the reaction.

The norm of the whole gradient is one number and the same on all workers, so all of them decide the same without
communication. The policies `skip` and `rollback` need a check in every step, which waits for the GPU. The policy `stop`
does not: after a gradient that is not finite all later ones are invalid, too, so it is enough to check when metrics are
logged, when the
norm is needed anyway, and before a snapshot is written, so that a snapshot never holds invalid values. The step in
which it began is determined afterwards (origin.py).
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch

from dtctl.errors import WorkerFailed
from dtctl.runtime.console import say
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.guards.origin import LossHistory, Spoilt
from dtctl.runtime.precision import LossScale

Policy = Literal["stop", "skip", "rollback"]

MAX_SKIPPED: Final = 100
"""Number of consecutive steps that may be skipped; after that the weights cannot recover, and GPU hours are lost."""
MAX_ROLLBACKS: Final = 3
"""Largest number of rollbacks before training has passed the step that caused the first of them."""


class NonFiniteGuard:
    """Check of the gradients of one run.

    Attributes:
        skipped: number of steps in this attempt that were skipped because of their gradient, except while fp16 searches
            for a scale.
    """

    def __init__(self, policy: Policy, scale: LossScale | None, worker: Worker, spoilt: Spoilt = list) -> None:
        """Prepare the checks; collective over all workers if the run was restarted.

        Args:
            policy: reaction to a gradient that is not finite.
            scale: scale of an fp16 loss, which may be the reason and is then lowered.
            worker: this worker; the first one reports skipped steps.
            spoilt: returns the names of parameters whose gradients are not finite.
        """
        self.skipped = 0
        self._always = policy != "stop" or scale is not None
        self._trail, self._step = LossHistory(worker, spoilt), 0
        self._policy, self._scale, self._tell = policy, scale, worker.is_first
        self._in_a_row = self._rollbacks = self._furthest = 0

    @property
    def must_check_step(self) -> bool:
        """Return whether the next step must be checked in any case."""
        return self._always or self._step <= self._trail.watched

    def record_step_loss(self, step: int, loss: torch.Tensor) -> None:
        """Store this worker's share of the loss of a step, counted from 1; it is read only if needed."""
        self._step = step
        self._trail.add_loss(step, loss)

    def decide_step_action(
        self, step: int, norm: torch.Tensor | None, *, wanted: bool = True
    ) -> Literal["take", "skip", "rollback"]:
        """Return the action for the gradient of a step.

        Args:
            step: number of the step, from 1.
            norm: norm of the whole gradient, the same on all workers; None if unknown.
            wanted: True if the gradient must be checked; otherwise it is checked only if needed.

        Raises:
            WorkerFailed: the policy is to stop, or skipping and going back have not helped.
        """
        if norm is None:
            return "take"
        if not wanted:
            self._trail.add_norm(step, norm)
            return "take"
        value = float(norm)
        scale = None if self._scale is None else self._scale.scale
        explained = self._scale is not None and self._scale.update(finite=math.isfinite(value))
        if math.isfinite(value):
            self._in_a_row = 0
            self._trail.clear(step)
            if step > self._furthest:
                self._rollbacks = 0
            return "take"
        if explained:
            self._trail.clear(step)  # the gradient was not applied to the weights
            if self._tell and self._scale is not None:
                say(
                    f"step {step} skipped: its gradient is too large for fp16 with the loss scale {scale:g}, which is "
                    f"{self._scale.scale:g} now"
                )
            return "skip"
        self._furthest = max(self._furthest, step)
        if self._policy == "stop":
            origin = self._trail.find_origin(step)
            raise WorkerFailed(
                f"the gradient of step {origin.step} is not finite: {origin.text}",
                where="train.on_nan",
                hint="lower `lr`, set `clip_norm`, or continue with `on_nan: skip` or `rollback`; snapshots are intact",
            )
        return self._skip_step(step, value) if self._policy == "skip" else self._go_back(step, value)

    def _skip_step(self, step: int, value: float) -> Literal["skip"]:
        self._trail.clear(step)
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row > MAX_SKIPPED:
            raise WorkerFailed(
                f"the gradients of {MAX_SKIPPED} steps in a row, up to step {step}, are not finite",
                where="train.on_nan",
                hint="the weights cannot be recovered; lower `lr` and continue from an older snapshot",
            )
        if self._tell:
            say(f"step {step} skipped: its gradient is not finite ({value})")
        return "skip"

    def _go_back(self, step: int, value: float) -> Literal["rollback"]:
        self._trail.clear(step)
        self._rollbacks += 1
        if self._rollbacks > MAX_ROLLBACKS:
            raise WorkerFailed(
                f"the gradient of step {step} is not finite ({value}), after going back {MAX_ROLLBACKS} times",
                where="train.on_nan",
                hint="lower `lr` or set `clip_norm`",
            )
        return "rollback"
