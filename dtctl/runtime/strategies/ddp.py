"""Data parallel: every worker has the whole model, and gradients are averaged during the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.step import Step
from dtctl.runtime.strategies import gradients, hooks
from dtctl.runtime.strategies.accumulation import accumulate_gradients
from dtctl.train.config import DdpConfig


class TransparentDDP(DistributedDataParallel):
    """torch's wrapper with the attributes and methods of the model, so that a loss can read them as in one process."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, if the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


class Ddp:
    """The model in torch's DistributedDataParallel.

    After the first backward pass DDP sorts its buckets by the time at which gradients were ready. From three workers
    on, other buckets mean another order of additions. The first pass after a resume would therefore round differently
    from the same step of a run without a stop, so `has_warm_up` is true.
    """

    name = "ddp"
    has_warm_up = True
    lockstep = False
    absent_keys: Collection[str] = ()
    sharded_state = False
    present = None

    def __init__(self, model: nn.Module, config: DdpConfig, worker: Worker) -> None:
        """Wrap a model.

        Raises:
            PlanError: an option needs another device.
        """
        model = _apply_sync_batchnorm(model, worker) if config.sync_batchnorm else model
        self._ddp = TransparentDDP(
            model,
            device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=True,  # gradients are views of the buckets: one copy less in memory and time
        )
        self._is_called = False
        """True if the loss function called the wrapper, without which torch exchanges nothing; known after the first
        step."""
        self._watch = self._ddp.register_forward_pre_hook(self._mark_model_called)
        self._first_must_exchange = config.static_graph
        if config.static_graph:
            self._ddp.register_forward_hook(self._mark_first_pass_done)
        self._powersgd = hooks.register_communication_hook(self._ddp, config, worker)
        self._device = worker.device
        self.module: nn.Module = self._ddp
        self.inference = model
        self._wanted = gradients.list_trained_parameters(model)
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._worker = worker
        self._static = config.static_graph
        self._used: set[torch.Tensor] = set()
        """Parameters with a gradient in the last pass, during the first step."""
        self._marks = [
            parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
            for parameter in self._wanted
        ]

    def state(self) -> Mapping[str, Any]:
        """Return the state that PowerSGD carries from step to step; empty without PowerSGD."""
        return hooks.capture_powersgd_state(self._powersgd) if self._powersgd is not None else {}

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Restore what `state` returned; return a reason if the snapshot has no state for this worker, else None."""
        if self._powersgd is None:
            return None
        if not tree:
            return "the snapshot has no state of PowerSGD for this worker"
        hooks.restore_powersgd_state(self._powersgd, tree, self._device)
        return None

    def release(self) -> None:
        """Remove the hooks of the first step; torch's own hooks end with its wrapper."""
        for mark in self._marks:
            mark.remove()
        self._marks.clear()

    def discard(self) -> None:
        """Forget the state that PowerSGD would carry over."""
        if self._powersgd is not None:
            hooks.clear_powersgd_tables(self._powersgd)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: every worker makes the same step."""

    def gradients(self, step: Step) -> torch.Tensor:
        """Run one micro batch after another; the last pass exchanges gradients."""
        return accumulate_gradients(step, self.module, local=self._pausing_gradient_exchange)

    @contextmanager
    def _pausing_gradient_exchange(self) -> Iterator[None]:
        """Return a context in which gradients are added up locally and not exchanged."""
        # With a static graph, DDP learns its order in the very first pass, and asserts if that pass exchanges nothing
        # (torch 2.13). An additional exchange changes nothing: averages are averaged once more.
        with nullcontext() if self._first_must_exchange else self._ddp.no_sync():
            yield
        self._used.clear()

    def _mark_model_called(self, *_: Any) -> None:
        self._is_called = True

    def _mark_first_pass_done(self, *_: Any) -> None:
        self._first_must_exchange = False

    def finish(self) -> None:
        """Check that gradients were exchanged, since DDP does not do that while it waits for a missing gradient.

        DDP would report it only at the next forward pass, after a step with this worker's own gradients, and perhaps
        after a snapshot.

        Raises:
            PlanError: a parameter had no gradient; raised on every worker if it is the first step.
        """
        missing: list[torch.Tensor] = []
        if not self._is_exchanged():
            missing = [p for p in self._wanted if p.grad is None or (self._marks and p not in self._used)]
            if missing:  # zeros in their place, so that the other workers do not wait forever
                torch.stack([(parameter * 0).sum() for parameter in missing]).sum().backward()  # type: ignore[no-untyped-call]
        if self._marks:
            absent = set(missing)
            own = [float(not self._is_called), *(float(parameter in absent) for parameter in self._wanted)]
            past, *flags = self._worker.sum(torch.tensor(own)).tolist()
            missing = [parameter for parameter, flag in zip(self._wanted, flags, strict=True) if flag]
            self._watch.remove()
            if past:
                raise PlanError(
                    "the loss function does not call the model itself, `model(...)`, and ddp exchanges gradients only "
                    "of what it computes",
                    where="the loss function of the Trainer",
                    hint="call `model(...)`, and let its forward call the method; beside it, methods that only read "
                    "parameters may be called",
                )
            for mark in self._marks:
                mark.remove()
            self._marks.clear()
        if missing or not self._is_exchanged():  # otherwise the loss depended on them in an earlier pass of this step
            names = [self._names[parameter] for parameter in missing[:6]]
            which = ", ".join(names) + (", ..." if len(missing) > len(names) else "") or "some parameters"
            raise PlanError(
                f"the loss does not depend on {which}, and ddp waits for the gradients of all",
                where="train.ddp.static_graph" if self._static else "train.ddp.find_unused_parameters",
                hint=("leave out `train.ddp.static_graph` and " if self._static else "")
                + "set `train.ddp.find_unused_parameters: true`, or freeze them with requires_grad_(False)",
            )

    def _is_exchanged(self) -> bool:
        try:
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return False
        return True

    def norm(self) -> torch.Tensor:
        """Return the norm of the gradient, which is the same on all workers."""
        return gradients.compute_gradient_norm(self._wanted)

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient down if its norm exceeds the limit."""
        gradients.clip_gradients(self._wanted, max_norm, norm)


def _apply_sync_batchnorm(model: nn.Module, worker: Worker) -> nn.Module:
    if worker.device.type != "cuda":
        raise PlanError(
            "torch's SyncBatchNorm runs on GPUs only, and this worker has none",
            where="train.ddp.sync_batchnorm",
            hint="leave it out, or use a norm without statistics over samples (GroupNorm, LayerNorm)",
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted
