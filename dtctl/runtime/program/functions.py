"""Functions: their code, closures, defaults, and the global variables and environment variables that they name."""

from __future__ import annotations

import builtins
import functools
import os
import sys
import types
import zlib
from collections.abc import Set as AbstractSet
from typing import Any, Final

from dtctl.runtime.program import outside
from dtctl.runtime.program.code import (
    builtin_name,
    code_digest,
    function_name,
    is_own_code,
    module_name,
    names_in,
    names_set_in,
)
from dtctl.runtime.program.idle_names import idle_names
from dtctl.runtime.program.walk import Walk, refuse

MISSING: Final = object()

_BUILTINS: Final = frozenset(vars(builtins))


class FunctionWalk(Walk):
    """Below functions."""

    def _function(self, function: Any, path: str, depth: int) -> None:
        if isinstance(function, functools.partial):
            self.visit(function.func, path, refuse, depth + 1)
            for index, item in enumerate(function.args):
                self.visit(item, f"{path}({index})", refuse, depth + 1)
            for name, item in function.keywords.items():
                put = functools.partial(function.keywords.__setitem__, name)
                self.visit(item, f"{path}({name})", put, depth + 1)
            return
        if isinstance(function, types.MethodType):
            self.visit(function.__self__, path, refuse, depth + 1)
            function = function.__func__
            path = f"{path}.{function_name(function).rpartition('.')[2]}"  # the object itself has the path
        if not isinstance(function, types.FunctionType):
            return
        made_by_hand = function.__code__.co_filename.startswith("<")
        if not made_by_hand and not is_own_code(function.__module__ or ""):
            self._leaf(f"{path} (function)", builtin_name(function), refuse)
            self._note(f"{path} (function)", lambda: builtin_name(function))
            self._public(function, path, depth)
            return
        digest = code_digest(function.__code__)
        self._note(f"{path} (code)", lambda: digest)
        self._leaf(f"{path} (code)", digest, refuse)
        self._public(function, path, depth)
        # What has no say in what a function computes is state that is kept, and no circumstance.
        idle = idle_names(function) if self._describe is not None else frozenset()
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            with self._describing(self._describe is not None and name not in idle):
                if issubclass(type(held), types.ModuleType):
                    self._of_module(held, function.__code__, depth)
                put = functools.partial(setattr, cell, "cell_contents")
                self.visit(held, f"{path}.{name}", put, depth + 1)
        for index, default in enumerate(function.__defaults__ or ()):
            self.visit(default, f"{path}.default{index}", refuse, depth + 1)
        for name, default in (function.__kwdefaults__ or {}).items():
            self.visit(default, f"{path}.{name}", refuse, depth + 1)
        self._globals(function, path, idle, depth)

    def _of_module(self, module: types.ModuleType, code: types.CodeType, depth: int) -> None:
        """What a piece of code names of a module; of an installed one, what the user has put there."""
        own, written = is_own_code(module.__name__), names_set_in(code)
        for name in sorted(names_in(code) & vars(module).keys()):
            value = vars(module)[name]
            changed = isinstance(value, types.FunctionType) and (is_own_code(value.__module__) or bool(vars(value)))
            if own or changed or name in written:
                self.owners.setdefault(module.__name__, functools.partial(setattr, module))
                self.visit(value, f"{module.__name__}.{name}", functools.partial(setattr, module, name), depth + 1)

    def _builtin(self, name: str, depth: int) -> None:
        self.owners.setdefault("builtins", functools.partial(setattr, builtins))
        self.visit(vars(builtins)[name], f"builtins.{name}", functools.partial(setattr, builtins, name), depth + 1)

    def _globals(self, function: types.FunctionType, path: str, idle: AbstractSet[str], depth: int) -> None:
        """The global variables that a function names, and those of the user's modules that it names."""
        if function.__globals__.get("__name__") != function.__module__ and not is_own_code(
            function.__globals__.get("__name__", "__main__")
        ):
            return  # a wrapper of somebody else's, by the name of what it wraps
        module, names = function.__globals__, names_in(function.__code__)
        for name in outside.variables(names):
            if "os" not in idle:
                digest = zlib.crc32(os.environ.get(name, "").encode())  # it may be a secret
                self._note(f"environment variable {name}", lambda: f"{digest:08x}")  # noqa: B023 # called at once
            # In each walk, whatever is idle: what only a later one saw would count as changed, and be put back.
            self._leaf(f"environment variable {name}", os.environ.get(name), functools.partial(_set_variable, name))
        if self._describe is not None:
            source = outside.unrepeatable(function, files=not path.startswith("data"))
            self.blind += [f"{path} goes by {source}"] if source and not self._trusting else []
        label = module_name(function.__module__)
        self.owners.setdefault(label, module.__setitem__)
        for name in sorted(names):
            held = module.get(name, MISSING)
            if held is MISSING:
                held = sys.modules.get(name, MISSING)  # imported where it is used
            if held is MISSING and name in vars(builtins).keys() - _BUILTINS:
                self._builtin(name, depth)
            if held is MISSING or name.startswith("__"):
                continue
            with self._describing(self._describe is not None and name not in idle):
                if issubclass(type(held), types.ModuleType):
                    self._of_module(held, function.__code__, depth)
                else:
                    self.visit(held, f"{label}.{name}", functools.partial(module.__setitem__, name), depth + 1)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
