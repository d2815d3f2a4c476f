"""Optimizer step of a session: backward passes, clipping, steps of optimizers, gradient scaler and schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.exactness.record import StepRecorder
from dtctl.runtime.optim import needs_step_arguments
from dtctl.runtime.own_loop.several_models import WHERE, Optimizers

Schedules = Any
"""A scheduler of the learning rate, several by the names of their optimizers, or None."""


class OptimizerStep:
    """The optimizer step under way, and its passes so far.

    Attributes:
        passes: number of backward passes done.
        loss: loss of this worker over the passes so far; between two steps, that of the newest step. None if unknown.
    """

    def __init__(self, optimizer: Optimizers, schedule: Schedules, scaler: Any, clip: float | None) -> None:
        """Store the objects that the program has made.

        Args:
            optimizer: optimizer of the model's parameters; several by name.
            schedule: scheduler of its learning rate; several by the names of their optimizers; or None.
            scaler: torch.amp.GradScaler, or None.
            clip: largest 2-norm of the gradient of each update; None: no limit.

        Raises:
            PlanError: a schedule has the name of no optimizer, or its step needs a score.
        """
        self._optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
        self._schedules = list_schedules(schedule)
        for name in self._schedules.keys() - {*self._optimizers, ""}:
            raise PlanError(
                f"the schedule {name} has no optimizer of this name",
                where=WHERE,
                hint=f"the optimizers are {', '.join(self._optimizers)}",
            )
        for each in self._schedules.values():
            if needs_step_arguments(each):
                raise PlanError(
                    f"{type(each).__qualname__}.step needs a score, and a session calls it after each optimizer step, "
                    "without one",
                    where=WHERE,
                    hint='give it as `extra_state={"plateau": schedule}`, and call its step after an evaluation, with '
                    "a score that is the same on all workers",
                )
        self._with_closure = {
            name: type(each).__qualname__ for name, each in self._optimizers.items() if needs_step_arguments(each)
        }
        self._scaler, self._clip = scaler, clip
        self._updated: dict[str, None] = {}
        """Optimizers that were stepped in the step under way."""
        self._norms: dict[str, torch.Tensor] = {}
        """Norm of the gradient of each `update` in the step under way, by the names of its optimizers."""
        self.passes = 0
        self.loss: torch.Tensor | None = None

    @property
    def lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(next(iter(self._optimizers.values())).param_groups[0]["lr"])

    @property
    def named_rates(self) -> dict[str, float]:
        """Return the learning rate of each of several optimizers, as values of a line of metrics."""
        named = self._optimizers if len(self._optimizers) > 1 else {}
        return {f"lr_{name}": float(each.param_groups[0]["lr"]) for name, each in named.items()}

    def pop_update_norms(self, *, is_logged: bool) -> tuple[torch.Tensor | None, dict[str, float]]:
        """Return the norm over all updates of a step, and that of each of several; None if none is logged."""
        norms, self._norms = self._norms, {}
        if not (norms and is_logged):  # to read a norm would wait for the kernels of a GPU
            return None, {}
        named = norms if len(self._optimizers) > 1 else {}
        return torch.stack([*norms.values()]).norm(), {f"grad_norm_{name}": float(norm) for name, norm in named.items()}

    def record_gradient(self, recorder: StepRecorder, number: int) -> None:
        """Record the loss and the gradient of a step as far as its record needs them."""
        if self.loss is not None:
            recorder.losses.record_loss(number, self.loss)
        if recorder.is_wanted(number):
            recorder.take_gradient(number, self.loss)

    def run_backward(self, loss: torch.Tensor, batches: int) -> bool:
        """Run the backward pass of a batch; return True if it was the last one of the step.

        Args:
            loss: loss of the batch, a scalar.
            batches: number of batches in this step; all have the same weight.
        """
        share = loss / batches if batches > 1 else loss
        self.scale_backward(share)
        self.loss = share.detach() if self.passes == 0 or self.loss is None else self.loss + share.detach()
        self.passes += 1
        if self.passes < batches:
            return False
        self._unscale(self._optimizers)
        return True

    def scale_backward(self, loss: torch.Tensor) -> None:
        """Run a backward pass, with the factor of the gradient scaler."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _unscale(self, names: Iterable[str]) -> None:
        for name in names if self._scaler is not None else ():
            if self._list_trained_parameters([name]):
                self._scaler.unscale_(self._optimizers[name])

    def clip_gradient(self, names: Iterable[str] | None = None, *, is_logged: bool = False) -> torch.Tensor | None:
        """Clip the gradient, and return its norm before; None if neither clipping nor a log needs it.

        Args:
            names: names of the optimizers whose parameters have the gradient. None: all.
            is_logged: True if the norm is needed in any case.
        """
        if self._clip is None and not is_logged:
            return None
        # torch takes no norm over tensors on several meshes, such as those of tensor parallel and undivided ones.
        meshes: dict[Any, list[nn.Parameter]] = {}
        for parameter in self._list_trained_parameters(self._optimizers if names is None else names):
            meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
        norms = [_measure_norm(parameters) for parameters in meshes.values()]
        total = norms[0] if len(norms) == 1 else torch.stack(norms).norm() if norms else torch.zeros(())
        if self._clip is not None:
            for parameters in meshes.values():
                _scale_gradients(parameters, self._clip, total)
        return total

    def _list_trained_parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        """Return the parameters of some optimizers that have a gradient."""
        groups = [group for name in names for group in self._optimizers[name].param_groups]
        return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]

    def apply(self) -> None:
        """Step all optimizers and schedules, and set the gradients to zero."""
        self._step_optimizers(list(self._optimizers))
        self.end_updates()

    def update(self, names: Sequence[str], *, is_logged: bool = False) -> None:
        """Clip the gradient of some optimizers, step them, and set all gradients to zero.

        Args:
            names: names of the optimizers; empty for all.
            is_logged: True if the norm of the gradient is needed without clipping, too.

        Raises:
            PlanError: there is no optimizer of this name, or its parameters have no gradient.
        """
        chosen = list(names or self._optimizers)
        for name in chosen:
            if name not in self._optimizers:
                known = ", ".join(filter(None, self._optimizers)) or "a single one, without a name"
                raise PlanError(f"there is no optimizer {name}", where=f"{WHERE}, update", hint=f"there is {known}")
            if not self._list_trained_parameters([name]):
                raise PlanError(
                    f"no parameter of the optimizer{f' {name}' if name else ''} has a gradient",
                    where=f"{WHERE}, update",
                    hint="each update sets all gradients to zero: call backward before it, and name optimizers that "
                    'take a step from the same gradient in one call: update("actor", "critic")',
                )
        self._unscale(chosen)
        norm = self.clip_gradient(chosen, is_logged=is_logged)
        if norm is not None:
            self._norms["_".join(chosen)] = norm.detach().float()
        self._step_optimizers(chosen)

    def _step_optimizers(self, names: Sequence[str]) -> None:
        """Step optimizers, and set all gradients to zero."""
        for name in names:
            optimizer = self._optimizers[name]
            if name in self._with_closure:
                raise PlanError(
                    f"{self._with_closure[name]}.step needs a closure, and a session calls it without one",
                    where=WHERE,
                    hint="call `optimizer.step(closure)` in your loop, and then `s.end_step(loss)`",
                )
            if self._scaler is None:
                optimizer.step()
            elif self._list_trained_parameters([name]):  # the scaler refuses an optimizer without gradients
                self._scaler.step(optimizer)
            self._updated[name] = None
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def end_updates(self) -> None:
        """Step the schedules of the optimizers that were stepped, once each, and let the scaler choose its factor."""
        updated, self._updated = self._updated, {}
        if not updated:
            return
        is_taken = True
        if self._scaler is not None:
            scale = self._scaler.get_scale()
            self._scaler.update()
            is_taken = self._scaler.get_scale() >= scale  # the scaler lowers its scale after a skipped step
        for name, schedule in self._schedules.items():
            if is_taken and (name in updated or (not name and len(updated) == len(self._optimizers))):
                schedule.step()


def list_schedules(schedule: Schedules) -> dict[str, Any]:
    """Return the schedules by the names of their optimizers; a single one has no name."""
    if isinstance(schedule, Mapping):
        return dict(schedule)
    return {} if schedule is None else {"": schedule}


def _measure_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def _scale_gradients(parameters: list[nn.Parameter], limit: float, norm: torch.Tensor) -> None:
    """Scale the gradients on one mesh as clip_grad_norm_ does, by the norm of all gradients."""
    if not hasattr(parameters[0].grad, "device_mesh"):
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        # The norm is the same on all workers, so each scales its own part.
        parameter.grad.to_local().mul_(factor)  # type: ignore[union-attr]
