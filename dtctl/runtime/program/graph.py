"""One pass over the graph of objects that a program can reach: model, loss function, learning rate, optimizer, data.

What is reached: attributes, elements of containers, closures, defaults, hooks, and global variables that the user's own
functions name. What is there and of a kind that cannot be put back is compared by its pickled bytes, which are never
read; what cannot even be compared is told, unless it is of a kind that has no say in a training (a logger, a lock).
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import io
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterator
from numbers import Number
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dtctl.runtime.program.bystanders import NO_SAY, shared_with
from dtctl.runtime.program.code import builtin_name, is_own_code, names_in
from dtctl.runtime.program.functions import FunctionWalk
from dtctl.runtime.program.kinds import CONTAINERS, FUNCTIONS
from dtctl.runtime.program.members import has_more_inside, members_of
from dtctl.runtime.program.modules import ModuleWalk
from dtctl.runtime.program.stateful import inner_state, is_stateful
from dtctl.runtime.program.walk import refuse
from dtctl.runtime.snapshot.format.encoding import is_generator

_DRAWS: Final = frozenset(
    ("rand", "randn", "randint", "random", "normal", "uniform", "bernoulli", "choice", "shuffle", "randperm", "sample")
)
"""Names of functions that draw random numbers."""


class ObjectWalk(FunctionWalk, ModuleWalk):
    """One pass over all that is reached; what is found is in the attributes of `Walk`."""

    def _below(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        if isinstance(value, torch.Tensor | np.ndarray) or is_generator(value):
            self._numbers(value, path, put, depth)
        elif isinstance(value, CONTAINERS):
            self._container(value, path, put, depth)
        elif isinstance(value, nn.Module):
            self._module(value, path, depth)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, path, put, depth)
        elif isinstance(value, FUNCTIONS):
            self._function(value, path, depth)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self._leaf(f"{path} (function)", builtin_name(value), refuse)
            self._note(f"{path} (function)", lambda: builtin_name(value))
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, types.ModuleType | type):
                self.visit(owner, f"{path}.__self__", refuse, depth + 1)
        elif isinstance(value, type):
            self._class(value, path, depth)
            for kind in value.__mro__[1:]:
                if is_own_code(kind.__module__) and self._first_time(kind, path):
                    self._class(kind, f"{path}.<{kind.__name__}>", depth)
        elif not isinstance(value, types.ModuleType) and not self._indirect(value, path, depth):
            self._object(value, path, put, depth)

    def _indirect(self, value: Any, path: str, depth: int) -> bool:
        """Below what stands for something else; whether it is such."""
        if isinstance(value, weakref.ref):
            self.visit(value(), f"{path}()", refuse, depth + 1)
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            self._items(value, path, depth)
        elif isinstance(value, weakref.WeakSet):
            self._container(list(value), path, refuse, depth)
        elif isinstance(value, contextvars.ContextVar):
            self.visit(value.get(None), f"{path}.get()", lambda new: (value.set(new), None)[1], depth + 1)
        elif isinstance(value, types.MappingProxyType):
            self._container(dict(value), path, refuse, depth)
        else:
            return False
        return True

    def _object(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        kind = type(value)
        own = is_own_code(kind.__module__)
        if isinstance(value, Number):  # fractions and decimals
            self._compare(value, path)
            return
        sharer = shared_with(value)
        if sharer:
            self._tell(f"{path} is {sharer}, of which snapshots keep nothing")
            return
        if isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Union | ctypes.Array) and not own:
            self._opaque(path, f"{zlib.crc32(bytes(value)):08x}")
            return
        if (
            f"{kind.__module__}.{kind.__qualname__}".startswith(NO_SAY)
            and not isinstance(value, threading.local)
            and not is_stateful(value)
        ):
            return
        if isinstance(value, functools._lru_cache_wrapper):
            self.visit(value.__wrapped__, path, refuse, depth + 1)
            if not _DRAWS.isdisjoint(names_in(getattr(value.__wrapped__, "__code__", refuse.__code__))):
                self._tell(f"{path} keeps what it has drawn (lru_cache), which snapshots do not")
            return
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not own:
            self._tell(f"{path} is an iterator, whose position snapshots do not keep")
            return
        if is_stateful(value):
            self._leaf(path, value, put)
            for name, inner in inner_state(value).items():
                self.visit(inner, f"{path}.{name}", refuse, depth + 1)
            if own:  # a state_dict may leave out some of what there is
                with self._trusted(value):
                    self._below_members(value, path, depth)
            return
        if not own and not members_of(value):
            self._compare(value, path)
            return
        self._note(f"{path} (class)", lambda: kind.__qualname__)
        self._leaf(f"{path} (class)", kind.__qualname__, refuse)
        self._below_members(value, path, depth, quiet=not own)
        if own and has_more_inside(kind):
            self._compare(value, f"{path} (inside)")
