"""The loss of a few samples, and what flows between blocks, of the divided model and of the whole one, before training.

How a model may be cut depends on its code, which no plan can see. A cut that does not fit often runs without an error
and learns something else, so the loss of one batch is compared: in fp32, where little is rounded, or in the number
format of the training, if the model's kernels take no other (those of flash-attn).

Blocks that begin as the identity, or an output layer that begins at zero, hide a block that is given the wrong stream.
So a pipeline is compared with noise behind each block, by what each block is given and by the gradient that it gives
back, and by the gradients of all parameters outside of blocks: a function between two blocks that changes gradients
alone, such as one that scales them, is run by both stages and shows nowhere else.
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
from dtctl.runtime.strategies.blocks import Blocks
from dtctl.runtime.strategies.comparison import evaluating, largest_difference, put_together, relative_difference

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11

Probe = Callable[[nn.Module], torch.Tensor]
"""The loss of one batch, the same batch on all workers, with a model that is called as the user's is."""
ROUNDING: Final = 1e-3
ROUNDING_OF_HALVES: Final = 2e-2
"""Shares of the loss by which sums in another order may change it, in fp32 and in bf16 or fp16."""


def whole(probe: Probe, model: nn.Module, autocast: AbstractContextManager[Any] | None) -> tuple[float, Probe, float]:
    """Return the loss of the model in one piece, how to measure that of its parts, and by which share they may differ.

    Args:
        probe: computes the loss.
        model: in one piece.
        autocast: the number format of the training; None if that is fp32.
    """
    try:
        return measure(probe, model), probe, ROUNDING
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if autocast is None:
            raise

    def as_trained(model: nn.Module) -> torch.Tensor:
        with autocast:
            return probe(model)

    return measure(as_trained, model), as_trained, ROUNDING_OF_HALVES


def measure(probe: Probe, model: nn.Module) -> float:
    """Return the loss without dropout; the model's mode is as before afterwards."""
    with evaluating(model), torch.no_grad():
        return float(probe(model))


def compute_gradients(probe: Probe, model: nn.Module, found: Blocks) -> dict[str, torch.Tensor]:
    """Return the gradients of trained parameters outside of blocks, by name; the model has none afterwards."""
    inside = {parameter for block in found.modules for parameter in block.parameters()}
    names = [name for name, value in model.named_parameters() if value.requires_grad and value not in inside]
    with evaluating(model), torch.enable_grad():
        probe(model).backward()  # type: ignore[no-untyped-call]
    return take_gradients(model, names)


def take_gradients(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the whole gradients of some parameters, and leave the model without any; collective if it is divided."""
    held = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    taken = {name: put_together(held[name].detach()) for name in names if name in held}
    model.zero_grad(set_to_none=True)
    return taken


def require_results_alone(probe: Probe, model: nn.Module, found: Blocks | None) -> None:
    """See that the loss depends on the weights of blocks by way of the model's results alone.

    In a pipeline the loss function runs where the last blocks are. A term that it has of the weights of others, such as
    a penalty, has no gradient there, and may be too small to show in the loss of a few samples.

    Args:
        probe: computes the loss.
        model: in one piece.
        found: its blocks.

    Raises:
        PlanError: the loss function reads the weights of a block.
    """
    if found is None or model._compiled_call_impl is not None:  # no separate blocks
        return
    held, forward = model.__dict__.get("forward"), model.forward

    def without_graph(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return forward(*args, **kwargs)

    model.__dict__["forward"] = without_graph
    try:
        with evaluating(model), torch.enable_grad():
            reached = _parameters_behind(probe(model))
    finally:
        del model.__dict__["forward"]
        if held is not None:
            model.__dict__["forward"] = held
    for block, module in zip(found.names, found.modules, strict=True):
        for name, parameter in module.named_parameters(block):
            if id(parameter) in reached:
                raise PlanError(
                    f"the loss function reads {name} besides calling the model, and in a pipeline it has the last "
                    "blocks only",
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


class Stream:
    """Inputs of the blocks in a forward pass and their gradients; with noise behind each, while the context lasts."""

    def __init__(self, found: Blocks | None) -> None:
        self._modules = [] if found is None else found.modules
        self._whole: dict[tuple[str, int], torch.Tensor] = {}
        self._awaited: set[tuple[str, int]] = set()
        """Gradients that are still to come from the divided model."""
        self._is_idle = self._is_divided = False
        self._stack = ExitStack()
        self._worst = 0.0

    def __enter__(self) -> Self:
        for index, block in enumerate(self._modules):
            self._stack.enter_context(block.register_forward_pre_hook(self._look(index)))
            self._stack.enter_context(block.register_forward_hook(self._stir(index)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def worst(self) -> float:
        """Largest norm of a difference between the whole and the divided model, as a share of the norm."""
        return math.inf if self._awaited else self._worst

    def pause(self) -> None:
        """Neither look nor stir until `divided`: copies of blocks have the hooks, too."""
        self._is_idle = True

    def divided(self) -> None:
        """Compare from now on."""
        self._is_idle, self._is_divided = False, True

    def _look(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and not self._is_idle:
                self._note_both(index, args[0])

        return hook

    def _stir(self, index: int) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, stream: Any) -> Any:
            if self._is_idle or not isinstance(stream, torch.Tensor) or not stream.is_floating_point():
                return stream
            generator = torch.Generator(stream.device).manual_seed(index)
            # Not `randn_like`: the stream's layout in memory may differ, and with it the place of each number.
            noise = torch.randn(stream.shape, generator=generator, dtype=stream.dtype, device=stream.device)
            stirred = stream + noise * _size(stream.detach()).clamp(min=1e-3)
            if index + 1 == len(self._modules):
                self._note_both(index + 1, stirred)
            if stream.requires_grad:
                # Behind an output layer of zeros the gradients are zero: there the noise is the whole gradient. The
                # hook is not on the sum, whose gradient is what the next block returns.
                stream.register_hook(lambda gradient: gradient + noise * (_size(gradient) or 1.0))  # type: ignore[no-untyped-call]
            return stirred

        return hook

    def _note_both(self, index: int, stream: Any) -> None:
        """Note what a block is given, and later its gradient."""
        self._note(("stream", index), stream)
        if not isinstance(stream, torch.Tensor) or not stream.requires_grad:
            return
        key = ("gradient", index)
        if self._is_divided and key in self._whole:
            self._awaited.add(key)
        if not self._is_divided or key in self._whole:  # what arrives at a stage requires a gradient, frozen or not
            stream.register_hook(lambda gradient: self._note(key, gradient))  # type: ignore[no-untyped-call]

    def _note(self, key: tuple[str, int], value: torch.Tensor) -> None:
        self._awaited.discard(key)
        if not self._is_divided:
            self._whole[key] = value.detach().clone()
            return
        before = self._whole.get(key)
        share = math.inf if before is None else relative_difference(before, value.detach(), 1e-12)
        self._worst = max(self._worst, math.inf if math.isnan(share) else share)


def _size(stream: torch.Tensor) -> torch.Tensor:
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
    """Compare the losses of the model before and after it was divided, and what flows between its blocks.

    Args:
        whole: of the model in one piece.
        divided: after.
        worker: this worker.
        how: what was done to it, for the message.
        rounding: by which share they may differ.
        stream: by which share what this worker's blocks are given, or give back, differs at most.
        gradients: of parameters outside of blocks, in one piece and after.

    Raises:
        PlanError: they differ by more than rounding, on any worker; on every worker.
    """
    near = abs(whole - divided) <= rounding * max(1.0, abs(whole))  # false for NaN
    share, name = largest_difference(*gradients)
    flags = [not near, not stream <= rounding, not share <= rounding]
    bad, apart, unequal = worker.sum(torch.tensor([float(flag) for flag in flags])).tolist()
    if bad:
        raise PlanError(
            f"{how}, the model has the loss {divided:.6g} on the first samples, and {whole:.6g} in one piece",
            where="train.strategy",
            hint='its code does not allow this; see "What the model must be like" in docs/strategies.md',
        )
    if apart or unequal:
        what = "blocks are given something else than in one piece, or give back another gradient"
        if not apart:
            what = f"the gradient of {name or 'a parameter outside of blocks'} is another than in one piece"
        raise PlanError(
            f"{how}, {what}",
            where="train.strategy",
            hint="in a pipeline one tensor goes from block to block, and nothing may happen to it or to its gradient "
            "in between; see docs/strategies.md",
        )
