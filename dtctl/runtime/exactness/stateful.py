"""Objects of a program that have a state of their own, which snapshots keep next to model and optimizer.

They are recognized by torch's convention: objects with `state_dict` and `load_state_dict`, and generators of random
numbers. They are found as attributes, in containers and closures, and as global variables that the program's own
functions name. State in other places is not found. The steps that a resume repeats show whether that matters
(record.py), and `extra_state` takes such state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dtctl.runtime.members import walk_members
from dtctl.runtime.own_code import name_class
from dtctl.runtime.snapshot.format.encoding import (
    NotEncodable,
    decode,
    encode,
    generator_state,
    is_generator,
    set_generator_state,
    with_devices,
)

_STATE: Final = "\0state"
"""Marker before the class and the state of an object that has `state_dict`."""
REACHED: Final = 50_000
"""Objects of a program that are looked at."""


def is_stateful(value: object) -> bool:
    """Return whether it has a state that can be taken and put back, as modules, optimizers and schedulers have."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def take_state(value: Any) -> Any:
    """Return what is kept of a generator, or of an object with a `state_dict`; tensors are not copied."""
    return decode(generator_state(value)) if is_generator(value) else (_STATE, name_class(value), value.state_dict())


def put_state(held: Any, state: Any) -> bool:
    """Give an object the state that `take_state` returned; return whether it is of the same kind."""
    is_tagged = isinstance(state, tuple) and len(state) == 3 and state[0] == _STATE
    if is_generator(held) and isinstance(state, Mapping):
        set_generator_state(held, state)
        return True
    if not is_stateful(held) or not is_tagged or name_class(held) != state[1]:
        return False
    if isinstance(held, torch.optim.Optimizer):
        _put_optimizer(held, state[2])
    else:
        held.load_state_dict(state[2])
    return True


def _put_optimizer(held: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state in place, where torch makes new groups: another optimizer may share them (SAM, Lookahead)."""
    parameters = [parameter for group in held.param_groups for parameter in group["params"]]
    for group, values in zip(held.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    places = dict(zip(numbers, parameters, strict=True))
    held.state.clear()
    for number, values in state["state"].items():
        held.state[places.get(number, number)] = values


class StatefulObjects:
    """Stateful objects that are reachable from some roots, with their states when this was made."""

    def __init__(self, roots: Mapping[str, Any], *, model: nn.Module, apart: Iterable[object] = ()) -> None:
        """Find the objects with state.

        Args:
            roots: name -> object, such as `{"model": model, "loss": loss}`; a root's own state is left out.
            model: its state is in snapshots anyway.
            apart: objects whose state is saved elsewhere.
        """
        self._roots, self._model = dict(roots), model
        self._apart = [*apart, *model.parameters(), *model.buffers()]
        self._held: list[object] = []
        """Objects that were found: as long as they live, nothing else has its address."""
        self._marks = {path: _mark(value, self._held) for path, value in self._find()}

    def _find(self) -> Iterator[tuple[str, Any]]:
        """Yield each object once, with its path, except those whose tensors the model or another object has already."""
        known = {id(value) for value in self._roots.values()} | {id(module) for module in self._model.modules()}
        covered = {
            tensor.data_ptr() for tensor in map(_local, self._model.state_dict().values()) if _has_address(tensor)
        }
        for name, root in self._roots.items():
            for path, value in walk_members(root, name, named=True, skipped=self._apart, limit=REACHED):
                if id(value) in known or not (is_generator(value) or is_stateful(value)):
                    continue
                known.add(id(value))
                if isinstance(value, nn.Module):
                    known |= {id(module) for module in value.modules()}
                if is_stateful(value) and not isinstance(value, torch.optim.Optimizer):
                    tensors = {tensor.data_ptr() for tensor in _list_tensors(value)}
                    if tensors and tensors <= covered:
                        continue
                    covered |= tensors
                yield path, value

    def changed(self) -> tuple[dict[str, Any], list[str]]:
        """Return what is another than at first.

        Returns:
            By path its state, encoded, with tensors that are not copied; and the paths of what cannot be kept.
        """
        changed: dict[str, Any] = {}
        lost = []
        for path, value in self._find():
            if _mark(value) == self._marks.get(path):
                continue
            try:
                state = with_devices(encode(take_state(value), path))
                if any(hasattr(leaf, "device_mesh") for leaf in tree_leaves(state)):
                    lost.append(f"{path} (which is spread over workers)")
                else:
                    changed[path] = state
            except Exception:  # noqa: BLE001  # NotEncodable, or whatever the user's `state_dict` raises
                lost.append(path)
        return changed, lost

    def hold(self) -> dict[str, Any]:
        """Return a copy of all states, for `load`, before something runs that is not to leave a trace."""
        held = {}
        for path, value in self._find():
            try:
                state = with_devices(encode(take_state(value), path))
            except NotEncodable:
                continue
            held[path] = copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.detach, state))
        return held

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Put back what `changed` or `hold` returned.

        Returns:
            What could not be put back, a phrase each.
        """
        left = dict(state)
        failed = [path for path, value in self._find() if path in left and not put_state(value, decode(left.pop(path)))]
        phrases = [f"{name_some(left)} changed in training, and there is no place for it now"] if left else []
        return phrases + ([f"{name_some(failed)} changed in training, and cannot be set"] if failed else [])


def name_some(paths: Iterable[str], count: int = 4) -> str:
    """Return the first of some paths, and how many more there are."""
    every = list(paths)
    return ", ".join(every[:count]) + (f" and {len(every) - count} more" if len(every) > count else "")


def _list_tensors(value: Any) -> list[torch.Tensor]:
    try:
        return [leaf for leaf in map(_local, tree_leaves(value.state_dict())) if _has_address(leaf)]
    except Exception:  # noqa: BLE001  # the user's code, at a time when the program does not call it
        return []


def _local(value: Any) -> Any:
    """Return this worker's part of a tensor that is spread over several."""
    return value.to_local() if hasattr(value, "device_mesh") else value


def _has_address(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0


def _mark(value: Any, held: list[object] | None = None) -> Any:
    """Return a mark that stays equal as long as a state is unchanged; tensors are neither copied nor read.

    Args:
        value: a generator, or an object with a `state_dict`.
        held: list that gets the tensors; the mark consists of their addresses.
    """
    if is_generator(value):
        state = take_state(value)
        return state["torch"].numpy().tobytes() if "torch" in state else repr(state)
    try:
        leaves = tree_leaves(value.state_dict())
    except Exception as exc:  # noqa: BLE001  # the user's code, at a time when the program does not call it
        return type(exc).__qualname__
    if held is not None:
        held += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [_mark_leaf(leaf) for leaf in leaves]


def _mark_leaf(leaf: Any) -> Any:
    leaf = _local(leaf)
    if isinstance(leaf, torch.Tensor):
        return (leaf.data_ptr() if _has_address(leaf) else id(leaf), leaf._version, leaf.shape)
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf)
