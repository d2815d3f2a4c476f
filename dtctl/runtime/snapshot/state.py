"""State as trees: plain dicts and lists with tensors in them, keyed by parameter names rather than by positions."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import layout


def optimizer_tree(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state with parameters by name.

    Returns:
        `{"state": {name: {...}}, "groups": [{"params": [name, ...], ...}]}`; tensors are not copied.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        rest = {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
        groups.append({**rest, "params": [names[parameter] for parameter in group["params"]]})
    state = {names[parameter]: dict(values) for parameter, values in optimizer.state.items()}
    return {"state": state, "groups": groups}


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], *, whole: bool = True
) -> None:
    """Put the state of an `optimizer_tree` back. Learning rate, decay and the like stay as they are configured now.

    Args:
        model: whose parameters the optimizer has.
        optimizer: over all of them, or a part.
        tree: whole.
        whole: whether the optimizer should have all parameters of the tree; else it may have a part of them.

    Raises:
        SnapshotError: the optimizer has other parameters.
    """
    now = optimizer.state_dict()["param_groups"]
    names = [name for group in optimizer_tree(model, optimizer)["groups"] for name in group["params"]]
    then = {name for group in tree["groups"] for name in group["params"]}
    if set(names) != then if whole else not set(names) <= then:
        raise SnapshotError(
            "the optimizer of the snapshot has other parameters",
            hint="resume with the optimizer that the run began with, or begin anew with `train.snapshot.dir`",
        )
    # torch numbers parameters through its groups; which group one is in is a matter of configuration, not of state.
    place = dict(zip(names, (index for group in now for index in group["params"]), strict=True))
    parameters = dict(model.named_parameters())
    state = {
        place[name]: {key: _cut(parameters[name], value) for key, value in values.items()}
        for name, values in tree["state"].items()
        if name in place
    }
    optimizer.load_state_dict({"state": state, "param_groups": now})


def load_model(model: nn.Module, tree: Mapping[str, Any], *, elsewhere: Collection[str] = ()) -> None:
    """Put a model's state back.

    Args:
        model: whole, or what this worker has of it.
        tree: of the whole model.
        elsewhere: names that belong to other workers.

    Raises:
        SnapshotError: names or shapes differ.
    """
    own = model.state_dict()
    mine = {name: _cut(own[name], value) if name in own else value for name, value in tree.items()}
    try:
        model.load_state_dict({name: value for name, value in mine.items() if name in own or name not in elsewhere})
    except RuntimeError as exc:
        raise SnapshotError(
            f"the snapshot is of another model: {' '.join(str(exc).split())[:400]}",
            hint="resume with the model that the run began with, or begin anew with `train.snapshot.dir`",
        ) from exc


def _cut(tensor: torch.Tensor, value: Any) -> Any:
    """What a worker that has `tensor` takes of a value as large as it."""
    if not isinstance(value, torch.Tensor) or not hasattr(tensor, "device_mesh"):
        return value
    # Who reads snapshots without training should not wait for this import.
    from dtctl.runtime.snapshot.whole import like

    return like(tensor, value)


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a tree with its path, `blocks.0.weight.exp_avg`, in the order of the tree."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from tensors(value, f"{path}.{index}" if path else str(index))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a flat uint8 tensor on the CPU; a view where that is possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def digest(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> str:
    """BLAKE3 over names, dtypes, shapes and bytes of every model and optimizer tensor, in the order of their names.

    Args:
        model: the state of the model, whole.
        optimizer: a tree of `optimizer_tree`, whole.

    Raises:
        SnapshotError: the package blake3 is not installed.
    """
    state = layout.hasher("blake3")
    found = dict(tensors(model, "model")) | dict(tensors(optimizer["state"], "optimizer"))
    for name in sorted(found):
        tensor = found[name]
        state.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        state.update(raw(tensor).numpy().data)
    return state.hexdigest()
