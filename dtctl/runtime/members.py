"""Objects that an object holds: in its attributes, in its containers, and in variables that its functions name."""

from __future__ import annotations

import argparse
import functools
import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch

from dtctl.runtime.own_code import is_own_code, list_names

REACHED: Final = 2000
"""Largest number of objects to visit from one root."""
ITEMS: Final = 64
"""Largest number of items in a container; a longer one holds data."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, torch.Tensor, np.ndarray, type(None))
_MODULE_TABLES: Final = frozenset(torch.nn.Module().__dict__) - {"_modules"}


def walk_members(
    root: object, name: str | None = None, *, named: bool = False, skipped: Iterable[object] = (), limit: int = REACHED
) -> Iterator[tuple[str, object]]:
    """Yield the objects that an object holds, each with its path, in the same order in every process.

    Args:
        root: object to start from, which is yielded first.
        name: name of the root. None: the name of its class.
        named: True to visit also global variables that functions of the program's own code name, and its own classes.
        skipped: objects that are not visited.
        limit: largest number of objects to visit.
    """
    visited = {id(value) for value in skipped}
    left: deque[tuple[str, object]] = deque([(name or type(root).__name__, root)])
    while left and limit > 0:
        path, value = left.popleft()
        if id(value) in visited or issubclass(type(value), _PLAIN) or (issubclass(type(value), type) and not named):
            continue
        visited.add(id(value))
        limit -= 1
        try:
            members = _list_members(value, named=named)
        except Exception:  # noqa: BLE001, S112  # its class may raise any error when it is looked at
            continue
        yield path, value
        left += [
            (f"{path}{part}" if part.startswith("[") else f"{path}.{part}", member)
            for part, member in members
            if not issubclass(type(member), _PLAIN)
        ]


def _list_members(value: object, *, named: bool) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in itertools.islice(value.items(), ITEMS)]
    if isinstance(value, list | tuple | set | deque):
        return _list_indexed_items(itertools.islice(value, ITEMS))
    if isinstance(value, types.FunctionType):
        return _list_function_members(value, named=named)
    if isinstance(value, types.MethodType):
        function = [("__func__", value.__func__)] if named else []
        return [("__self__", value.__self__), *function]
    if isinstance(value, functools.partial):
        return [("func", value.func), *_list_indexed_items(value.args), *_list_members(value.keywords, named=named)]
    if isinstance(value, type):
        return list(_list_class(value)) if is_own_code(value.__module__) else []
    if isinstance(value, types.ModuleType):
        return []
    kind = type(value)
    if not named:
        return list(_list_object_attributes(value))
    if is_own_code(kind.__module__):
        return [*_list_object_attributes(value), (f"<{kind.__name__}>", kind)]
    # Objects from installed packages are visited only if they hold objects of the user.
    if hasattr(kind, "state_dict") or isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return [(name, held) for name, held in _list_object_attributes(value) if not name.startswith("__")]
    return []


def _list_function_members(function: types.FunctionType, *, named: bool) -> list[tuple[str, object]]:
    """Return what a function holds: variables of outer functions, defaults, and globals if `named`."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = [(name, cell.cell_contents) for name, cell in cells if _is_cell_bound(cell)]
    held += [("default", default) for default in function.__defaults__ or ()]
    if named and is_own_code(function.__module__ or ""):
        held += _list_globals(function)
    return held


def _list_indexed_items(items: Iterable[object]) -> list[tuple[str, object]]:
    return [(f"[{index}]", item) for index, item in enumerate(items)]


def _list_object_attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object, including those in slots, without calls of its own `__getattr__`."""
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                yield name, object.__getattribute__(value, name)
            except AttributeError:  # not set, or a name that Python has mangled
                continue
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    if isinstance(value, torch.nn.Module):  # other tables of a model are empty or already covered
        held = {name: item for name, item in held.items() if name not in _MODULE_TABLES or (item and "hook" in name)}
    yield from list(held.items())


def _list_class(kind: type) -> Iterator[tuple[str, object]]:
    for base in kind.__mro__:
        if is_own_code(base.__module__):
            for name, held in vars(base).items():
                function = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
                if not name.startswith("__") or isinstance(function, types.FunctionType):
                    yield name, function


def _list_globals(function: types.FunctionType) -> list[tuple[str, object]]:
    """Return global variables that a function names, and those in the program's other modules that it names."""
    found: list[tuple[str, object]] = []
    names = list_names(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        held: Any = function.__globals__[name]
        if not isinstance(held, types.ModuleType):
            found.append((name, held))
        elif is_own_code(held.__name__):
            found += [(f"{name}.{inner}", vars(held)[inner]) for inner in sorted(names & vars(held).keys())]
    return found


def _is_cell_bound(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises
    except ValueError:
        return False
    return True
