"""Parameters and blocks that one worker leaves out of a pass and another needs, such as experts.

fully_shard exchanges, block by block, the parameters that have a gradient on this worker. Workers with different ones
would add up gradients of different parameters, and workers that skip different blocks would put blocks together from
pieces of others: without an error, if sizes are alike (torch 2.13). So

- a parameter without a gradient takes part in the exchange with zeros. If no worker has a gradient of it, the zeros are
  removed again: an optimizer skips a parameter without a gradient, but weight decay moves one with a gradient of zero.
- every worker gathers the same blocks in the same order. In the first pass workers exchange a message before each
  block, which determines the order; from then on each takes part in the blocks that it skips without messages, and the
  workers exchange one at the end of a pass.

A skipped block has its place in the backward pass too. A scalar is threaded through all blocks in their order, beside
the stream; autograd goes backward through the newest operations first, and so passes a skipped block just when the
others pass it.
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
"""Argument of a block between the hooks before and after those of fully_shard; its own code never sees it."""
ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""True if parameters without a gradient can take part with zeros: since torch 2.13."""


class Present:
    """Parameters that have a gradient on any worker."""

    def __init__(self, model: nn.Module, roots: Sequence[nn.Module], names: Sequence[str]) -> None:
        """Begin to observe the blocks in the roots.

        Args:
            model: as this worker has it; sharded already.
            roots: modules whose forward passes have parameters whole: the model itself, or stages of it.
            names: of all parameters of the whole model, the same on all workers.
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
                for part in _apart(unit, inside)
                for name, parameter in part.named_parameters(recurse=False)
                if parameter in own_parameters
            ]
            if places:
                # After the hook of fully_shard, which puts whole parameters where the shards were.
                unit.register_forward_pre_hook(partial(_plainly, self._watch, places))

    def _watch(self, places: Sequence[tuple[nn.Module, str, int]], *_: Any) -> None:
        for module, name, number in places:
            whole = cast(torch.Tensor, module._parameters[name])
            if self._watched.get(number) is not whole:
                self._watched[number] = whole
                # Not a method of this object, which has the parameters: no collector sees that circle, which goes
                # through torch, and weights and gradients would outlive their training.
                mark = partial(_mark, self._seen, number)
                whole.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """A step begins."""
        self._seen[:] = bytes(len(self._seen))

    def agree(self) -> list[int]:
        """Numbers of the parameters here that no worker has a gradient of in this step; collective over all workers.

        Raises:
            PlanError: torch is too old for workers that use different parameters; on every worker.
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

    def take_away(self, unused: Sequence[int]) -> None:
        """Take away the gradients of parameters that `agree` has returned, which are zero; local."""
        if unused:
            absent = set(unused)
            for parameter, number in self._own.items():
                if number in absent:
                    parameter.grad = None


def _mark(seen: bytearray, number: int, _: torch.Tensor) -> None:
    """Note that a parameter has a gradient."""
    seen[number] = 1


class Turns:
    """The order in which all workers gather the blocks of a model."""

    def __init__(self, root: nn.Module, units: Sequence[nn.Module]) -> None:
        """Begin to keep the order.

        Args:
            root: module that runs the units; not sharded yet, so that the end of its pass comes before fully_shard's.
            units: sharded already; the same on all workers.
        """
        self._units = list(units)
        self._order: list[int] | None = None
        """Units as all workers gather them in a pass of the root; None until the first one has found it."""
        self._found: list[int] = []
        self._at = 0
        self._inside = False
        self._thread: torch.Tensor | None = None
        self._ends: list[torch.Tensor] = []
        if not self._units:
            return
        root.register_forward_pre_hook(self._begin)
        root.register_forward_hook(self._end)
        for index, unit in enumerate(self._units):
            unit.register_forward_pre_hook(partial(_plainly, self._enter, index), prepend=True, with_kwargs=True)
            unit.register_forward_pre_hook(partial(_plainly, self._entered), with_kwargs=True)

    def forget(self) -> None:
        """Drop the order after an interrupted pass: new workers do not have it, so all find it again."""
        self._order, self._found, self._at = None, [], 0
        self._inside, self._thread, self._ends = False, None, []

    def ends(self) -> list[torch.Tensor]:
        """Scalars through which the backward pass must go, beside the loss; of the passes since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def _begin(self, root: nn.Module, *_: Any) -> None:
        if _is_backward():  # blocks that are computed again have had their turn
            return
        self._inside, self._at, self._found = True, 0, []
        self._thread = None
        if torch.is_grad_enabled():
            device = next(root.parameters()).device
            self._thread = torch.zeros((), device=device, requires_grad=True)

    def _enter(self, index: int, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not self._inside or _is_backward():
            return None
        self._catch_up(index)
        return (args, {**kwargs, THREAD: self._thread}) if self._thread is not None else None

    def _entered(self, unit: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if THREAD not in kwargs:
            return None
        rest = dict(kwargs)
        self._thread = rest.pop(THREAD)
        if self._thread is not None and self._thread.grad_fn is not None:
            self._thread.register_hook(_state(unit)._pre_backward)
        return args, rest

    def _end(self, root: nn.Module, *_: Any) -> None:
        if not self._inside or _is_backward():
            return
        self._catch_up(None)
        if self._order is None:
            self._order = _with_all(self._found, len(self._units))
        if self._thread is not None and self._thread.grad_fn is not None:
            # What is skipped at the end was made last, yet must not come before the turn of the root.
            end = self._thread.clone()
            end.register_hook(_state(root)._pre_backward)  # type: ignore[no-untyped-call]
            self._ends.append(end)
        self._inside, self._thread = False, None

    def _catch_up(self, index: int | None) -> None:
        """Take part in all that comes before a unit; None: in all that is left of this pass."""
        if self._order is None:
            self._agree(index)
            return
        while index is None or index not in self._order[self._at :]:
            # Done with the order, unless a worker has to go through it once more, as a model that runs blocks several
            # times may want for some samples.
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

    def _agree(self, index: int | None) -> None:
        """The same while the order is not known yet: of the units that workers want, the first is next."""
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
        """All that fully_shard exchanges for a unit, forward and backward, without its computation."""
        unit = self._units[index]
        state = _state(unit)
        if self._thread is None:
            state._pre_forward(unit, (), {})
            state._post_forward(unit, (), None)
            return
        (thread,), _ = state._pre_forward(unit, (self._thread,), {})
        self._thread = state._post_forward(unit, (thread,), thread)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _plainly(hook: Callable[..., Any], *arguments: Any) -> Any:
    """A hook of a unit that is compiled: what it does differs from pass to pass, and is never part of a graph."""
    return hook(*arguments)


def _with_all(ranks: Sequence[int], count: int) -> list[int]:
    """Return the order with the units that no worker has run yet, each behind the one before it in the model."""
    order = list(ranks)
    for index in range(count):
        if index not in order:
            order.insert(order.index(index - 1) + 1 if index else 0, index)
    return order


def _apart(unit: nn.Module, units: set[nn.Module]) -> list[nn.Module]:
    """Return the modules of a unit without those of units inside of it."""
    children = [part for child in unit.children() if child not in units for part in _apart(child, units)]
    return [unit, *children]


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _state(unit: nn.Module) -> Any:
    """Return what fully_shard keeps of a module; its hooks have had this form since torch 2.4."""
    return cast(Any, unit)._get_fsdp_state()


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
