"""Optimizer step of a session: backward passes, clipping, and the steps of optimizer, gradient scaler and schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class OptimizerStep:
    """The optimizer step under way, and its passes so far.

    Attributes:
        passes: number of backward passes done.
        loss: loss of this worker over the passes so far; between two steps, that of the newest step. None if unknown.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any, scaler: Any, clip: float | None) -> None:
        """Store the objects that the program has made.

        Args:
            optimizer: optimizer of the model's parameters.
            schedule: scheduler of its learning rate, or None.
            scaler: torch.amp.GradScaler, or None.
            clip: largest 2-norm of the gradient; None: no limit.
        """
        self._optimizer, self._schedule, self._scaler, self._clip = optimizer, schedule, scaler, clip
        self.passes = 0
        self.loss: torch.Tensor | None = None

    @property
    def lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def run_backward(self, loss: torch.Tensor, batches: int) -> bool:
        """Run the backward pass of a batch; return True if it was the last one of the step.

        Args:
            loss: loss of the batch, a scalar.
            batches: number of batches in this step; all have the same weight.
        """
        share = loss / batches if batches > 1 else loss
        (share if self._scaler is None else self._scaler.scale(share)).backward()
        self.loss = share.detach() if self.passes == 0 or self.loss is None else self.loss + share.detach()
        self.passes += 1
        if self.passes < batches:
            return False
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        return True

    def clip_gradient(self, *, is_logged: bool) -> torch.Tensor | None:
        """Clip the gradient, and return its norm before; None if neither clipping nor a log needs it."""
        if self._clip is None and not is_logged:
            return None
        # torch takes no norm over tensors on several meshes, such as those of tensor parallel and undivided ones.
        meshes: dict[Any, list[nn.Parameter]] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
        norms = [_measure_norm(parameters) for parameters in meshes.values()]
        total = norms[0] if len(norms) == 1 else torch.stack(norms).norm() if norms else torch.zeros(())
        if self._clip is not None:
            for parameters in meshes.values():
                _scale_gradients(parameters, self._clip, total)
        return total

    def apply(self) -> None:
        """Step the optimizer and the schedule, and set the gradients to zero."""
        is_taken = True
        if self._scaler is None:
            self._optimizer.step()
        else:
            scale = self._scaler.get_scale()
            self._scaler.step(self._optimizer)
            self._scaler.update()
            is_taken = self._scaler.get_scale() >= scale  # the scaler lowers its scale after a skipped step
        if self._schedule is not None and is_taken:
            self._schedule.step()
        self._optimizer.zero_grad()


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
