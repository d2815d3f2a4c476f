"""Check of the program's optimizers other than the Trainer's, such as that of a critic in the loss function's closure.

The runtime does not exchange the gradients of their parameters; only the program can. If it does not, each worker
trains a different critic on its own samples, without an error. So the parameters that they have trained are compared
between workers after the first steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dtctl.errors import WorkerFailed
from dtctl.runtime.bits import sum_tensors
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.json_collectives import gather_json

STEPS: Final = (1, 2, 10)
"""Steps after which workers are compared, counted from the first step of this process or a few steps later."""


class OtherOptimizers:
    """Optimizers other than the Trainer's that have made a step in this process."""

    def __init__(self, own: torch.optim.Optimizer, model: nn.Module, loss: Any) -> None:
        """Register a hook for the steps of all optimizers.

        Args:
            own: optimizer of the Trainer.
            model: the model, whose parameters the strategy handles, whichever optimizer has them.
            loss: the loss function, in which names of parameters that other optimizers train are looked up.
        """
        self._own, self._model, self._loss = own, model, loss
        self._seen: dict[int, torch.optim.Optimizer] = {}
        self._is_listening = True
        self._hook = register_optimizer_step_post_hook(self._record_optimizer)

    def _record_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_listening and optimizer is not self._own:
            self._seen[id(optimizer)] = optimizer

    @contextmanager
    def ignoring_optimizer_steps(self) -> Iterator[None]:
        """Return the context of a step of the Trainer's optimizer.

        The optimizer may consist of others (SAM, Muon with AdamW), whose steps are ignored.
        """
        self._is_listening = False
        try:
            yield
        finally:
            self._is_listening = True

    def stop(self) -> None:
        """Remove the hook."""
        self._hook.remove()
        self._seen.clear()

    def require_equal(self, step: int, worker: Worker) -> None:
        """Check after some of the first steps that workers train the same values outside of the model; collective.

        Args:
            step: number of steps done.
            worker: this worker.

        Raises:
            WorkerFailed: the values differ; raised on every worker.
        """
        if step >= max(STEPS):
            self._hook.remove()
        if step not in STEPS:
            return
        known = {*self._model.parameters(), *_list_parameters(self._own)}
        every = [parameter for optimizer in self._seen.values() for parameter in _list_parameters(optimizer)]
        # Divided tensors differ between workers.
        trained = [each for each in every if each not in known and not hasattr(each, "device_mesh")]
        own = sum_tensors({str(number): parameter for number, parameter in enumerate(trained)}) if trained else None
        sums = gather_json(own, worker)
        if len({total for total in sums if total is not None}) <= 1:
            return
        names = gather_json(self._describe_other_optimizer(trained), worker)
        what = next(name for name, total in zip(names, sums, strict=True) if total is not None)
        raise WorkerFailed(
            f"after step {step} workers have trained different {what}: these are unknown to the Trainer, "
            "which does not exchange their gradients",
            where="the loss function",
            hint="average its gradients with torch.distributed.all_reduce before its optimizer steps, or train it as "
            "a part of the model",
        )

    def _describe_other_optimizer(self, trained: list[torch.Tensor]) -> str:
        """Return a description of the parameters that another optimizer trains."""
        for name, module in _list_modules(self._loss):
            if trained and any(parameter is trained[0] for parameter in module.parameters()):
                return f"weights of `{name}` ({type(module).__qualname__})"
        kinds = ", ".join(sorted({type(optimizer).__qualname__ for optimizer in self._seen.values()}))
        return f"weights with an optimizer of the program's own ({kinds or 'none'}, {len(trained)} tensors)"


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _list_modules(function: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that a function refers to: in its closure, as global variables, or as attributes of its object."""
    try:
        held = inspect.getclosurevars(inspect.unwrap(getattr(function, "__func__", function)))
        named = {**held.globals, **held.nonlocals}
    except TypeError:
        named = {}
    owner = getattr(function, "__self__", function)
    named |= {f"{type(owner).__name__}.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
    yield from ((name, value) for name, value in named.items() if isinstance(value, nn.Module))
