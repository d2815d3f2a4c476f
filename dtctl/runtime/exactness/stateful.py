"""Objects of a program with state of their own, which snapshots keep in addition to model and optimizer.

They are recognized by torch's convention: objects with `state_dict` and `load_state_dict`, and random generators. The
search covers attributes, containers, closures, and global variables that the program's own functions name. State in
other places is not found. The steps that a resume repeats show whether that matters (record.py), and `extra_state`
takes such state.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dtctl.errors import PlanError
from dtctl.runtime.members import walk_members
from dtctl.runtime.own_code import name_class
from dtctl.runtime.snapshot.format.encoding import (
    NotEncodable,
    add_device_facts,
    decode_value,
    encode_generator_state,
    encode_value,
    is_generator,
    set_generator_state,
)

_STATE: Final = "\0state"
"""Marker before the class and the state of an object that has `state_dict`."""
REACHED: Final = 50_000
"""Largest number of objects that the search visits."""


def is_stateful(value: object) -> bool:
    """Return whether an object's state can be read and restored, as with modules, optimizers and schedulers."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def require_stateful(extra: Mapping[str, Any], *, where: str = "Trainer") -> None:
    """Refuse objects of `extra_state` that snapshots cannot keep.

    Args:
        extra: the objects, by name.
        where: name of the function that the objects were passed to.

    Raises:
        PlanError: an object has no state that can be read and restored.
    """
    for name, value in extra.items():
        if not is_generator(value) and not is_stateful(value):
            raise PlanError(
                f"extra_state.{name} is a {type(value).__qualname__}, which has no state_dict() and load_state_dict()",
                where=where,
                hint="give an object that has both, or a random generator of torch, NumPy or Python",
            )


def take_state(value: Any) -> Any:
    """Return the state of a generator, or of an object with a `state_dict`; tensors are not copied."""
    return (
        decode_value(encode_generator_state(value))
        if is_generator(value)
        else (_STATE, name_class(value), value.state_dict())
    )


def encode_state(value: Any, path: str) -> Any:
    """Return the encoded state of a generator, or of an object with a `state_dict`, which errors name by its path."""
    return add_device_facts(encode_value(take_state(value), path))


def put_encoded_state(held: Any, state: Any) -> bool:
    """Restore a state that `encode_state` returned; return False if the object is of another kind."""
    return put_state(held, decode_value(state))


def is_divided(state: Any) -> bool:
    """Return whether an encoded state has tensors that are divided over several workers."""
    return any(hasattr(leaf, "device_mesh") for leaf in tree_leaves(state))


def put_state(held: Any, state: Any) -> bool:
    """Restore a state that `take_state` returned; return False if the object is of another kind."""
    if is_generator(held) and isinstance(state, Mapping):
        set_generator_state(held, state)
        return True
    if not is_stateful(held) or not isinstance(state, tuple) or state[:2] != (_STATE, name_class(held)):
        return False
    if isinstance(held, torch.optim.Optimizer):
        _put_optimizer(held, state[2])
    else:
        held.load_state_dict(state[2])
    return True


def _put_optimizer(held: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state in place; torch would make new groups, but another optimizer may share them (SAM, Lookahead)."""
    parameters = [parameter for group in held.param_groups for parameter in group["params"]]
    for group, values in zip(held.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    places = dict(zip(numbers, parameters, strict=True))
    held.state.clear()
    for number, values in state["state"].items():
        held.state[places.get(number, number)] = values


class StatefulObjects:
    """Objects with state that are reachable from some roots, and their states when this object was made."""

    def __init__(self, roots: Mapping[str, Any], *, apart: Iterable[object] = ()) -> None:
        """Find the objects with state.

        Args:
            roots: name -> object, such as `{"model": model, "loss": loss}`; a root's own state is left out, and all
                state of the `model`, which snapshots have anyway.
            apart: objects whose state is saved elsewhere.
        """
        self._roots, self._model = dict(roots), roots["model"]
        self._apart = [*apart, *self._model.parameters(), *self._model.buffers()]
        self._held: list[object] = []
        """Objects that were found, kept alive so that no other object gets the same address."""
        self._marks = {path: _compute_state_mark(value, self._held) for path, value in self._find_stateful_objects()}

    def _find_stateful_objects(self) -> Iterator[tuple[str, Any]]:
        """Yield each object once, with its path; skip those whose tensors the model or another object already has."""
        known = {id(value) for value in self._roots.values()} | {id(module) for module in self._model.modules()}
        covered = _find_addresses(self._model.state_dict().values())
        for name, root in self._roots.items():
            for path, value in walk_members(root, name, named=True, skipped=self._apart, limit=REACHED):
                if id(value) in known or not (is_generator(value) or is_stateful(value)):
                    continue
                known.add(id(value))
                if isinstance(value, nn.Module):
                    known |= {id(module) for module in value.modules()}
                if is_stateful(value) and not isinstance(value, torch.optim.Optimizer):
                    tensors = _find_addresses(_list_state_leaves(value))
                    if tensors and tensors <= covered:
                        continue
                    covered |= tensors
                yield path, value

    def changed(self) -> tuple[dict[str, Any], list[str]]:
        """Return the objects that have changed.

        Returns:
            Encoded state by path, with tensors that are not copied; and the paths of objects that cannot be kept.
        """
        changed: dict[str, Any] = {}
        lost = []
        for path, value in self._find_stateful_objects():
            if _compute_state_mark(value) == self._marks.get(path):
                continue
            try:
                state = encode_state(value, path)
                if is_divided(state):
                    lost.append(f"{path} (which is spread over workers)")
                else:
                    changed[path] = state
            except Exception:  # noqa: BLE001  # NotEncodable, or any error of the user's `state_dict`
                lost.append(path)
        return changed, lost

    def copy_states(self) -> dict[str, Any]:
        """Return a copy of all states for `load`, before code runs that must not leave a trace."""
        held = {}
        for path, value in self._find_stateful_objects():
            with contextlib.suppress(NotEncodable):
                state = encode_state(value, path)
                held[path] = copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.detach, state))
        return held

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Restore what `changed` or `copy_states` returned.

        Returns:
            Objects that could not be restored, a phrase each.
        """
        left = dict(state)
        failed = [
            path
            for path, value in self._find_stateful_objects()
            if path in left and not put_encoded_state(value, left.pop(path))
        ]
        phrases = [f"{name_some(left)} changed in training, and there is no place for it now"] if left else []
        return phrases + ([f"{name_some(failed)} changed in training, and cannot be set"] if failed else [])


def name_some(paths: Iterable[str], count: int = 4) -> str:
    """Return the first of some paths, and the number of the others."""
    every = list(paths)
    return ", ".join(every[:count]) + (f" and {len(every) - count} more" if len(every) > count else "")


def _list_state_leaves(value: Any) -> list[Any]:
    """Return the tensors and other values in an object's state; if it cannot be read, the name of the error's class."""
    try:
        return tree_leaves(value.state_dict())
    except Exception as exc:  # noqa: BLE001  # the user's code, at a time when the program does not call it
        return [type(exc).__qualname__]


def _find_addresses(values: Iterable[Any]) -> set[int]:
    return {value.data_ptr() for value in map(_unwrap_local_value, values) if _has_address(value)}


def _unwrap_local_value(value: Any) -> Any:
    """Return this worker's part of a tensor that is divided over several workers."""
    return value.to_local() if hasattr(value, "device_mesh") else value


def _has_address(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0


def _compute_state_mark(value: Any, held: list[object] | None = None) -> Any:
    """Return a mark that stays equal as long as a state is unchanged; tensors are neither copied nor read.

    Args:
        value: a generator, or an object with a `state_dict`.
        held: list that receives the tensors; the mark consists of their addresses.
    """
    if is_generator(value):
        state = take_state(value)
        return state["torch"].numpy().tobytes() if "torch" in state else repr(state)
    leaves = _list_state_leaves(value)
    if held is not None:
        held += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [_mark_leaf(leaf) for leaf in leaves]


def _mark_leaf(leaf: Any) -> Any:
    leaf = _unwrap_local_value(leaf)
    if isinstance(leaf, torch.Tensor):
        return (leaf.data_ptr() if _has_address(leaf) else id(leaf), leaf._version, leaf.shape)
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf)
