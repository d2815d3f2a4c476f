"""Cutting a model between its blocks, with its code as it is.

A stage runs the model's own forward pass in which the list of blocks was exchanged: blocks of stages before are passed
over, the stream that arrived takes the place of what they would have made, and after the stage's last block the pass is
left. What comes before the blocks is run on every stage, since it may make masks or positions that all blocks take;
what comes after them on the last stage only, and so is the loss.

So a model must hand one tensor from block to block, as the first argument and the only result, and do nothing to it in
between. Parameters outside of blocks are on all stages, with their gradients added up: so tied embeddings are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dtctl.errors import PlanError
from dtctl.runtime.strategies.blocks import Blocks

Batch = tuple[Any, float]
"""A micro batch, and the weight of its loss."""
Loss = Callable[[nn.Module, Any], torch.Tensor]


class Reached(Exception):
    """The end of a stage; carries the stream from inside of the model's code."""

    def __init__(self, stream: torch.Tensor) -> None:
        super().__init__()
        self.stream = stream


class Elsewhere(nn.Module):
    """Stand-in for a block that another worker has. Nothing uses its result, and an error shows if something does."""

    def forward(self, stream: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """NaN in the shape of the stream."""
        return stream.new_full((), torch.nan).expand_as(stream)


class Entrance(nn.Module):
    """Stand-in for the last block before a stage."""

    source: Callable[[torch.Tensor], torch.Tensor]
    """Function of a tensor in the shape of the stream that returns the stream."""

    def forward(self, stream: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the stream from the stage before."""
        return self.source(stream)


class Exit(nn.Module):
    """Stand-in for the first block after a stage."""

    def forward(self, stream: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Leave the model's forward pass.

        Raises:
            Reached: always.
        """
        raise Reached(stream)


class Cut:
    """The model as one stage sees it."""

    def __init__(self, model: nn.Module, found: Blocks, first: int, last: int) -> None:
        """Make the list of blocks of a stage.

        Args:
            model: with all blocks, or at least those of the stage.
            found: its blocks.
            first: number of the stage's first block.
            last: of the block after its last.
        """
        self.model, self.first = model, first
        self.device = next(model.parameters()).device
        self.entrance = Entrance()
        self.blocks = found.modules[first:last]
        view: list[nn.Module] = [*(Elsewhere() for _ in range(first)), *self.blocks]
        if first:
            view[first - 1] = self.entrance
        if last < len(found):
            view += [Exit(), *(Elsewhere() for _ in range(last + 1, len(found)))]
        self._view = nn.ModuleList(view) if isinstance(found.container, nn.ModuleList) else nn.Sequential(*view)
        self._place = found.name.rpartition(".")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass as far as this stage goes.

        Raises:
            Reached: unless it is the last stage.
        """
        if not self._place[2]:
            return self._view(*args, **kwargs)
        with self._exchanged():
            return self.model(*args, **kwargs)

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        parent, name = self.model.get_submodule(self._place[0]), self._place[2]
        container = parent._modules[name]
        parent._modules[name] = self._view
        try:
            yield
        finally:
            parent._modules[name] = container


class Caller(nn.Module):
    """Model that the user's loss function gets: it calls one stage, with inputs of always the same length."""

    cut: Cut

    def __init__(self, cut: Cut, samples: int | None = None) -> None:
        """Stand for a model.

        Args:
            cut: the stage.
            samples: of a micro batch; shorter inputs are filled up, and the outputs cut down again. None: as they are.
        """
        super().__init__()
        self.__dict__["cut"] = cut  # not as a child: its modules have their place in the model
        self.samples = samples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stage."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim()]
        count = len(given[0]) if given else 0
        if self.samples is None or count in (0, self.samples):
            return self.cut(*args, **kwargs)
        fill = self.samples - count

        def filled(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim() or len(value) != count:
                return value
            return torch.cat([value, value[-1:].expand(fill, *value.shape[1:])])

        result = self.cut(*map(filled, args), **{name: filled(value) for name, value in kwargs.items()})
        return _shortened(result, self.samples, count)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["cut"].model, name)


def _shortened(result: Any, samples: int, count: int) -> Any:
    if isinstance(result, torch.Tensor):
        return result[:count] if result.dim() and len(result) == samples else result
    if isinstance(result, dict):
        return {key: _shortened(value, samples, count) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return type(result)(_shortened(value, samples, count) for value in result)
    return result


class Stage(nn.Module):
    """One stage as torch's schedules want it: a module that is called once for each micro batch."""

    cut: Cut
    """The stage's part of the model."""
    outside: list[torch.Tensor]
    """Parameters that are not in blocks."""
    task: Callable[[torch.Tensor | None, int], Any]
    """Function that a call runs: from the stream of the stage before, and the number of the micro batch, to the stream
    after."""

    def __init__(self, cut: Cut, outside: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(cut.blocks)
        # Not as children: their modules have their place in the model.
        self.__dict__["outside"] = list(outside)
        self.__dict__["cut"] = cut

    def forward(self, stream: torch.Tensor | None = None, *, index: torch.Tensor | None = None) -> Any:
        """Do the task; the stream if it reached the end of this stage, else what the task made of it."""
        try:
            return self.task(stream, 0 if index is None else int(index))
        except Reached as reached:
            return reached.stream

    def train_on(self, batches: Sequence[Batch], loss: Loss, samples: int | None) -> None:
        """Call the loss function of a micro batch from now on.

        Args:
            batches: the micro batches, with the weights of their losses.
            loss: of the user.
            samples: of a whole micro batch, to which shorter ones are filled up. None: they are as they are.
        """
        caller = Caller(self.cut, samples)

        def task(stream: torch.Tensor | None, index: int) -> Any:
            if stream is not None:
                self.cut.entrance.source = lambda _: stream
            batch, weight = batches[index]
            return loss(caller, batch) * weight

        self.task = task

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Return all parameters with gradients in this stage: zero-bubble schedules compute no other gradients."""
        everything: list[Any] = [*super().parameters(recurse), *self.outside]
        return (parameter for parameter in everything if parameter.requires_grad)


def costs(found: Blocks, run: Callable[[], Any]) -> tuple[list[int], int]:
    """Return the work of each block, and of what comes after the last one: floating point operations of a forward pass.

    What comes before the blocks is run on every stage and is taken for free; it is look-ups, as a rule.
    """
    counters = []
    with FlopCounterMode(display=False) as total:
        handles = []
        for block in found.modules:
            counter = FlopCounterMode(display=False)
            counters.append(counter)
            handles += [
                block.register_forward_pre_hook(lambda *_, counter=counter: counter.__enter__() and None),
                block.register_forward_hook(lambda *_, counter=counter: counter.__exit__(None, None, None)),
            ]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
    blocks = [counter.get_total_flops() for counter in counters]
    return blocks, max(0, total.get_total_flops() - sum(blocks))


def balanced(blocks: Sequence[int], after: int, stages: int) -> list[int]:
    """Blocks per stage such that the most loaded stage has least; the last one also does what comes after the blocks.

    Raises:
        PlanError: there are fewer blocks than stages.
    """
    count = len(blocks)
    if count < stages:
        raise PlanError(
            f"the model has {count} blocks, too few for {stages} stages",
            where="train.strategy",
            hint=f"use at most {count} workers times stages_per_worker",
        )
    sums = [0]
    for cost in blocks:
        sums.append(sums[-1] + cost)
    # best[k][n]: the most loaded of k stages over the first n blocks, and the blocks of the last of them.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, stages + 1):
        extra = after if stage == stages else 0
        row: dict[int, tuple[float, int]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            options = [
                (
                    max(best[-1][start][0], sums[end] - sums[start] + extra),
                    abs(end - start - count / stages),
                    end - start,
                )
                for start in range(stage - 1, end)
                if start in best[-1]
            ]
            load, _, size = min(options)
            row[end] = (load, size)
        best.append(row)
    sizes, end = [], count
    for stage in range(stages, 0, -1):
        size = best[stage][end][1]
        sizes.append(size)
        end -= size
    return sizes[::-1]
