"""Parameters and blocks, such as experts, that some workers leave out of a pass while others need them.

fully_shard exchanges, block by block, the gradients that this worker has. If workers have gradients of different
parameters, they add up unrelated ones; if they skip different blocks, they gather a block from pieces of another. If
the sizes match, there is no error (torch 2.13). So

- a parameter without a gradient takes part in the exchange with zeros. If no worker has a gradient of it, the zeros are
  removed again: an optimizer skips a parameter without a gradient, but weight decay moves one with a gradient of zero.
- every worker gathers the same blocks in the same order. In the first pass workers exchange a message before each
  block, which determines the order; from then on each takes part in the blocks that it skips without messages, and the
  workers exchange one at the end of a pass.

A skipped block has its place in the backward pass too. A scalar passes through all blocks in their order, next to the
stream. autograd goes backward through the newest operations first, so it reaches a skipped block when the other workers
reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtctl.errors import PlanError

THREAD: Final = "_dtctl_thread"
"""Argument of a block between the hooks before and after those of fully_shard; its own code never gets it."""
ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""True if torch can include parameters without a gradient as zeros: since 2.13."""


class UsedParameters:
    """Record of the parameters that have a gradient on any worker."""

    def __init__(self, model: nn.Module, roots: Sequence[nn.Module], names: Sequence[str]) -> None:
        """Begin to observe the blocks in the roots.

        Args:
            model: the model as this worker has it, already sharded.
            roots: modules in whose forward passes parameters are whole: the model itself, or its stages.
            names: names of all parameters of the whole model, the same on all workers.
        """
        self._names = list(names)
        numbers = {name: number for number, name in enumerate(names)}
        inside = {part for root in roots for part in root.modules() if part is not root and _is_unit(part)}
        own_parameters = {
            parameter for root in roots for _, parameter in root.named_parameters() if parameter.requires_grad
        }
        self._own = {
            parameter: numbers[name] for name, parameter in model.named_parameters() if parameter in own_parameters
        }
        self._seen = bytearray(len(numbers))
        self._watched: dict[int, torch.Tensor] = {}
        for unit in {*roots, *inside}:
            places = [
                (part, name, self._own[parameter])
                for part in _list_own_modules(unit, inside)
                for name, parameter in part.named_parameters(recurse=False)
                if parameter in own_parameters
            ]
            if places:
                # After the hook of fully_shard, which replaces the shards by whole parameters.
                unit.register_forward_pre_hook(partial(_run_hook_uncompiled, self._register_gradient_marks, places))

    def _register_gradient_marks(self, places: Sequence[tuple[nn.Module, str, int]], *_: Any) -> None:
        for module, name, number in places:
            whole = cast(torch.Tensor, module._parameters[name])
            if self._watched.get(number) is not whole:
                self._watched[number] = whole
                # Not a method of this object, which refers to the parameters: the collector does not detect a cycle
                # through torch, so weights and gradients would never be freed.
                mark = partial(_mark_gradient_seen, self._seen, number)
                whole.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a step: forget which gradients the last one had."""
        self._seen[:] = bytes(len(self._seen))

    def find_unused_numbers(self) -> list[int]:
        """Return the numbers of this worker's parameters without a gradient on any worker in this step; collective.

        Raises:
            PlanError: torch is too old for workers that use different parameters; raised on every worker.
        """
        own = torch.tensor(self._seen, dtype=torch.uint8)
        absent = torch.zeros_like(own)
        absent[list(self._own.values())] = 1
        counts = torch.stack([own, absent - own])
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        anywhere, missed = counts.tolist()
        differing = [
            name
            for name, is_anywhere, other in zip(self._names, anywhere, missed, strict=True)
            if is_anywhere and other
        ]
        if differing and not ZEROS:
            raise PlanError(
                f"some workers have a gradient of {', '.join(differing[:6])}, others have none, and fully_shard of "
                f"torch {torch.__version__} would add up gradients of different parameters",
                where="train.strategy",
                hint="use torch 2.13 or newer, or `strategy: ddp` with `train.ddp.find_unused_parameters: true`",
            )
        return [number for number in self._own.values() if not anywhere[number]]

    def drop_unused(self, unused: Sequence[int]) -> None:
        """Remove the gradients of parameters from `find_unused_numbers`, which are zero; local."""
        if unused:
            absent = set(unused)
            for parameter, number in self._own.items():
                if number in absent:
                    parameter.grad = None


def _mark_gradient_seen(seen: bytearray, number: int, _: torch.Tensor) -> None:
    """Record that a parameter has a gradient."""
    seen[number] = 1


class GatherOrder:
    """Common order in which all workers gather the blocks of a model."""

    def __init__(self, root: nn.Module, units: Sequence[nn.Module]) -> None:
        """Add the hooks that keep the order.

        Args:
            root: module that runs the units; not sharded yet, so that its hook at the end runs before that of
                fully_shard.
            units: sharded modules, the same on all workers.
        """
        self._units = list(units)
        self._order: list[int] | None = None
        """Units in the order in which all workers gather them in a pass of the root; None before the first pass."""
        self._found: list[int] = []
        self._at = 0
        self._inside = False
        self._thread: torch.Tensor | None = None
        self._ends: list[torch.Tensor] = []
        if not self._units:
            return
        root.register_forward_pre_hook(self._begin_root_pass)
        root.register_forward_hook(self._end_root_pass)
        for index, unit in enumerate(self._units):
            unit.register_forward_pre_hook(
                partial(_run_hook_uncompiled, self._catch_up_before_unit, index), prepend=True, with_kwargs=True
            )
            unit.register_forward_pre_hook(partial(_run_hook_uncompiled, self._attach_unit_thread), with_kwargs=True)

    def drop_order(self) -> None:
        """Drop the order after an interrupted pass, since replacements do not have it.

        All workers determine the order again in their next pass.
        """
        self._order, self._found, self._at = None, [], 0
        self._inside, self._thread, self._ends = False, None, []

    def ends(self) -> list[torch.Tensor]:
        """Return scalars that the backward pass must start from in addition to the loss.

        The names belong to the passes since the last call.
        """
        ends, self._ends = self._ends, []
        return ends

    def _begin_root_pass(self, root: nn.Module, *_: Any) -> None:
        if _is_backward():  # recomputed blocks have already had their turn
            return
        self._inside, self._at, self._found = True, 0, []
        self._thread = None
        if torch.is_grad_enabled():
            device = next(root.parameters()).device
            self._thread = torch.zeros((), device=device, requires_grad=True)

    def _catch_up_before_unit(
        self, index: int, _: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if not self._inside or _is_backward():
            return None
        self._catch_up(index)
        return (args, {**kwargs, THREAD: self._thread}) if self._thread is not None else None

    def _attach_unit_thread(
        self, unit: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if THREAD not in kwargs:
            return None
        rest = dict(kwargs)
        self._thread = rest.pop(THREAD)
        if self._thread is not None and self._thread.grad_fn is not None:
            self._thread.register_hook(_read_fsdp_state(unit)._pre_backward)
        return args, rest

    def _end_root_pass(self, root: nn.Module, *_: Any) -> None:
        if not self._inside or _is_backward():
            return
        self._catch_up(None)
        if self._order is None:
            self._order = _with_all(self._found, len(self._units))
        if self._thread is not None and self._thread.grad_fn is not None:
            # Units skipped at the end were made last, but must not come before the root in the backward pass.
            end = self._thread.clone()
            end.register_hook(_read_fsdp_state(root)._pre_backward)  # type: ignore[no-untyped-call]
            self._ends.append(end)
        self._inside, self._thread = False, None

    def _catch_up(self, index: int | None) -> None:
        """Take part in the exchanges of all units before this one; None: of all remaining units of this pass."""
        if self._order is None:
            self._agree_on_next_unit(index)
            return
        while index is None or index not in self._order[self._at :]:
            # The order is complete, unless a worker must go through it once more, as in a model that runs blocks
            # several times for some samples.
            self._take_parts(len(self._order))
            again = torch.tensor(index is not None, dtype=torch.uint8)
            dist.all_reduce(again, op=dist.ReduceOp.MAX)
            if not again:
                return
            self._at = 0
        self._take_parts(self._order.index(index, self._at))
        self._at += 1

    def _take_parts(self, end: int) -> None:
        assert self._order is not None  # noqa: S101  # for the type checker
        for index in self._order[self._at : end]:
            self._take_part(index)
        self._at = end

    def _agree_on_next_unit(self, index: int | None) -> None:
        """Agree on the next unit while the order is unknown: the first one in the model that any worker needs."""
        own = len(self._units) if index is None else index
        while True:
            turns = torch.tensor(own)
            dist.all_reduce(turns, op=dist.ReduceOp.MIN)
            if int(turns) == len(self._units):
                return
            self._found.append(int(turns))
            if int(turns) == own:
                return
            self._take_part(int(turns))

    def _take_part(self, index: int) -> None:
        """Run all exchanges of fully_shard for a unit, forward and backward, without its computation."""
        unit = self._units[index]
        state = _read_fsdp_state(unit)
        if self._thread is None:
            state._pre_forward(unit, (), {})
            state._post_forward(unit, (), None)
            return
        (thread,), _ = state._pre_forward(unit, (self._thread,), {})
        self._thread = state._post_forward(unit, (thread,), thread)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_hook_uncompiled(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Run a hook of a compiled unit outside of the graph, since its actions differ from pass to pass."""
    return hook(*arguments)


def _with_all(ranks: Sequence[int], count: int) -> list[int]:
    """Return the order with the units that no worker has run yet, each after its predecessor in the model."""
    order = list(ranks)
    for index in range(count):
        if index not in order:
            order.insert(order.index(index - 1) + 1 if index else 0, index)
    return order


def _list_own_modules(unit: nn.Module, units: set[nn.Module]) -> list[nn.Module]:
    """Return the modules of a unit, without those of units inside of it."""
    children = [part for child in unit.children() if child not in units for part in _list_own_modules(child, units)]
    return [unit, *children]


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _read_fsdp_state(unit: nn.Module) -> Any:
    """Return fully_shard's state of a module, whose hooks have had this form since torch 2.4."""
    return cast(Any, unit)._get_fsdp_state()


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
