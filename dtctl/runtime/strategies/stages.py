"""Cutting of a model between its blocks, without changes of its code.

A stage runs the model's own forward pass with another list of blocks. Blocks of earlier stages are skipped, and the
stream that arrives replaces their result. After the stage's last block the pass is left. Code before the blocks runs on
every stage, since it may make masks or positions for all blocks. Code after the blocks, and the loss, run only on the
last stage.

So a model must pass one tensor from block to block, as the first argument and the only result, and must not change it
in between. Parameters outside of blocks are on all stages, and their gradients are added up, so that tied embeddings
are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dtctl.errors import PlanError
from dtctl.runtime.strategies.blocks import RepeatedBlocks

Batch = tuple[Any, float]
"""A micro batch, and the weight of its loss."""
Loss = Callable[[nn.Module, Any], torch.Tensor]


class StageEndReached(Exception):
    """Exception at the end of a stage, which carries the stream out of the model's code."""

    def __init__(self, stream: torch.Tensor) -> None:
        super().__init__()
        self.stream = stream


class RemoteBlock(nn.Module):
    """Stand-in for a block of another worker. Its result must not be used; NaN shows a use."""

    def forward(self, stream: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return NaN in the shape of the stream."""
        return stream.new_full((), torch.nan).expand_as(stream)


class StageInput(nn.Module):
    """Stand-in for the last block before a stage."""

    source: Callable[[torch.Tensor], torch.Tensor]
    """Function that returns the stream, given a tensor of the same shape."""

    def forward(self, stream: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the stream from the previous stage."""
        return self.source(stream)


class StageOutput(nn.Module):
    """Stand-in for the first block after a stage."""

    def forward(self, stream: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Leave the model's forward pass.

        Raises:
            StageEndReached: always.
        """
        raise StageEndReached(stream)


class StageModel:
    """The model as one stage runs it."""

    def __init__(self, model: nn.Module, found: RepeatedBlocks, first: int, last: int) -> None:
        """Build the list of blocks for a stage.

        Args:
            model: model with all blocks, or at least those of the stage.
            found: blocks of the model.
            first: number of the stage's first block.
            last: number of the first block after the stage.
        """
        self.model, self.first = model, first
        self.device = next(model.parameters()).device
        self.entrance = StageInput()
        self.blocks = found.modules[first:last]
        view: list[nn.Module] = [*(RemoteBlock() for _ in range(first)), *self.blocks]
        if first:
            view[first - 1] = self.entrance
        if last < len(found):
            view += [StageOutput(), *(RemoteBlock() for _ in range(last + 1, len(found)))]
        self._view = nn.ModuleList(view) if isinstance(found.container, nn.ModuleList) else nn.Sequential(*view)
        self._place = found.name.rpartition(".")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass up to the end of this stage.

        Raises:
            StageEndReached: the stage is not the last one.
        """
        if not self._place[2]:
            return self._view(*args, **kwargs)
        with self._replacing_block_container():
            return self.model(*args, **kwargs)

    @contextmanager
    def _replacing_block_container(self) -> Iterator[None]:
        parent, name = self.model.get_submodule(self._place[0]), self._place[2]
        container = parent._modules[name]
        parent._modules[name] = self._view
        try:
            yield
        finally:
            parent._modules[name] = container


class StageCaller(nn.Module):
    """Model that the user's loss function gets; it calls one stage, always with the same number of samples."""

    cut: StageModel

    def __init__(self, cut: StageModel, samples: int | None = None) -> None:
        """Store the stage and the number of samples.

        Args:
            cut: the stage.
            samples: samples of a whole micro batch; shorter inputs are filled up, and the outputs cut down. None: no
                change.
        """
        super().__init__()
        self.__dict__["cut"] = cut  # not as a child, since its modules belong to the model
        self.samples = samples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stage with these arguments."""
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
        return _trim_result_samples(result, self.samples, count)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["cut"].model, name)


def _trim_result_samples(result: Any, samples: int, count: int) -> Any:
    if isinstance(result, torch.Tensor):
        return result[:count] if result.dim() and len(result) == samples else result
    if isinstance(result, dict):
        return {key: _trim_result_samples(value, samples, count) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return type(result)(_trim_result_samples(value, samples, count) for value in result)
    return result


class StageModule(nn.Module):
    """Stage in the form that torch's schedules require: a module that is called once for each micro batch."""

    cut: StageModel
    """The stage's part of the model."""
    outside: list[torch.Tensor]
    """Parameters outside of blocks."""
    task: Callable[[torch.Tensor | None, int], Any]
    """Function that each call runs, with the stream of the previous stage and the number of the micro batch. It returns
    the stream after this stage."""

    def __init__(self, cut: StageModel, outside: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(cut.blocks)
        # Not as children, since their modules belong to the model.
        self.__dict__["outside"] = list(outside)
        self.__dict__["cut"] = cut

    def forward(self, stream: torch.Tensor | None = None, *, index: torch.Tensor | None = None) -> Any:
        """Run the task; return the stream if it reached the end of this stage, else the result of the task."""
        try:
            return self.task(stream, 0 if index is None else int(index))
        except StageEndReached as reached:
            return reached.stream

    def train_on(self, batches: Sequence[Batch], loss: Loss, samples: int | None) -> None:
        """Call the loss function with these micro batches from now on.

        Args:
            batches: the micro batches, with the weights of their losses.
            loss: the user's loss function.
            samples: samples of a whole micro batch, to which shorter ones are filled up. None: no change.
        """
        caller = StageCaller(self.cut, samples)

        def task(stream: torch.Tensor | None, index: int) -> Any:
            if stream is not None:
                self.cut.entrance.source = lambda _: stream
            batch, weight = batches[index]
            return loss(caller, batch) * weight

        self.task = task

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Return all parameters of this stage with gradients: zero-bubble schedules compute no other gradients."""
        everything: list[Any] = [*super().parameters(recurse), *self.outside]
        return (parameter for parameter in everything if parameter.requires_grad)


def count_block_flops(found: RepeatedBlocks, run: Callable[[], Any]) -> tuple[list[int], int]:
    """Return the floating point operations of each block in a forward pass, and of the code after the last block.

    Code before the blocks runs on every stage and counts as free, since it usually consists of look-ups.
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


def balance_stage_sizes(blocks: Sequence[int], after: int, stages: int) -> list[int]:
    """Return the blocks per stage that give the most loaded stage the least work, the code after the blocks included.

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
