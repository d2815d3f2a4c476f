"""State as trees: plain dicts and lists with tensors, keyed by parameter names instead of positions."""

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
from dtctl.runtime.snapshot.format.encoding import NotEncodable, decode_value, encode_value

CONFIGURED: Final = "$configured"
"""Key in a group of an optimizer's tree: the arguments that the optimizer was made with."""
_OPAQUE: Final = "$opaque"
_NOT_SETTINGS: Final = frozenset(["params", CONFIGURED])
"""Keys of an encoded group that are not settings of the optimizer."""
_INLINE_BYTES: Final = 1 << 16


Configured = dict[torch.Tensor, dict[str, Any]]
"""Parameter -> encoded values of its group."""


def read_optimizer_settings(optimizer: torch.optim.Optimizer) -> Configured:
    """Return the values of each parameter's group of an optimizer before its first step."""
    settings: Configured = {}
    for group in optimizer.param_groups:
        values = group_values(group)
        settings |= dict.fromkeys(group["params"], values)
    return settings


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the encoded values of a group, except its parameters.

    A value that cannot be encoded is replaced by the name of its type.
    """
    settings: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params":
            try:
                settings[key] = _inline_small_tensors(encode_value(value, f"param_groups.{key}"))
            except NotEncodable:
                settings[key] = {_OPAQUE: type(value).__qualname__}
    return settings


def _inline_small_tensors(tree: Any) -> Any:
    """Return the tree with small tensors as text.

    Workers that write a snapshot together share out its tensors, but groups must be complete on each of them.
    """
    if isinstance(tree, torch.Tensor):
        whole = tree.full_tensor() if hasattr(tree, "full_tensor") else tree
        if whole.numel() * whole.element_size() > _INLINE_BYTES:
            return whole
        return {
            "$tensor_bytes": [
                str(whole.dtype).removeprefix("torch."),
                list(whole.shape),
                view_tensor_bytes(whole).numpy().tobytes().hex(),
            ]
        }
    if isinstance(tree, dict):
        return {key: _inline_small_tensors(value) for key, value in tree.items()}
    return [_inline_small_tensors(value) for value in tree] if isinstance(tree, list) else tree


def name_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Return the name of each parameter; one that the model lacks is named by its position in the optimizer."""
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
        optimizer: any optimizer; entries that its own `state_dict` adds are included.
        configured: values of its groups when it was made, from `read_optimizer_settings`; a resume uses them to
            distinguish changes by the training from changes of the configuration.

    Returns:
        `{"class": ..., "state": {name: {...}}, "groups": [{"params": [name, ...], ...}], ...}`; tensors are not copied.

    Raises:
        NotEncodable: a parameter's state has a value that snapshots cannot keep.
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
    # torch documents parameters as keys only; other optimizers have more keys
    held: Mapping[Any, Any] = optimizer.state
    for key, values in held.items():
        if not isinstance(key, torch.Tensor):
            other.append([encode_value(key, "optimizer.state (a key)"), encode_value(values, f"optimizer.state.{key}")])
            continue
        name = names.get(key)
        if name is None:
            raise NotEncodable(
                "the optimizer has state of a tensor that is neither a parameter of the model nor in param_groups",
                hint="give it to the Trainer in `extra_state`",
            )
        state[name] = encode_value(dict(values), f"optimizer.state.{name}")
        if key.device.type != "cpu":
            there = {str(what): True for what, value in values.items() if _is_on_cpu(value)}
            on_cpu |= {name: there} if there else {}
    tree: dict[str, Any] = {"class": format_class_name(optimizer), "state": state, "groups": groups}
    if other:
        tree["other"] = other
    if on_cpu:
        tree["on_cpu"] = on_cpu
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        own = {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}
        if own:
            tree["own"] = encode_value(own, "optimizer.state_dict()")
    return tree


def _is_on_cpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def format_class_name(value: object) -> str:
    """Return the name of an object's class, with its module.

    For a class of the main script the module is left out, since the script may also be imported by its name.
    """
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
    """Restore an `optimizer_tree`: the state of each parameter, and the values of the groups with the learning rate.

    Tensors keep their number format (torch's own `load_state_dict` gives them that of the parameter).

    Args:
        model: the model that the optimizer trains.
        optimizer: newly made optimizer over all parameters of the model, or some of them.
        tree: tree of the whole optimizer.
        whole: True if the optimizer should have all parameters of the tree; otherwise it may have some of them.
        configured: values of its groups when it was made. A value whose configuration has changed since the snapshot
            keeps its new configuration. None: every value is restored.

    Returns:
        Changes of the configuration, a phrase each.

    Raises:
        SnapshotError: the optimizer has other parameters or another class.
    """
    if (
        tree.get("class", format_class_name(optimizer)).rpartition(".")[2]
        != format_class_name(optimizer).rpartition(".")[2]
    ):
        raise SnapshotError(
            f"the optimizer of the snapshot is {tree['class']}, and this one is {format_class_name(optimizer)}",
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
        _load_own(optimizer, decode_value(tree["own"]))
    differences = _load_groups(optimizer, names, tree["groups"], configured)
    parameters = {name: parameter for parameter, name in names.items()}
    for name, values in tree["state"].items():
        if name in own:
            parameter = parameters[name]
            stays = tree.get("on_cpu", {}).get(name, {})
            optimizer.state[parameter] = {
                key: _place_like_parameter(_shard_value_like(parameter, value), parameter, stays=str(key) in stays)
                for key, value in decode_value(values).items()
            }
    for key, values in tree.get("other", ()):
        optimizer.state[decode_value(key)] = decode_value(values)
    return differences


def _load_own(optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
    """Restore the entries that an optimizer's own `state_dict` had added.

    A tensor of the shape of a divided parameter is divided in the same way.

    Raises:
        SnapshotError: the optimizer does not accept the entries.
    """
    divided: dict[torch.Size, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, "device_mesh"):
                divided.setdefault(parameter.shape, parameter)

    def cut(value: torch.Tensor) -> torch.Tensor:
        like = divided.get(value.shape)
        found: torch.Tensor = value if like is None else _shard_value_like(like, value)
        return found

    try:
        optimizer.load_state_dict({**optimizer.state_dict(), **tree_map_only(torch.Tensor, cut, extra)})
    except Exception as exc:
        text = str(exc).partition("\n")[0]
        raise SnapshotError(
            f"{format_class_name(optimizer)}.load_state_dict does not accept the result of its state_dict: {text}",
            where=", ".join(map(str, extra)),
            hint="it gets whole tensors, except for tensors of the size of a divided parameter: these are "
            "DTensors with the placement of the parameter",
        ) from exc


def _place_like_parameter(value: Any, parameter: torch.Tensor, *, stays: bool) -> Any:
    if not isinstance(value, torch.Tensor) or stays or hasattr(value, "device_mesh"):
        return value
    moved = value.to(parameter.device)
    if moved.shape != parameter.shape or moved.stride() == parameter.stride():
        return moved
    # Fused optimizers read both tensors in the order of memory (channels_last), so their layouts must agree.
    return torch.empty_like(parameter, dtype=moved.dtype, requires_grad=False).copy_(moved)


def _load_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    groups: Sequence[Mapping[str, Any]],
    configured: Configured | None,
) -> list[str]:
    """Assign to each group of the optimizer the former values of its parameters' group; return the differences."""
    former_groups = {name: group for group in groups for name in group["params"]}
    differences: dict[str, None] = {}
    for number, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            continue
        formers = [former_groups[names[parameter]] for parameter in group["params"]]
        for other in formers:
            for key in _list_changed_keys(formers[0], other):
                text = f"{key} of optimizer groups was not the same for parameters that are one group now"
                differences[text] = None
        former, former_initial = formers[0], formers[0].get(CONFIGURED)
        initial = configured[group["params"][0]] if configured is not None else {}
        for key, value in former.items():
            is_opaque = isinstance(value, dict) and _OPAQUE in value
            if key in _NOT_SETTINGS or is_opaque:
                continue
            # A setting that the program has changed since then keeps its new value.
            is_unchanged = former_initial is not None and is_same_value(former_initial.get(key), initial.get(key))
            if configured is None or is_unchanged:
                group[key] = _like_before(group.get(key), decode_value(value))
        if configured is not None:
            before = former_initial if former_initial is not None else former
            for key in _list_changed_keys(before, initial):
                was, now = _format_encoded_value(before.get(key)), _format_encoded_value(initial.get(key))
                differences[f"optimizer.param_groups[{number}].{key} changed from {was} to {now}"] = None
    return list(differences)


def _list_changed_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the settings in which two encoded groups differ."""
    keys = (one.keys() | other.keys()) - _NOT_SETTINGS
    return [key for key in keys if not is_same_value(one.get(key), other.get(key))]


def _format_encoded_value(value: Any) -> str:
    opaque = isinstance(value, dict) and _OPAQUE in value
    return f"a {value[_OPAQUE]}" if opaque else repr(decode_value(value))[:80]


def _like_before(held: Any, value: Any) -> Any:
    """Return a value for a group, on the same device as the present value if both are tensors."""
    if isinstance(value, torch.Tensor):
        return value.to(held.device) if isinstance(held, torch.Tensor) else value.clone()
    return value


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two encoded values are equal.

    Tensors are compared bit by bit. NaN equals itself, and a tuple equals its list.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(view_tensor_bytes(one), view_tensor_bytes(other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    one, other = (value.get("$tuple", value) if isinstance(value, dict) else value for value in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same_value(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same_value, one, other))
    return bool(one == other) or (one != one and other != other)


def register_late(model: nn.Module, tree: Mapping[str, Any], names: Iterable[str]) -> None:
    """Register buffers that a model has created during training, where their modules exist."""
    modules = dict(model.named_modules())
    for name in names:
        owner, _, last = name.rpartition(".")
        module = modules.get(owner)
        if module is not None and isinstance(tree.get(name), torch.Tensor) and not hasattr(module, last):
            device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
            module.register_buffer(last, tree[name].to(device, copy=True))


def load_model(
    model: nn.Module, tree: Mapping[str, Any], *, absent_keys: Collection[str] = (), left_out: Collection[str] = ()
) -> None:
    """Put a model's state back.

    Args:
        model: the whole model, or this worker's part of it.
        tree: state of the whole model.
        absent_keys: names that belong to other workers.
        left_out: names that the tree does not have, whose values stay.

    Raises:
        SnapshotError: names or shapes differ.
    """
    own = model.state_dict()
    mine = {name: _shard_value_like(own[name], value) if name in own else value for name, value in tree.items()}
    wanted = {name: value for name, value in mine.items() if name in own or name not in absent_keys}
    try:
        # What is left out is not loaded, not even from itself: that would count as a change of it.
        found = model.load_state_dict(wanted, strict=not left_out)
        lacking = [*(set(found.missing_keys) - set(left_out)), *found.unexpected_keys] if left_out else []
        if lacking:
            raise RuntimeError(f"it lacks, or has in addition: {', '.join(sorted(lacking))}")
    except RuntimeError as exc:
        raise SnapshotError(
            f"the snapshot is of another model: {' '.join(str(exc).split())[:400]}",
            hint="resume with the model that the run began with, or start over with `train.snapshot.dir`",
        ) from exc


def _shard_value_like(tensor: torch.Tensor, value: Any) -> Any:
    """Return the part of a value of the size of `tensor` that the worker with this shard of `tensor` needs."""
    if not isinstance(value, torch.Tensor) or not hasattr(tensor, "device_mesh"):
        return value
    # Imported here, so that readers of snapshots outside of training need not wait for it.
    from dtctl.runtime.snapshot.format.pieces import shard_tensor_like

    return shard_tensor_like(tensor, value)


def iter_named_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a tree with its path, `blocks.0.weight.exp_avg`, in the order of the tree."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from iter_named_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from iter_named_tensors(value, f"{path}.{index}" if path else str(index))


def view_tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat uint8 tensor on the CPU; a view where that is possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def checksum_tree(tree: Any) -> int:
    """Return a checksum of an encoded tree, which is the same on workers with the same tree."""
    crc = zlib.crc32(json.dumps(_without_tensors(tree), sort_keys=True).encode())
    for name, tensor in iter_named_tensors(tree):
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


def compute_state_digest(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> str:
    """Return the BLAKE3 digest of names, dtypes, shapes and bytes of all tensors of model and optimizer.

    Args:
        model: state of the whole model.
        optimizer: `optimizer_tree` of the whole optimizer.

    Raises:
        SnapshotError: the package blake3 is not installed.
    """
    state = layout.build_hasher("blake3")
    entries = dict(iter_named_tensors(model, "model")) | dict(iter_named_tensors(optimizer["state"], "optimizer"))
    for name in sorted(entries):
        tensor = entries[name]
        state.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        state.update(view_tensor_bytes(tensor).numpy().data)
    return state.hexdigest()
