"""What an object consists of, without asking it: attributes, slots, what lies in C, what lies elsewhere."""

from __future__ import annotations

import contextlib
import types
from typing import Any, Final

from dtctl.runtime.program.code import is_own_code

PYTHONS: Final = frozenset(("__dict__", "__weakref__", "__doc__", "__module__", "__wrapped__", "__annotations__"))
"""Attributes by which Python describes things."""


def _slots(kind: type) -> list[str]:
    """Names of a class's slots, by which they are found in its objects."""
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else found
    private = f"_{kind.__name__.lstrip('_')}"
    return [f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]


def members_of(value: Any) -> dict[str, Any]:
    """What lies in an object, in slots too; its `__getattr__` is not asked."""
    slots = sorted({name for kind in type(value).__mro__ for name in _slots(kind)} - PYTHONS)
    held = {name: object.__getattribute__(value, name) for name in slots if _has_slot(value, name)}
    with contextlib.suppress(AttributeError):
        held |= object.__getattribute__(value, "__dict__")
    return held


def _has_slot(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def is_of_class(value: Any) -> bool:
    """Whether a class has it for all of its objects, such as a function, and it is no state."""
    found = hasattr(type(value), "__get__") or isinstance(value, type | types.ModuleType | types.GenericAlias)
    return found and not is_own_code(type(value).__module__)


def has_more_inside(kind: type) -> bool:
    """Whether objects of a class have room for more than their attributes: state that only C code sees."""
    if issubclass(kind, BaseException):  # where it was raised
        return False
    slots = sum(name not in PYTHONS for base in kind.__mro__ for name in _slots(base))
    attributes_and_weak_references = 16
    return kind.__basicsize__ - object.__basicsize__ - 8 * slots > attributes_and_weak_references
