"""State as trees: plain dicts and lists with tensors in them, keyed by parameter names rather than by positions."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.format.encoding import NotEncodable, decode, encode

CONFIGURED: Final = "$configured"
"""Key in a group of an optimizer's tree: the arguments that the optimizer was made with."""
_OPAQUE: Final = "$opaque"
_INLINE_BYTES: Final = 1 << 16


Configured = dict[torch.Tensor, dict[str, Any]]
"""Parameter -> the values of its group, encoded."""


def configured(optimizer: torch.optim.Optimizer) -> Configured:
    """Return the values of each parameter's group of an optimizer before its first step."""
    settings: Configured = {}
    for group in optimizer.param_groups:
        values = group_values(group)
        settings |= dict.fromkeys(group["params"], values)
    return settings


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group besides parameters, encoded; others by the name of their type, as a setting."""
    settings: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params":
            try:
                settings[key] = _inline(encode(value, f"param_groups.{key}"))
            except NotEncodable:
                settings[key] = {_OPAQUE: type(value).__qualname__}
    return settings


def _inline(tree: Any) -> Any:
    """Small tensors as text: workers that share the writing of a snapshot divide tensors among them, not groups."""
    if isinstance(tree, torch.Tensor):
        whole = tree.full_tensor() if hasattr(tree, "full_tensor") else tree
        if whole.numel() * whole.element_size() > _INLINE_BYTES:
            return whole
        return {
            "$tensor_bytes": [
                str(whole.dtype).removeprefix("torch."),
                list(whole.shape),
                raw(whole).numpy().tobytes().hex(),
            ]
        }
    if isinstance(tree, dict):
        return {key: _inline(value) for key, value in tree.items()}
    return [_inline(value) for value in tree] if isinstance(tree, list) else tree


def name_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Return the name of each parameter; one that the model does not have is called by its place in the optimizer."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"param_groups.{number}.{index}")
    return names


def optimizer_tree(
    model: nn.Module, optimizer: torch.optim.Optimizer, configured: Configured | None = None
) -> dict[str, Any]:
    """Return all of an optimizer's state, with parameters by name.

    Args:
        model: the model that the optimizer trains.
        optimizer: any; what its own `state_dict` adds is taken along.
        configured: its groups when it was made, by `configured`; a resume uses them to distinguish changes by the
            training from changes of the configuration.

    Returns:
        `{"class": ..., "state": {name: {...}}, "groups": [{"params": [name, ...], ...}], ...}`; tensors are not copied.

    Raises:
        NotEncodable: a parameter's state has something that snapshots do not keep.
    """
    names = name_parameters(model, optimizer)
    groups = []
    for group in optimizer.param_groups:
        initial = configured.get(group["params"][0]) if configured is not None and group["params"] else None
        entry = {} if initial is None else {CONFIGURED: initial}
        groups.append({**group_values(group), **entry, "params": [names[parameter] for parameter in group["params"]]})
    state: dict[str, Any] = {}
    other: list[Any] = []
    on_cpu: dict[str, dict[str, bool]] = {}
    held: Mapping[Any, Any] = optimizer.state  # torch documents parameters only; other optimizers keep more there
    for key, values in held.items():
        if not isinstance(key, torch.Tensor):
            other.append([encode(key, "optimizer.state (a key)"), encode(values, f"optimizer.state.{key}")])
            continue
        name = names.get(key)
        if name is None:
            raise NotEncodable(
                "the optimizer has state of a tensor that is neither a parameter of the model nor in param_groups",
                hint="give it to the Trainer in `extra_state`",
            )
        state[name] = encode(dict(values), f"optimizer.state.{name}")
        if key.device.type != "cpu":
            there = {str(what): True for what, value in values.items() if _is_on_cpu(value)}
            on_cpu |= {name: there} if there else {}
    tree: dict[str, Any] = {"class": class_name(optimizer), "state": state, "groups": groups}
    if other:
        tree["other"] = other
    if on_cpu:
        tree["on_cpu"] = on_cpu
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        own = {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}
        if own:
            tree["own"] = encode(own, "optimizer.state_dict()")
    return tree


def _is_on_cpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def class_name(value: object) -> str:
    """Return the name of an object's class, with its module unless that is the script, which may also be imported."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "__main__" else f"{kind.__module__}.{kind.__qualname__}"


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tree: Mapping[str, Any],
    *,
    whole: bool = True,
    configured: Configured | None = None,
) -> list[str]:
    """Put an `optimizer_tree` back: the state of each parameter, and what the groups had, the learning rate included.

    Tensors keep their number format (torch's own `load_state_dict` gives them that of the parameter).

    Args:
        model: the model that the optimizer trains.
        optimizer: over all of its parameters, or a part; just made.
        tree: whole.
        whole: whether the optimizer should have all parameters of the tree; else it may have a part of them.
        configured: its groups when it was made. A value whose configuration has changed since the snapshot keeps its
            new configuration. None: every value becomes that of the tree.

    Returns:
        The changes of the configuration, a phrase each.

    Raises:
        SnapshotError: the optimizer has other parameters, or is of another class.
    """
    if tree.get("class", class_name(optimizer)).rpartition(".")[2] != class_name(optimizer).rpartition(".")[2]:
        raise SnapshotError(
            f"the optimizer of the snapshot is {tree['class']}, and this one is {class_name(optimizer)}",
            hint="resume with the optimizer that the run began with, or start over with `train.snapshot.dir`",
        )
    names = name_parameters(model, optimizer)
    own = {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
    then = {name for group in tree["groups"] for name in group["params"]}
    if own != then if whole else not own <= then:
        raise SnapshotError(
            "the optimizer of the snapshot has other parameters",
            hint="resume with the optimizer that the run began with, or start over with `train.snapshot.dir`",
        )
    if "own" in tree:
        _load_own(optimizer, decode(tree["own"]))
    differences = _load_groups(optimizer, names, tree["groups"], configured)
    parameters = {name: parameter for parameter, name in names.items()}
    for name, values in tree["state"].items():
        if name in own:
            parameter = parameters[name]
            stays = tree.get("on_cpu", {}).get(name, {})
            optimizer.state[parameter] = {
                key: _placed(_cut(parameter, value), parameter, stays=str(key) in stays)
                for key, value in decode(values).items()
            }
    for key, values in tree.get("other", ()):
        optimizer.state[decode(key)] = decode(values)
    return differences


def _load_own(optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
    """Give an optimizer what its own `state_dict` had added.

    What is as large as a divided parameter is divided like it.

    Raises:
        SnapshotError: the optimizer does not take it.
    """
    divided: dict[torch.Size, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, "device_mesh"):
                divided.setdefault(parameter.shape, parameter)

    def cut(value: torch.Tensor) -> torch.Tensor:
        like = divided.get(value.shape)
        found: torch.Tensor = value if like is None else _cut(like, value)
        return found

    try:
        optimizer.load_state_dict({**optimizer.state_dict(), **tree_map_only(torch.Tensor, cut, extra)})
    except Exception as exc:
        text = str(exc).partition("\n")[0]
        raise SnapshotError(
            f"{class_name(optimizer)}.load_state_dict does not take what its state_dict has returned: {text}",
            where=", ".join(map(str, extra)),
            hint="it is given whole tensors, and such that are as large as a divided parameter as DTensors that are "
            "divided like it",
        ) from exc


def _placed(value: Any, parameter: torch.Tensor, *, stays: bool) -> Any:
    if not isinstance(value, torch.Tensor) or stays or hasattr(value, "device_mesh"):
        return value
    moved = value.to(parameter.device)
    if moved.shape != parameter.shape or moved.stride() == parameter.stride():
        return moved
    # Fused optimizers take the numbers of both as they lie in memory (channels_last).
    return torch.empty_like(parameter, dtype=moved.dtype, requires_grad=False).copy_(moved)


def _load_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    groups: Sequence[Mapping[str, Any]],
    configured: Configured | None,
) -> list[str]:
    """Give each group of the optimizer the values of the group in which its parameters were; in place."""
    home = {name: group for group in groups for name in group["params"]}
    differences: dict[str, None] = {}
    for number, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            continue
        source = home[names[group["params"][0]]]
        initial = configured[group["params"][0]] if configured is not None else {}
        told_then = source.get(CONFIGURED)
        for parameter in group["params"]:
            other = home[names[parameter]]
            for key in source.keys() | other.keys():
                if key not in ("params", CONFIGURED) and not same(source.get(key), other.get(key)):
                    differences[f"{key} of optimizer groups was not the same for parameters that are one group now"] = (
                        None
                    )
        for key, value in source.items():
            if key in ("params", CONFIGURED) or (isinstance(value, dict) and _OPAQUE in value):
                continue
            if configured is None or (told_then is not None and same(told_then.get(key), initial.get(key))):
                group[key] = _like_before(group.get(key), decode(value))
        if configured is not None:
            before = told_then if told_then is not None else source
            for key in before.keys() | initial.keys():
                if key not in ("params", CONFIGURED) and not same(before.get(key), initial.get(key)):
                    was, now = _told(before.get(key)), _told(initial.get(key))
                    differences[f"optimizer.param_groups[{number}].{key} changed from {was} to {now}"] = None
    return list(differences)


def _told(value: Any) -> str:
    opaque = isinstance(value, dict) and _OPAQUE in value
    return f"a {value[_OPAQUE]}" if opaque else repr(decode(value))[:80]


def _like_before(held: Any, value: Any) -> Any:
    """Return a value as a group has it: on the same device, if it is a tensor there."""
    if isinstance(value, torch.Tensor):
        return value.to(held.device) if isinstance(held, torch.Tensor) else value.clone()
    return value


def same(one: Any, other: Any) -> bool:
    """Return whether two encoded values are equal, tensors bit by bit; NaN equals itself, a tuple its list."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return (
            are_tensors
            and one.dtype == other.dtype
            and one.shape == other.shape
            and bool(torch.equal(raw(one), raw(other)))
        )
    one, other = (value.get("$tuple", value) if isinstance(value, dict) else value for value in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def register_late(model: nn.Module, tree: Mapping[str, Any], names: Iterable[str]) -> None:
    """Register buffers that a model has made while it was trained, where a module is there to have them."""
    modules = dict(model.named_modules())
    for name in names:
        owner, _, last = name.rpartition(".")
        module = modules.get(owner)
        if module is not None and isinstance(tree.get(name), torch.Tensor) and not hasattr(module, last):
            device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
            module.register_buffer(last, tree[name].to(device, copy=True))


def load_model(model: nn.Module, tree: Mapping[str, Any], *, absent_keys: Collection[str] = ()) -> None:
    """Put a model's state back.

    Args:
        model: whole, or what this worker has of it.
        tree: of the whole model.
        absent_keys: names that belong to other workers.

    Raises:
        SnapshotError: names or shapes differ.
    """
    own = model.state_dict()
    mine = {name: _cut(own[name], value) if name in own else value for name, value in tree.items()}
    try:
        model.load_state_dict({name: value for name, value in mine.items() if name in own or name not in absent_keys})
    except RuntimeError as exc:
        raise SnapshotError(
            f"the snapshot is of another model: {' '.join(str(exc).split())[:400]}",
            hint="resume with the model that the run began with, or start over with `train.snapshot.dir`",
        ) from exc


def _cut(tensor: torch.Tensor, value: Any) -> Any:
    """Return what a worker that has `tensor` takes of a value as large as it."""
    if not isinstance(value, torch.Tensor) or not hasattr(tensor, "device_mesh"):
        return value
    # Who reads snapshots without training should not wait for this import.
    from dtctl.runtime.snapshot.format.pieces import like

    return like(tensor, value)


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a tree with its path, `blocks.0.weight.exp_avg`, in the order of the tree."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from tensors(value, f"{path}.{index}" if path else str(index))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat uint8 tensor on the CPU; a view where that is possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def checksum_tree(tree: Any) -> int:
    """Return one number for an encoded tree, the same on workers that have the same."""
    crc = zlib.crc32(json.dumps(_without_tensors(tree), sort_keys=True).encode())
    for name, tensor in tensors(tree):
        crc = zlib.crc32(name.encode(), crc)
        if tensor.numel():
            crc = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def _without_tensors(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return [str(tree.dtype), list(tree.shape)]
    if isinstance(tree, dict):
        return {key: _without_tensors(value) for key, value in tree.items()}
    return [_without_tensors(value) for value in tree] if isinstance(tree, list) else tree


def digest(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> str:
    """BLAKE3 over names, dtypes, shapes and bytes of every model and optimizer tensor, in the order of their names.

    Args:
        model: the state of the model, whole.
        optimizer: a tree of `optimizer_tree`, whole.

    Raises:
        SnapshotError: the package blake3 is not installed.
    """
    state = layout.hasher("blake3")
    entries = dict(tensors(model, "model")) | dict(tensors(optimizer["state"], "optimizer"))
    for name in sorted(entries):
        tensor = entries[name]
        state.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        state.update(raw(tensor).numpy().data)
    return state.hexdigest()
