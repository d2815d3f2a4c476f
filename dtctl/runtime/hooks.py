"""Code of a program that is called after a step, an evaluation or a snapshot.

Hooks run on every worker. Their decisions must be the same on all. Only scores of an evaluation are global, so a hook
can end a run or change its learning rate only after an evaluation, and the workers compare these decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.exactness.stateful import is_stateful
from dtctl.runtime.snapshot.json_collectives import gather_json

if TYPE_CHECKING:
    from dtctl.runtime.distributed.worker import Worker
    from dtctl.runtime.exactness.verdict import ExactnessVerdict

STATE: Final = "hooks."
"""Prefix of a hook's number in the names of `extra_state`."""
CHECKED: Final = (1, 2, 10)
"""Steps after which a hook that does not declare it must not have changed the model."""


class TrainingView:
    """A training as its hooks see it.

    Attributes:
        step: optimizer steps done.
        steps: length of the training.
        model: as this worker has it.
        optimizer: of its parameters.
        loss_scale: factor of the loss with fp16; None otherwise.
        skipped_steps: steps of this attempt whose gradient was not finite; without steps in which fp16 searches its
        scale.
        verdict: result of repeating the steps after the snapshot that this attempt resumed from; None without a resume,
            and until it is known.
    """

    def __init__(
        self,
        step: int,
        steps: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_scale: float | None = None,
        skipped_steps: int = 0,
        verdict: ExactnessVerdict | None = None,
    ) -> None:
        """Show a training after a step; see the attributes."""
        self.step, self.steps, self.model, self.optimizer = step, steps, model, optimizer
        self.loss_scale, self.skipped_steps, self.verdict = loss_scale, skipped_steps, verdict
        self._is_decided = True
        self.is_stopped, self.rate_factor = False, 1.0

    def stop(self) -> None:
        """End the run after this step, as if it were the last one.

        Raises:
            PlanError: the call is not in a hook for evaluations, in which all workers decide the same.
        """
        self._require_evaluation("stop")
        self.is_stopped = True

    def scale_rate(self, factor: float) -> None:
        """Multiply the learning rate of all later steps.

        Raises:
            PlanError: the call is not in a hook for evaluations, in which all workers decide the same.
        """
        self._require_evaluation("scale_rate")
        self.rate_factor *= factor

    def _require_evaluation(self, name: str) -> None:
        if self._is_decided:
            raise PlanError(
                f"{name}() was called in a hook in which workers may decide differently",
                where="a hook of the Trainer",
                hint="call it in `after_evaluation`, whose scores are the same on all workers",
            )


class Hook:
    """Base class of hooks; override only the methods that you need.

    The state of a hook with `state_dict` and `load_state_dict` is saved and restored like that of `extra_state`.

    Attributes:
        changes_training: True if `after_step` changes tensors that later steps use, such as a teacher that follows the
            model. Then it is called in every step that is computed, also in those that only confirm a resume.
    """

    changes_training: bool = False

    def after_step(self, training: TrainingView) -> None:
        """Run code after an optimizer step.

        With `require_exact`, the calls of a resumed run are postponed until its verdict is known, except for hooks with
        `changes_training`.
        """

    def after_evaluation(self, training: TrainingView, scores: Mapping[str, float]) -> None:
        """Run code after an evaluation.

        Args:
            training: the run after the step.
            scores: scores over all workers, by the names under which they are logged, such as `val_loss`.
        """

    def after_snapshot(self, training: TrainingView) -> None:
        """Run code after a snapshot was begun, which may not be durable yet."""


class HookRunner:
    """The hooks of one run."""

    def __init__(self, hooks: Sequence[Hook], worker: Worker) -> None:
        """Store the hooks in the order of their calls.

        Args:
            hooks: hooks of the program.
            worker: this worker.
        """
        self._hooks, self._worker = list(hooks), worker
        self._held: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def list_stateful(self) -> dict[str, Any]:
        """Return the hooks that have state, by their names in `extra_state`."""
        return {f"{STATE}{number}": hook for number, hook in enumerate(self._hooks) if is_stateful(hook)}

    def call_step_hooks(self, view: TrainingView, *, is_held: bool) -> None:
        """Call `after_step` of all hooks, or postpone the calls of those that do not change the training.

        Args:
            view: view of the run.
            is_held: True if results of training may not be kept yet.

        Raises:
            PlanError: a hook has changed the model, and does not declare it.
        """
        if not is_held:
            self.release()
        for hook in self._hooks:
            if is_held and not hook.changes_training:
                self._held.append(partial(hook.after_step, view))
            elif view.step in CHECKED and not hook.changes_training:
                _call_unchanging_hook(hook, view)
            else:
                hook.after_step(view)

    def repeat_step_hooks(self, view: TrainingView) -> None:
        """Call `after_step` of the hooks that change the training, after a step that is only recorded."""
        for hook in self._hooks:
            if hook.changes_training:
                hook.after_step(view)

    def call_snapshot_hooks(self, view: TrainingView) -> None:
        """Call `after_snapshot` of all hooks."""
        self.release()
        for hook in self._hooks:
            hook.after_snapshot(view)

    def release(self) -> None:
        """Make the calls that were postponed."""
        held, self._held = self._held, []
        for call in held:
            call()

    def call_evaluation_hooks(self, view: TrainingView, scores: Mapping[str, float]) -> None:
        """Call `after_evaluation` of all hooks; collective over all workers.

        Raises:
            PlanError: the workers have decided differently; raised on every worker.
        """
        self.release()
        view._is_decided = False
        for hook in self._hooks:
            hook.after_evaluation(view, scores)
        view._is_decided = True
        decided = gather_json([view.is_stopped, view.rate_factor], self._worker)
        if any(each != decided[0] for each in decided):
            ranks = "; ".join(f"rank {rank}: stop {stop}, rate x {rate:g}" for rank, (stop, rate) in enumerate(decided))
            raise PlanError(
                f"hooks have decided differently after step {view.step}: {ranks}",
                where="a hook of the Trainer",
                hint="decide by the scores alone, which are the same on all workers",
            )


def _call_unchanging_hook(hook: Hook, view: TrainingView) -> None:
    before = list(_list_versions(hook, view.model))
    hook.after_step(view)
    if before != list(_list_versions(hook, view.model)):
        raise PlanError(
            f"the hook {type(hook).__qualname__} changes tensors in after_step, which later steps may use",
            where=f"a hook of the Trainer, after step {view.step}",
            hint="set `changes_training = True` in its class, so that it is called in all steps that are computed, "
            "also in those that confirm a resume",
        )


def _list_versions(hook: Hook, model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield address and number of changes of the tensors of a model, and of modules that are attributes of a hook."""
    for module in (model, *(value for value in vars(hook).values() if isinstance(value, nn.Module))):
        for tensor in (*module.parameters(), *module.buffers()):
            yield id(tensor), tensor._version
