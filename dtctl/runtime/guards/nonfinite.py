"""Gradients that are not finite: no step is taken with them, and the user chooses what happens then.

The norm of the whole gradient is one number and the same on all workers, so all of them decide alike without
communication. To skip or to go back needs a check in every step, which has to wait for the GPU. To stop does not: a
gradient that is not finite makes all later ones invalid, so it is enough to check when metrics are logged, when the
norm is needed anyway, and before a snapshot is written, which thus never holds invalid values. The step in which it
began is determined then (origin.py).
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch

from dtctl.errors import WorkerFailed
from dtctl.runtime.console import say
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.guards.origin import Spoilt, Trail
from dtctl.runtime.precision import LossScale

Policy = Literal["stop", "skip", "rollback"]

MAX_SKIPPED: Final = 100
"""Steps in a row that may be skipped: after so many the weights cannot be recovered, and GPU hours are not free."""
MAX_ROLLBACKS: Final = 3
"""Rollbacks without a step beyond the one that made the first of them necessary."""


class NonFiniteGuard:
    """Judges every step of one training.

    Attributes:
        skipped: steps that were not taken because of their gradient, in this attempt; fp16's search for a scale aside.
    """

    def __init__(self, policy: Policy, scale: LossScale | None, worker: Worker, spoilt: Spoilt = list) -> None:
        """Prepare the checks; collective over all workers if the run was started again.

        Args:
            policy: what to do about a gradient that is not finite.
            scale: of an fp16 loss, which may be the reason and is then lowered.
            worker: this worker; the first one reports skipped steps.
            spoilt: names of parameters whose gradients are not finite.
        """
        self.skipped = 0
        self._always = policy != "stop" or scale is not None
        self._trail, self._step = Trail(worker, spoilt), 0
        self._policy, self._scale, self._tell = policy, scale, worker.is_first
        self._in_a_row = self._rollbacks = self._furthest = 0

    @property
    def always(self) -> bool:
        """Return whether the next step is to be judged in any case."""
        return self._always or self._step <= self._trail.watched

    def note(self, step: int, loss: torch.Tensor) -> None:
        """A step, by its number from 1, has computed this worker's share of the loss; it is looked at if need be."""
        self._step = step
        self._trail.step(step, loss)

    def judge(
        self, step: int, norm: torch.Tensor | None, *, wanted: bool = True
    ) -> Literal["take", "skip", "rollback"]:
        """Return what to do with the gradient of a step.

        Args:
            step: number of the step, from 1.
            norm: of the whole gradient, the same on all workers; None if it is not known.
            wanted: whether it is to be judged; if not, it is looked at if need be.

        Raises:
            WorkerFailed: the policy is to stop, or skipping and going back did not help.
        """
        if norm is None:
            return "take"
        if not wanted:
            self._trail.norm(step, norm)
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
            self._trail.clear(step)  # the weights have not seen it
            if self._tell and self._scale is not None:
                say(
                    f"step {step} skipped: its gradient is too large for fp16 with the loss scale {scale:g}, which is "
                    f"{self._scale.scale:g} now"
                )
            return "skip"
        self._furthest = max(self._furthest, step)
        if self._policy == "stop":
            origin = self._trail.origin(step)
            raise WorkerFailed(
                f"the gradient of step {origin.step} is not finite: {origin.text}",
                where="train.on_nan",
                hint="lower `lr`, set `clip_norm`, or go on with `on_nan: skip` or `rollback`; snapshots are intact",
            )
        return self._skip(step, value) if self._policy == "skip" else self._go_back(step, value)

    def _skip(self, step: int, value: float) -> Literal["skip"]:
        self._trail.clear(step)
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row > MAX_SKIPPED:
            raise WorkerFailed(
                f"the gradients of {MAX_SKIPPED} steps in a row, up to step {step}, are not finite",
                where="train.on_nan",
                hint="the weights cannot be recovered; lower `lr` and go on from an older snapshot",
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
