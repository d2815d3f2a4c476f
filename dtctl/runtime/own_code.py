"""Ownership of code, and digests of its behaviour."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import types
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_INSTALLED: Final = tuple(
    {str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@functools.lru_cache(maxsize=4096)
def is_own_code(module: str) -> bool:
    """Return whether a module belongs to the user: neither installed nor part of Python or dtctl."""
    if module.partition(".")[0] in ("dtctl", "builtins", "torch"):
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return module == "__main__"
    # The text of the path is checked first, since a process has thousands of modules, all checked before the first
    # step.
    if path.startswith(_INSTALLED) or "site-packages" in path:
        return False
    return not _resolve_real_folder(path.rpartition("/")[0]).startswith(_INSTALLED)


@functools.lru_cache(maxsize=4096)
def _resolve_real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def name_module(name: str) -> str:
    """Return a module's name: `train` for the script train.py, which Python calls `__main__`."""
    path = getattr(sys.modules.get("__main__"), "__file__", None) if name == "__main__" else None
    return Path(path).stem if path else name


def name_class(value: object) -> str:
    """Return module and name of an object's class; for the main script, the module is the name of its file."""
    return f"{name_module(type(value).__module__)}.{type(value).__qualname__}"


@functools.lru_cache(maxsize=4096)
def list_names(code: types.CodeType) -> frozenset[str]:
    """Return the global names and attributes in a code object and in those inside of it."""
    inner = [list_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def digest_modules(before: Iterable[str] = ()) -> dict[str, str]:
    """Return a digest of every loaded module of the user, without comments and line numbers.

    Args:
        before: names of modules that an earlier run had loaded; they are included even if this one has not loaded them.
    """
    digests = {}
    for name in dict.fromkeys([*(name for name in list(sys.modules) if is_own_code(name)), *before]):
        code = _read_code(name)
        if code is not None:
            digests[name_module(name)] = f"{_compute_code_checksum(code, 0):08x}"
    return digests


def _read_code(name: str) -> types.CodeType | None:
    path = getattr(sys.modules.get(name), "__file__", None)
    try:
        if name == "__main__":
            return compile(Path(path).read_bytes(), "main", "exec", dont_inherit=True) if path else None
        spec = getattr(sys.modules.get(name), "__spec__", None) or importlib.util.find_spec(name)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        return spec.loader.get_code(name)
    except (ImportError, OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _compute_code_checksum(code: types.CodeType, crc: int) -> int:
    crc = zlib.crc32(code.co_code, crc)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount, code.co_flags)
    crc = zlib.crc32(repr(names).encode(), crc)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            crc = _compute_code_checksum(constant, crc)
        else:
            text = sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)
            crc = zlib.crc32(str(text).encode(), crc)
    return crc
