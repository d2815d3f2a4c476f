"""Whose code something is, what its modules and classes are called, and a digest of what code does."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
import zlib
from pathlib import Path
from typing import Any, Final

_INSTALLED: Final = tuple(
    {str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@functools.lru_cache(maxsize=4096)
def is_own_code(module: str) -> bool:
    """Whether a module, by its name, is the user's: neither installed, nor Python's, nor dtctl's."""
    if module.partition(".")[0] in ("dtctl", "builtins", "torch"):
        return False
    loaded = sys.modules.get(module)
    path = getattr(loaded, "__file__", None)
    if loaded is None or path is None:
        # Neither a file nor a loader: a module that the program has made itself.
        made = (
            isinstance(loaded, types.ModuleType)
            and not vars(loaded).get("__spec__")
            and not vars(loaded).get("__loader__")
        )
        return made or module == "__main__"
    return not str(Path(path).resolve()).startswith(_INSTALLED) and "site-packages" not in str(path)


def module_name(name: str | None) -> str:
    """A module's name: `train` for the script train.py, which is `__main__` to Python."""
    if name != "__main__":
        return name or "?"
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(path).stem if path else "__main__"


def class_name(value: object) -> str:
    """Module and name of an object's class; the script's own module by the name of its file."""
    kind = type(value)
    return f"{module_name(kind.__module__)}.{kind.__qualname__}"


def function_name(function: Any) -> str:
    """Its qualified name, or that of its class."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def builtin_name(function: Any) -> str:
    """Module and qualified name of a function."""
    return f"{getattr(function, '__module__', None) or ''}.{function_name(function)}"


@functools.lru_cache(maxsize=4096)  # every walk over a program asks for the same ones
def code_digest(code: types.CodeType) -> str:
    """Eight digits for what a piece of code does; comments, line numbers and paths do not count."""
    return f"{_code_crc(code, 0):08x}"


def _code_crc(code: types.CodeType, crc: int) -> int:
    crc = zlib.crc32(code.co_code, crc)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount, code.co_flags)
    crc = zlib.crc32(repr(names).encode(), crc)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            crc = _code_crc(constant, crc)
        else:
            text = sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)
            crc = zlib.crc32(str(text).encode(), crc)
    return crc


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The global names that a piece of code and those inside of it mention."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # globals()["name"], getattr(module, "name")
            names.add(constant)
    return frozenset(names)


def names_set_in(code: types.CodeType) -> frozenset[str]:
    """The attributes that a piece of code and those inside of it set, of whatever."""
    inner = [names_set_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(_attributes_set(code)).union(*inner)


@functools.lru_cache(maxsize=4096)
def _attributes_set(code: types.CodeType) -> tuple[str, ...]:
    return tuple(str(one.argval) for one in dis.get_instructions(code) if one.opname in ("STORE_ATTR", "DELETE_ATTR"))
