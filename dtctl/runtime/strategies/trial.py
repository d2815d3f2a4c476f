"""The loss of a few samples and the stream between blocks, of the divided model and of the whole one, before training.

How a model may be cut depends on its code, which no plan can see. A cut that does not fit often runs without an error
and learns something else, so the loss of one batch is compared: in fp32, where little is rounded, or in the number
format of the training, if the model's kernels take no other (those of flash-attn).

Blocks that begin as the identity, or an output layer that begins at zero, hide a block that is given the wrong stream.
So a pipeline is compared with noise behind each block, and by what each block is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.strategies.blocks import Blocks

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
    was_training = model.training
    model.eval()
    with torch.no_grad():
        value = float(probe(model))
    model.train(was_training)
    return value


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
    if found is None or model._compiled_call_impl is not None:  # whose forward pass cannot be told apart
        return
    held, forward, was_training = model.__dict__.get("forward"), model.forward, model.training

    def without_graph(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return forward(*args, **kwargs)

    model.__dict__["forward"] = without_graph
    model.eval()
    try:
        with torch.enable_grad():
            reached = _parameters_behind(probe(model))
    finally:
        model.train(was_training)
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
    """Inputs of the blocks in a forward pass; with noise behind each, while the context lasts."""

    def __init__(self, found: Blocks | None) -> None:
        self._modules = [] if found is None else found.modules
        self._whole: dict[int, torch.Tensor] = {}
        self._is_idle = self._is_divided = False
        self._stack = ExitStack()
        self.worst = 0.0
        """Largest norm of a difference between the whole and the divided model, as a share of the norm."""

    def __enter__(self) -> Self:
        for index, block in enumerate(self._modules):
            self._stack.enter_context(block.register_forward_pre_hook(self._look(index)))
            self._stack.enter_context(block.register_forward_hook(self._stir(index)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pause(self) -> None:
        """Neither look nor stir until `divided`: copies of blocks have the hooks, too."""
        self._is_idle = True

    def divided(self) -> None:
        """Compare from now on."""
        self._is_idle, self._is_divided = False, True

    def _look(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and not self._is_idle:
                self._note(index, args[0])

        return hook

    def _stir(self, index: int) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, stream: Any) -> Any:
            if self._is_idle or not isinstance(stream, torch.Tensor) or not stream.is_floating_point():
                return stream
            generator = torch.Generator(stream.device).manual_seed(index)
            # Not like the stream, whose layout in memory may differ, and with it which number goes where.
            noise = torch.randn(stream.shape, generator=generator, dtype=stream.dtype, device=stream.device)
            stirred = stream + noise * stream.square().mean().sqrt().clamp(min=1e-3)
            if index + 1 == len(self._modules):
                self._note(index + 1, stirred)
            return stirred

        return hook

    def _note(self, index: int, stream: torch.Tensor) -> None:
        if not self._is_divided:
            self._whole[index] = stream.detach().clone()
            return
        before = self._whole.get(index)
        if before is None or before.shape != stream.shape:
            self.worst = math.inf
            return
        away = float(torch.linalg.vector_norm(stream.detach().double() - before.double()))
        share = away / max(float(torch.linalg.vector_norm(before.double())), 1e-12)
        self.worst = max(self.worst, math.inf if math.isnan(share) else share)


def require_agreement(
    whole: float, divided: float, worker: Worker, *, how: str, rounding: float = ROUNDING, stream: float = 0.0
) -> None:
    """Compare the losses of the model before and after it was divided, and the streams between its blocks.

    Args:
        whole: of the model in one piece.
        divided: after.
        worker: this worker.
        how: what was done to it, for the message.
        rounding: by which share they may differ.
        stream: by which share what this worker's blocks are given differs at most.

    Raises:
        PlanError: they differ by more than rounding, on any worker; on every worker.
    """
    near = abs(whole - divided) <= rounding * max(1.0, abs(whole))  # false for NaN
    bad, apart = worker.sum(torch.tensor([0.0 if near else 1.0, 0.0 if stream <= rounding else 1.0])).tolist()
    if not bad and apart:
        raise PlanError(
            f"{how}, blocks are given something else than in one piece",
            where="train.strategy",
            hint="in a pipeline one tensor goes from block to block, and nothing may happen to it in between; see "
            "docs/strategies.md",
        )
    if bad:
        raise PlanError(
            f"{how}, the model has the loss {divided:.6g} on the first samples, and {whole:.6g} in one piece",
            where="train.strategy",
            hint='its code does not allow this; see "What the model must be like" in docs/strategies.md',
        )
