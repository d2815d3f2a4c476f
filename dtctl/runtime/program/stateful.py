"""What is kept of an object that changes, and how it is put back: by its `state_dict`, in place, number by number."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dtctl.runtime.program.code import class_name
from dtctl.runtime.program.kinds import has_storage
from dtctl.runtime.snapshot.format.encoding import (
    decode,
    generator_state,
    is_generator,
    set_generator_state,
)

_STATE: Final = "\0state"
"""Before the class and the state of an object that has `state_dict`."""


def is_stateful(value: object) -> bool:
    """Whether it has a state that can be taken and put back, as modules, optimizers and schedulers have."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def inner_state(value: object) -> dict[str, Any]:
    """What an object with a state works on and has not in it: the optimizer of a scheduler."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return {}
    held = getattr(value, "__dict__", {})
    return {name: inner for name, inner in held.items() if isinstance(inner, nn.Module | torch.optim.Optimizer)}


def state_of(value: Any) -> Any:
    """Its `state_dict()`; None if it cannot be had now."""
    try:
        return value.state_dict()
    except Exception:  # noqa: BLE001  # the user's code, at a time when nobody calls it
        return None


def content(value: Any) -> Any:
    """What is kept of a value: of what has a state, its state; of a container of a kind of its own, what is in it."""
    if is_generator(value):
        return decode(generator_state(value))
    if is_stateful(value) and not isinstance(value, dict):
        return (_STATE, class_name(value), value.state_dict())
    for kind in (dict, list, set):
        if isinstance(value, kind):
            return value if isinstance(value, OrderedDict) else kind(value)
    return deque(value, value.maxlen) if isinstance(value, deque) else value


def put_into(held: Any, value: Any) -> bool:
    """Give an object the state that `content` had of it; whether that is possible in place."""
    if is_tagged(value):
        if not is_stateful(held) or class_name(held) != value[1]:
            return False
        if isinstance(held, torch.optim.Optimizer):
            _put_optimizer(held, value[2])
        else:
            held.load_state_dict(value[2])
        return True
    if isinstance(held, torch.Tensor | np.ndarray):
        return _put_numbers(held, value)
    if is_generator(held):
        set_generator_state(held, value)
    elif isinstance(held, list | deque) and isinstance(value, list | deque):
        held.clear()
        held.extend(value)
    elif (isinstance(held, dict) and isinstance(value, dict)) or (isinstance(held, set) and isinstance(value, set)):
        held.clear()
        held.update(value)
    else:
        return False
    return True


def _put_numbers(held: Any, value: Any) -> bool:
    kind = torch.Tensor if isinstance(held, torch.Tensor) else np.ndarray
    if not isinstance(value, kind) or held.shape != value.shape or held.dtype != value.dtype:
        return False
    if _strides(held) != _strides(value):  # which is the order in which numbers are added up
        return False
    try:
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                held.copy_(value)
        else:
            held[...] = value
    except (RuntimeError, ValueError):  # numbers that are one in memory, or cannot be written
        return False
    return True


def _strides(value: Any) -> Any:
    return value.stride() if has_storage(value) else getattr(value, "strides", None)


def _put_optimizer(held: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """In place, where torch makes new groups: another optimizer may share them (SAM, Lookahead)."""
    parameters = [parameter for group in held.param_groups for parameter in group["params"]]
    for group, values in zip(held.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    places = dict(zip(numbers, parameters, strict=True))
    held.state.clear()
    for number, values in state["state"].items():
        held.state[places.get(number, number)] = values


def is_tagged(value: Any) -> bool:
    """Whether it is what `content` makes of an object with a state."""
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str) and value[0] == _STATE
