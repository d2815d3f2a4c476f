"""Comparison of the divided model with the whole one before training, by the loss and by the data between blocks.

Only the code of a model shows how it may be cut. A wrong cut often runs without an error and learns something else. So
the loss of one batch is compared: in fp32, where rounding is small, or in the number format of the run, if the model's
kernels support no other (those of flash-attn).

Blocks that begin as the identity, or an output layer that begins at zero, hide errors in the stream of a block. So a
pipeline is compared with noise after each block, by the input of each block, by the gradient of that input, and by the
gradients of all parameters outside of blocks. A function between two blocks that changes only gradients, such as one
that scales them, runs on both stages and is visible in no other value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.strategies.blocks import RepeatedBlocks
from dtctl.runtime.strategies.comparison import (
    compute_relative_difference,
    find_largest_difference,
    put_together,
    set_evaluation_mode,
)

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11

Probe = Callable[[nn.Module], torch.Tensor]
"""Function that returns the loss of one batch, the same on all workers, given a model that is called like the
user's."""
ROUNDING: Final = 1e-3
ROUNDING_OF_HALVES: Final = 2e-2
"""Relative changes of the loss that another order of additions explains, in fp32 and in bf16 or fp16."""


def measure_whole_model(
    probe: Probe, model: nn.Module, autocast: AbstractContextManager[Any] | None
) -> tuple[float, Probe, float]:
    """Return the loss of the whole model, a probe for the divided model, and the relative difference allowed.

    Args:
        probe: computes the loss.
        model: the model in one piece.
        autocast: context that sets the number format of the run; None for fp32.
    """
    try:
        return measure_loss(probe, model), probe, ROUNDING
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if autocast is None:
            raise

    def as_trained(model: nn.Module) -> torch.Tensor:
        with autocast:
            return probe(model)

    return measure_loss(as_trained, model), as_trained, ROUNDING_OF_HALVES


def measure_loss(probe: Probe, model: nn.Module) -> float:
    """Return the loss without dropout, and leave the model in its present mode."""
    with set_evaluation_mode(model), torch.no_grad():
        return float(probe(model))


def compute_gradients(probe: Probe, model: nn.Module, found: RepeatedBlocks) -> dict[str, torch.Tensor]:
    """Return the gradients of trained parameters outside of blocks, by name, and remove all gradients."""
    inside = {parameter for block in found.modules for parameter in block.parameters()}
    names = [name for name, value in model.named_parameters() if value.requires_grad and value not in inside]
    with set_evaluation_mode(model), torch.enable_grad():
        probe(model).backward()  # type: ignore[no-untyped-call]
    return take_gradients(model, names)


def take_gradients(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the whole gradients of some parameters, and remove all gradients; collective if the model is divided."""
    held = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    taken = {name: put_together(held[name].detach()) for name in names if name in held}
    model.zero_grad(set_to_none=True)
    return taken


def require_results_alone(probe: Probe, model: nn.Module, found: RepeatedBlocks | None) -> None:
    """Refuse a loss that depends on weights of blocks in other ways than through the model's results.

    In a pipeline the loss function runs on the workers with the last blocks. A term that depends on weights of other
    blocks, such as a penalty, has no gradient there, and may be too small to change the loss of a few samples
    noticeably.

    Args:
        probe: computes the loss.
        model: the model in one piece.
        found: blocks of the model.

    Raises:
        PlanError: the loss function reads the weights of a block.
    """
    if found is None or model._compiled_call_impl is not None:  # the model has no separate blocks
        return
    held, forward = model.__dict__.get("forward"), model.forward

    def without_graph(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return forward(*args, **kwargs)

    model.__dict__["forward"] = without_graph
    try:
        with set_evaluation_mode(model), torch.enable_grad():
            reached = _parameters_behind(probe(model))
    finally:
        del model.__dict__["forward"]
        if held is not None:
            model.__dict__["forward"] = held
    for block, module in zip(found.names, found.modules, strict=True):
        for name, parameter in module.named_parameters(block):
            if id(parameter) in reached:
                raise PlanError(
                    f"the loss function reads {name} in addition to calling the model, but in a pipeline it has only "
                    "the last blocks",
                    where="the loss function of the Trainer",
                    hint="`train.weight_decay` is a penalty of all weights; or use ddp, which has them on each worker",
                )


def _parameters_behind(value: torch.Tensor) -> set[int]:
    """Return the ids of the leaf tensors that gradients of a value would reach."""
    found, seen, todo = set[int](), set[Any](), [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [before for before, _ in node.next_functions]
    return found


class BlockInputRecorder:
    """Recorder of the inputs of blocks and of their gradients; inside the context it adds noise after each block."""

    def __init__(self, found: RepeatedBlocks | None) -> None:
        self._modules = [] if found is None else found.modules
        self._whole: dict[tuple[str, int], torch.Tensor] = {}
        self._awaited: set[tuple[str, int]] = set()
        """Gradients that the divided model has not computed yet."""
        self._is_idle = self._is_divided = False
        self._stack = ExitStack()
        self._worst = 0.0

    def __enter__(self) -> Self:
        for index, block in enumerate(self._modules):
            self._stack.enter_context(block.register_forward_pre_hook(self._make_input_hook(index)))
            self._stack.enter_context(block.register_forward_hook(self._make_noise_hook(index)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def max_relative_difference(self) -> float:
        """Return the largest norm of a difference between the whole and the divided model, relative to the norm."""
        return math.inf if self._awaited else self._worst

    def require_one_shape(self) -> None:
        """Refuse blocks that are given tensors of different shapes, which stages of a pipeline would wait for in vain.

        Raises:
            PlanError: the shape or the number format changes from one block to another.
        """
        given = [self._whole.get(("stream", index)) for index in range(len(self._modules))]
        kinds = [None if each is None else (list(each.shape), str(each.dtype).removeprefix("torch.")) for each in given]
        for index, kind in enumerate(kinds[1:], 1):
            before = kinds[index - 1]
            if kind is not None and before is not None and kind != before:
                raise PlanError(
                    f"block {index + 1} is given a tensor of shape {kind[0]} ({kind[1]}), and block {index} one of "
                    f"{before[0]} ({before[1]}); stages of a pipeline exchange tensors of one shape",
                    where="train.strategy",
                    hint="keep layers of other widths outside of the list of blocks, or use fsdp",
                )

    def pause(self) -> None:
        """Record nothing and add no noise until `start_comparison`, since copies of blocks have the hooks, too."""
        self._is_idle = True

    def start_comparison(self) -> None:
        """Compare with the record from now on."""
        self._is_idle, self._is_divided = False, True

    def _make_input_hook(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and not self._is_idle:
                self._note_both(index, args[0])

        return hook

    def _make_noise_hook(self, index: int) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, stream: Any) -> Any:
            if self._is_idle or not isinstance(stream, torch.Tensor) or not stream.is_floating_point():
                return stream
            generator = torch.Generator(stream.device).manual_seed(index)
            # Not `randn_like`: it depends on the memory layout of the stream, which may differ.
            noise = torch.randn(stream.shape, generator=generator, dtype=stream.dtype, device=stream.device)
            stirred = stream + noise * _compute_root_mean_square(stream.detach()).clamp(min=1e-3)
            if index + 1 == len(self._modules):
                self._note_both(index + 1, stirred)
            if stream.requires_grad:
                # With an output layer of zeros all gradients are zero, so the noise is the whole gradient. The hook is
                # not on the sum, whose gradient is that of the next block's input.
                stream.register_hook(lambda gradient: gradient + noise * (_compute_root_mean_square(gradient) or 1.0))  # type: ignore[no-untyped-call]
            return stirred

        return hook

    def _note_both(self, index: int, stream: Any) -> None:
        """Record or compare the input of a block, and later its gradient."""
        self._record_or_compare_stream(("stream", index), stream)
        if not isinstance(stream, torch.Tensor) or not stream.requires_grad:
            return
        key = ("gradient", index)
        if self._is_divided and key in self._whole:
            self._awaited.add(key)
        # the input of a stage requires a gradient even if all parameters before it are frozen
        if not self._is_divided or key in self._whole:
            stream.register_hook(lambda gradient: self._record_or_compare_stream(key, gradient))  # type: ignore[no-untyped-call]

    def _record_or_compare_stream(self, key: tuple[str, int], value: torch.Tensor) -> None:
        self._awaited.discard(key)
        if not self._is_divided:
            self._whole[key] = value.detach().clone()
            return
        before = self._whole.get(key)
        share = math.inf if before is None else compute_relative_difference(before, value.detach(), 1e-12)
        self._worst = max(self._worst, math.inf if math.isnan(share) else share)


def _compute_root_mean_square(stream: torch.Tensor) -> torch.Tensor:
    return stream.square().mean().sqrt()


def require_agreement(
    whole: float,
    divided: float,
    worker: Worker,
    *,
    how: str,
    rounding: float = ROUNDING,
    stream: float = 0.0,
    gradients: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] = ({}, {}),
) -> None:
    """Compare the loss and the data between blocks of the divided model with those of the whole model.

    Args:
        whole: loss of the model in one piece.
        divided: loss of the divided model.
        worker: this worker.
        how: description of the division for the message.
        rounding: relative difference of the losses that is allowed.
        stream: largest relative difference in inputs of this worker's blocks or in their gradients.
        gradients: gradients of parameters outside of blocks, in one piece and divided.

    Raises:
        PlanError: the difference on any worker is larger than rounding; raised on every worker.
    """
    near = abs(whole - divided) <= rounding * max(1.0, abs(whole))  # false for NaN
    share, name = find_largest_difference(*gradients)
    flags = [not near, not stream <= rounding, not share <= rounding]
    bad, apart, unequal = worker.sum(torch.tensor([float(flag) for flag in flags])).tolist()
    if bad:
        raise PlanError(
            f"{how}, the model has the loss {divided:.6g} on the first samples, and {whole:.6g} in one piece",
            where="train.strategy",
            hint='its code does not allow this; see "What the model must be like" in docs/strategies.md',
        )
    if apart or unequal:
        what = "inputs or gradients of blocks differ from those of the undivided model"
        if not apart:
            what = f"the gradient of {name or 'a parameter outside of blocks'} differs from that of the undivided model"
        raise PlanError(
            f"{how}, {what}",
            where="train.strategy",
            hint="in a pipeline one tensor goes from block to block, and nothing may happen to it or to its gradient "
            "in between; see docs/strategies.md",
        )
