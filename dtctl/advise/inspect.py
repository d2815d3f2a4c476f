"""Figures of the user's own model: `python -m dtctl.advise.inspect MODULE:FACTORY [SEQ]`, under the job's Python.

Builds the model on torch's meta device, where it needs no memory, runs its forward pass on tokens [1, SEQ], and prints
one JSON object: what it has and what it would keep for the backward pass. The factory returns a model, or a model and
the tuple of its inputs. An object with `error` has the reason why it could not be done.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtctl.estimate import model_shapes


def load(name: str) -> Callable[[], Any]:
    """Return the factory `module:name`.

    Raises:
        ValueError: there is none.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"{name} is not MODULE:FACTORY")
    sys.path.insert(0, str(Path.cwd()))
    try:
        imported: Any = importlib.import_module(module)
    except ImportError as exc:
        raise ValueError(f"module {module} cannot be imported: {exc}") from exc
    for part in attribute.split("."):
        if not hasattr(imported, part):
            raise ValueError(f"module {module} has no {attribute}")
        imported = getattr(imported, part)
    if not callable(imported):
        raise ValueError(f"{name} is not a function or class")
    return imported  # type: ignore[no-any-return]


def find_repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the ModuleList or Sequential with the most parameters that has more than one member."""
    lists = [
        submodule
        for submodule in model.modules()
        if isinstance(submodule, nn.ModuleList | nn.Sequential) and len(submodule) > 1
    ]
    best = max(lists, key=lambda submodule: sum(p.numel() for p in submodule.parameters()), default=None)
    return list(best) if best is not None else [model]


def collect_model_figures(built: Any, seq: int) -> dict[str, Any]:
    """Return all figures of a model on the meta device.

    Raises:
        ValueError: the result is not a model, or its forward pass cannot be run.
    """
    model, inputs = built if isinstance(built, tuple) else (built, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"the factory returns {type(model).__name__}, and not a model")
    if inputs is None:
        inputs = (torch.zeros(1, seq, dtype=torch.int64, device="meta"),)
    block_list = find_repeated_blocks(model)
    try:
        measured = model_shapes.measure_forward_pass(model, block_list, lambda: model(*inputs), samples=1)
    except Exception as exc:
        raise ValueError(
            f"the forward pass cannot be run on the meta device: {type(exc).__name__}: {exc}; a factory that returns "
            "(model, inputs) can give it other inputs"
        ) from exc
    return model_shapes.collect_static_figures(model, block_list) | measured | {"seq": seq if measured["vocab"] else 1}


def main(argv: list[str]) -> int:
    """Print the figures, or the reason why there are none."""
    try:
        factory = load(argv[0])
        try:
            with torch.device("meta"):
                built = factory()
        except Exception as exc:
            raise ValueError(f"the model cannot be built on the meta device: {type(exc).__name__}: {exc}") from exc
        result = collect_model_figures(built, int(argv[1]) if len(argv) > 1 else 1024)
    except ValueError as exc:
        print(json.dumps({"error": str(exc)}))  # noqa: T201 - this is the answer
        return 1
    print(json.dumps(result))  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
