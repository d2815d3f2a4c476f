"""Wrappers that a program has put around its model (DDP, FSDP2, torch.compile), as far as snapshots depend on them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.own_loop.several_models import WHERE, Models, join_models, list_models
from dtctl.runtime.snapshot.json_collectives import gather_json


def list_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and what it wraps, the innermost module last."""
    while True:
        yield model
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return
        model = inner


class WrappedModel:
    """A program's models: how their state is divided, and how their gradients are exchanged.

    It is the `StateLayout` of a session.
    """

    def __init__(self, model: Models, optimizer: torch.optim.Optimizer, worker: Worker) -> None:
        """Look at a model, or at several by name; collective over all workers.

        Raises:
            PlanError: a model or its optimizer is divided in a way that snapshots do not support.
        """
        wrappers = {name: list(list_wrappers(each)) for name, each in list_models(model).items()}
        self.module = join_models({name: each[-1] for name, each in wrappers.items()})
        _require_known_division(self.module, optimizer)
        layers = itertools.chain.from_iterable(wrappers.values())
        self._ddps = [layer for layer in layers if isinstance(layer, DistributedDataParallel)]
        self._sharded = [module for module in self.module.modules() if hasattr(module, "set_requires_gradient_sync")]
        own = list(self.module.state_dict())
        everyone = gather_json(own, worker)
        self.absent_keys: Collection[str] = set().union(*everyone) - set(own)
        is_divided = any(hasattr(parameter, "device_mesh") for parameter in self.module.parameters())
        self.sharded_state = any(gather_json(bool(self.absent_keys) or is_divided, worker))
        if self._ddps:
            self.name = "ddp"
        elif self._sharded:
            self.name = "fsdp"
        else:
            self.name = "sharded" if self.sharded_state else "single"
        orders = [BucketOrder(ddp) for ddp in self._ddps if not ddp.find_unused_parameters and not ddp.static_graph]
        self.buckets = BucketOrders(orders) if orders else None

    def exchange_gradients(self, wanted: bool) -> None:
        """Choose whether the next backward pass exchanges gradients; without, they are added up on each worker."""
        for ddp in self._ddps:
            if not ddp.static_graph:  # DDP learns its order in a pass that exchanges
                ddp.require_backward_grad_sync = wanted
        for module in self._sharded:
            module.set_requires_gradient_sync(wanted, recurse=False)  # type: ignore[operator]

    def state(self) -> Mapping[str, Any]:
        """Return nothing: except for `buckets`, wrappers have no state that lasts longer than a step."""
        return {}

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Do nothing."""


def _require_known_division(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise PlanError(
            "the model is in torch's FullyShardedDataParallel (FSDP1), whose state a session cannot save",
            where=WHERE,
            hint="use fully_shard (FSDP2), as in torch's tutorial `FSDP2`",
        )
    if "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
        raise PlanError(
            "the optimizer is torch's ZeroRedundancyOptimizer, whose state a session cannot save",
            where=WHERE,
            hint="use the optimizer itself, or `train.strategy: zero1` with the Trainer",
        )


class BucketOrder:
    """Order of DDP's buckets, which follows from the first backward pass of a process.

    After that pass DDP sorts the parameters by the time at which their gradients were ready. From three workers on,
    another order means another order of additions, and other bits. A resume therefore needs the order of the first
    process before its first step. Snapshots keep it, and a pass without a model restores it in DDP.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Record the order of the first step."""
        self._ddp = ddp
        self._parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self._order: dict[int, None] = {}
        self._marks = [
            parameter.register_post_accumulate_grad_hook(self._note_arrival) for parameter in self._parameters
        ]
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}

    def _note_arrival(self, parameter: torch.Tensor) -> None:
        number = self._numbers[parameter]
        self._order.pop(number, None)  # the last of several passes counts, since it exchanges
        self._order[number] = None

    def finish_step(self) -> None:
        """Stop recording after the first step."""
        for mark in self._marks:
            mark.remove()
        self._marks.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the trained parameters, by their numbers."""
        return {"order": list(self._order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store an order, which `apply` restores in DDP."""
        self._order = dict.fromkeys(state["order"])

    def apply(self) -> None:
        """Run a pass whose gradients are zero and become ready in this order; collective. It changes buffers."""
        self.finish_step()
        parameters = [self._parameters[number] for number in self._order]
        if set(self._order) != set(range(len(self._parameters))):
            return  # the order of another model, which loading reports, or of a step that did not use all parameters
        ddp, module = self._ddp, self._ddp.module
        ddp._modules["module"] = _ZeroLoss(parameters)
        try:
            ddp(torch.zeros(1, device=parameters[0].device)).backward()
        finally:
            ddp._modules["module"] = module
        for parameter in parameters:
            parameter.grad = None


class BucketOrders:
    """Orders of the buckets of several models in DDP."""

    def __init__(self, orders: Sequence[BucketOrder]) -> None:
        """Take the orders of the models."""
        self._orders = orders

    def finish_step(self) -> None:
        """Stop noting; the first step is done."""
        for order in self._orders:
            order.finish_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the order of each model."""
        return {"orders": [order.state_dict() for order in self._orders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the orders; `apply` brings them about."""
        for order, kept in zip(self._orders, state["orders"], strict=False):
            order.load_state_dict(kept)

    def apply(self) -> None:
        """Bring the orders about, model by model; collective. It changes buffers."""
        for order in self._orders:
            order.apply()


class _ZeroLoss(nn.Module):
    """Module that computes zero from all parameters such that the first one's gradient is ready first."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._of = tuple(parameters)

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        for parameter in reversed(self._of):
            total = total + (parameter.reshape(-1)[:1].real.to(total.dtype) * 0).sum()
        return total.sum()
