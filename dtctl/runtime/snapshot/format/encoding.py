"""Encoding of Python values as JSON and tensors, and back: tuples, sets, NumPy arrays, generators ...

State of a program (`state_dict()` of an optimizer or a scheduler, attributes of modules) has numbers as keys and tuples
as values. Nothing is pickled; a value of any other kind is refused with its name.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from dtctl.errors import SnapshotError

_MARK: Final = "$"
_ADDRESSES: Final = 1 << 32
"""Whole numbers from here on are rarely counters, and mostly `id(...)`."""
_SCALARS: Final = (bool, int, float, str, type(None))


class NotEncodable(SnapshotError):
    """A value that snapshots cannot keep."""


def encode_value(value: Any, path: str = "state") -> Any:
    """Return the value as JSON and tensors; tensors are not copied.

    Args:
        value: numbers, text, bytes, tensors, arrays, dtypes, random generators, and dicts, lists, tuples, sets and
            deques of them.
        path: name of the value in an error.

    Raises:
        NotEncodable: the value contains something else.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise NotEncodable(f"{path} is a tensor of layout {value.layout}, which snapshots do not keep")
        return value
    if type(value) in _SCALARS:
        return value
    if type(value) in (dict, OrderedDict) or (isinstance(value, Mapping) and not isinstance(value, dict)):
        if any(type(key) is int and key >= _ADDRESSES for key in value):
            raise NotEncodable(f"{path} has keys that look like addresses, which differ between processes")
        items = [
            [encode_value(key, f"{path} (a key)"), encode_value(item, f"{path}.{key}")] for key, item in value.items()
        ]
        if type(value) in (dict, OrderedDict) and all(type(key) is str and not key.startswith(_MARK) for key in value):
            return dict(items)
        return {"$items": items}
    if type(value) is list:
        return [encode_value(item, f"{path}.{index}") for index, item in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"$tuple": [encode_value(item, f"{path}.{index}") for index, item in enumerate(value)]}
    found = _encoded_rarely(value, path)
    if found is not None:
        return found
    raise NotEncodable(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which snapshots do not keep",
        hint="keep tensors, numbers, text, lists and dicts; nothing is pickled",
    )


def _encoded_rarely(value: Any, path: str) -> Any:
    """Encode as `encode_value` does, for rare types; return None for any other type."""
    if type(value) in (set, frozenset):
        return {"$set": sorted((encode_value(item, path) for item in value), key=repr)}
    if type(value) is deque:
        return {"$deque": [encode_value(item, path) for item in value], "maxlen": value.maxlen}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, range):
        return {"$range": [value.start, value.stop, value.step]}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"$scalar": [value.dtype.name, value.item()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        order = {"order": "F"} if value.flags.f_contiguous and not value.flags.c_contiguous else {}
        return {"$array": torch.from_numpy(np.ascontiguousarray(value)), "shape": list(value.shape), **order}
    if is_generator(value):
        return {"$generator": encode_generator_state(value)}
    return None


def add_device_facts(tree: Any) -> Any:
    """Return an encoded tree with more facts about its tensors: on an accelerator, with a gradient, transposed."""
    if isinstance(tree, torch.Tensor):
        facts: dict[str, Any] = {"requires_grad": True} if tree.requires_grad and tree.is_leaf else {}
        if not tree.is_contiguous() and _is_permuted(tree):
            facts["strides"] = list(tree.stride())
        if tree.device.type == "cpu" and not facts:
            return tree
        return {"$on": tree.device.type, "tensor": tree.detach(), **facts}
    if isinstance(tree, dict):
        return {key: add_device_facts(value) for key, value in tree.items()}
    return [add_device_facts(value) for value in tree] if isinstance(tree, list) else tree


def _is_permuted(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers are contiguous, in an unusual order of dimensions."""
    order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride()[dim])
    return tensor.permute(order).is_contiguous()


def decode_value(tree: Any) -> Any:
    """Return the value that `encode_value` was given; a generator becomes an argument for `set_generator_state`."""
    if isinstance(tree, list):
        return [decode_value(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next((key for key in tree if key.startswith(_MARK)), None)
    if mark is None:
        return {key: decode_value(item) for key, item in tree.items()}
    held = tree[mark]
    simple: dict[str, Any] = {
        "$items": lambda: {decode_value(key): decode_value(item) for key, item in held},
        "$tuple": lambda: tuple(decode_value(item) for item in held),
        "$set": lambda: {decode_value(item) for item in held},
        "$deque": lambda: deque((decode_value(item) for item in held), tree["maxlen"]),
        "$range": lambda: range(*held),
        "$bytes": lambda: bytes.fromhex(held),
        "$complex": lambda: complex(*held),
        "$dtype": lambda: getattr(torch, held),
        "$device": lambda: torch.device(held),
        "$scalar": lambda: np.dtype(held[0]).type(held[1]),
        "$array": lambda: held.numpy().reshape(tree["shape"]).copy(order=tree.get("order", "C")),
        "$generator": lambda: decode_value(held),
        "$on": lambda: _tensor_on(held, **{key: value for key, value in tree.items() if key != mark}),
        "$tensor_bytes": lambda: _tensor_of(*held),
    }
    if mark not in simple:
        raise SnapshotError(f"the snapshot has a value of an unknown kind, {mark}")
    return simple[mark]()


def _tensor_on(
    device: str, tensor: torch.Tensor, requires_grad: bool = False, strides: list[int] | None = None
) -> torch.Tensor:
    found = tensor.to(device)
    if strides is not None:
        found = torch.empty_strided(found.shape, strides, dtype=found.dtype, device=found.device).copy_(found)
    return found.requires_grad_(requires_grad)


def _tensor_of(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    held = torch.frombuffer(bytearray.fromhex(text), dtype=getattr(torch, dtype)) if text else torch.empty(0)
    return held.reshape(shape).clone() if text else torch.empty(shape, dtype=getattr(torch, dtype))


Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def is_generator(value: object) -> bool:
    """Return whether a value is a random generator whose state can be kept."""
    return isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState)


def encode_generator_state(generator: Generator) -> Any:
    """Return the encoded state of a generator, without drawing from it."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state()}
    if isinstance(generator, random.Random):
        return {"python": encode_value(generator.getstate())}
    if isinstance(generator, np.random.RandomState):
        return {"numpy": encode_value(generator.get_state(legacy=False))}
    return {"numpy": encode_value(generator.bit_generator.state)}


def set_generator_state(generator: Generator, state: Mapping[str, Any]) -> None:
    """Restore a decoded state of a generator.

    Raises:
        SnapshotError: the state belongs to another kind of generator.
    """
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state["torch"].clone())
        elif isinstance(generator, random.Random):
            generator.setstate(state["python"])
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state["numpy"])
        else:
            generator.bit_generator.state = state["numpy"]
    except (KeyError, ValueError, TypeError, RuntimeError) as exc:
        raise SnapshotError(f"the snapshot has the state of another kind of generator: {exc}") from exc


def seed_generator(generator: Generator, seed: int) -> None:
    """Seed a generator of any kind in place; `seed` is below 2**63."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
