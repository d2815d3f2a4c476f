"""Code of a program that is called after a step, after an evaluation and after a snapshot.

Hooks run on every worker. What they decide must be the same on all: an evaluation has global scores, so a training is
ended, or its learning rate changed, there and nowhere else, and workers compare what they have decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.exactness.stateful import is_stateful
from dtctl.runtime.snapshot.json_collectives import gathered_json

if TYPE_CHECKING:
    from dtctl.runtime.distributed.worker import Worker

STATE: Final = "hooks."
"""Prefix of the number of a hook in the names of `extra_state`."""


class TrainingView:
    """A training as its hooks see it."""

    def __init__(self, step: int, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Show a training after a step.

        Args:
            step: optimizer steps done.
            steps: length of the training.
            model: as this worker has it.
            optimizer: of its parameters.
        """
        self.step, self.steps, self.model, self.optimizer = step, steps, model, optimizer
        self._is_decided = True
        self.is_stopped, self.rate_factor = False, 1.0

    def stop(self) -> None:
        """End the training with this step, as if it had been its last one.

        Raises:
            PlanError: this is no evaluation, after which all workers decide alike.
        """
        self._require_evaluation("stop")
        self.is_stopped = True

    def scale_rate(self, factor: float) -> None:
        """Multiply the learning rate of all later steps.

        Raises:
            PlanError: this is no evaluation, after which all workers decide alike.
        """
        self._require_evaluation("scale_rate")
        self.rate_factor *= factor

    def _require_evaluation(self, name: str) -> None:
        if self._is_decided:
            raise PlanError(
                f"{name}() was called where workers may decide differently",
                where="a hook of the Trainer",
                hint="call it in `after_evaluation`, whose scores are the same on all workers",
            )


class Hook:
    """The base of hooks; a method that is not wanted is left out.

    A hook with `state_dict` and `load_state_dict` is part of the state of the training, as `extra_state` is.
    """

    def after_step(self, training: TrainingView) -> None:
        """Be called after an optimizer step."""

    def after_evaluation(self, training: TrainingView, scores: Mapping[str, float]) -> None:
        """Be called after an evaluation.

        Args:
            training: after the step.
            scores: by the names they are logged under, `val_loss`; over all workers.
        """

    def after_snapshot(self, training: TrainingView) -> None:
        """Be called after a snapshot was begun; it may not be durable yet."""


class Hooks:
    """The hooks of one training."""

    def __init__(self, hooks: Sequence[Hook], worker: Worker) -> None:
        """Take hooks, in the order in which they are called.

        Args:
            hooks: of the program.
            worker: this worker.
        """
        self._hooks, self._worker = list(hooks), worker
        self._held: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def list_stateful(self) -> dict[str, Any]:
        """Return those that have a state, by a name for it."""
        return {f"{STATE}{number}": hook for number, hook in enumerate(self._hooks) if is_stateful(hook)}

    def call(self, moment: str, view: TrainingView, *, is_held: bool) -> None:
        """Call `after_step` or `after_snapshot` of all, or keep that for later.

        Args:
            moment: which method.
            view: of the training.
            is_held: whether nothing may be kept yet of what is trained.
        """
        self._held += [partial(getattr(hook, moment), view) for hook in self._hooks]
        if not is_held:
            self.release()

    def release(self) -> None:
        """Make the calls that were held back."""
        held, self._held = self._held, []
        for call in held:
            call()

    def decide(self, view: TrainingView, scores: Mapping[str, float]) -> None:
        """Call `after_evaluation` of all; collective over all workers.

        Raises:
            PlanError: workers have decided differently; on every worker.
        """
        self.release()
        view._is_decided = False
        for hook in self._hooks:
            hook.after_evaluation(view, scores)
        view._is_decided = True
        decided = gathered_json([view.is_stopped, view.rate_factor], self._worker)
        if any(each != decided[0] for each in decided):
            ranks = "; ".join(f"rank {rank}: stop {stop}, rate x {rate:g}" for rank, (stop, rate) in enumerate(decided))
            raise PlanError(
                f"hooks have decided differently after step {view.step}: {ranks}",
                where="a hook of the Trainer",
                hint="decide by the scores alone, which are the same on all workers",
            )
