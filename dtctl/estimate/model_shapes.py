"""Shapes of a model, from one forward pass on tensors that have shapes and no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


def collect_static_figures(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """Figures that need no forward pass; numbers of parameters are in units of 4 bytes.

    Args:
        model: on any device.
        blocks: its repeated blocks; the model itself, if it has none.
    """
    tables = [submodule for submodule in model.modules() if isinstance(submodule, nn.Embedding)]
    heads = [submodule.num_heads for submodule in model.modules() if isinstance(submodule, nn.MultiheadAttention)]
    return {
        "params": _count_parameter_words(model.parameters()),
        "frozen": _count_parameter_words(submodule for submodule in model.parameters() if not submodule.requires_grad),
        "looked_up": _count_parameter_words(submodule.weight for submodule in tables),
        "tables": _count_parameter_words({submodule.weight for submodule in tables}),
        "stacked": _count_parameter_words(parameter for parameter in model.parameters() if parameter.dim() > 2),
        "vectors": _count_parameter_words(parameter for parameter in model.parameters() if parameter.dim() < 2),
        "layers": len(blocks),
        "block_params": max(_count_parameter_words(block.parameters()) for block in blocks),
        "hidden": tables[0].embedding_dim if tables else 1,
        "heads": heads[0] if heads else None,
        "vocab": 0,
        "seq": 1,
        "kept_bytes": 0,
    }


def _count_parameter_words(parameters: Iterator[nn.Parameter] | Any) -> float:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 4


def measure_forward_pass(
    model: nn.Module, blocks: Sequence[nn.Module], run: Callable[[], Any], *, samples: int
) -> dict[str, Any]:
    """Return figures of one forward pass, in addition to those of `collect_static_figures`.

    Errors of the pass are passed on.

    Args:
        model: the model; its tensors have no memory, or little.
        blocks: its repeated blocks.
        run: calls the model once, and perhaps a loss with what it returns.
        samples: in the batch that `run` has.
    """
    shape: tuple[int, ...] = ()
    inner = entering = 0

    def returned(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal shape, inner
        shape, inner = tuple(output.shape) if isinstance(output, torch.Tensor) else (), tracker.bytes

    def entered(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal entering
        input_bytes = [value.numel() * value.element_size() for value in inputs if isinstance(value, torch.Tensor)]
        entering = max(entering, *input_bytes[:1], 0)

    handles = [model.register_forward_hook(returned), *(block.register_forward_pre_hook(entered) for block in blocks)]
    tracker = SavedTensors(model)
    try:
        with torch.autograd.graph.saved_tensors_hooks(tracker.keep, lambda tensor: tensor):
            run()
    finally:
        for handle in handles:
            handle.remove()
    tables = [block for block in model.modules() if isinstance(block, nn.Embedding)]
    logits = len(shape) == 3 and bool(tables)
    measured: dict[str, Any] = {"vocab": shape[-1] if logits else 0, "seq": shape[1] if logits else 1}
    # A formula counts the loss that is computed from logits; any other loss is part of what was measured.
    measured |= {"kept_bytes": (inner if logits else tracker.bytes) / samples, "entering_bytes": entering / samples}
    # An embedding that shares its weight with the output layer also takes part in a matrix product.
    tied = any(block.num_embeddings == (shape[-1] if shape else -1) for block in tables) and not any(
        isinstance(block, nn.Linear) and block.out_features == shape[-1] for block in model.modules()
    )
    return measured | ({"looked_up": 0} if tied else {})


class SavedTensors:
    """Tensors that autograd keeps for the backward pass, each storage once, without the model's own.

    Attributes:
        bytes: sum over all tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model_storages = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
        self._storages: dict[int, Any] = {}
        self.bytes = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is saved."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._model_storages and storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage  # kept alive, so that no other storage gets the same id
            self.bytes += storage.nbytes()
        return tensor
