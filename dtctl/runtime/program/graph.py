"""One pass over the graph of objects that a program can reach: model, loss function, learning rate, optimizer, data.

What is reached: attributes, elements of containers, closures, defaults, hooks, and global variables that the user's own
functions name. What is there and of a kind that cannot be put back is compared by its pickled bytes, which are never
read; what cannot even be compared is told, unless it is of a kind that has no say in a training (a logger, a lock).
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import ctypes
import functools
import io
import os
import pickle
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dtctl.runtime.program import outside
from dtctl.runtime.program.bystanders import NO_SAY, shared_with
from dtctl.runtime.program.code import (
    builtin_name,
    class_name,
    code_digest,
    function_name,
    is_own_code,
    module_name,
    names_in,
    names_set_in,
)
from dtctl.runtime.program.idle_names import idle_names
from dtctl.runtime.program.kinds import (
    CONTAINERS,
    FUNCTIONS,
    MAX_ELEMENTS,
    PLAIN,
    has_memory,
    is_value,
    parts_of,
    tensors_in,
)
from dtctl.runtime.program.marks import SAMPLE_BYTES, Long, Opaque, crc_of, crc_of_bytes, text_of
from dtctl.runtime.program.members import PYTHONS, has_more_inside, is_of_class, members_of
from dtctl.runtime.program.stateful import inner_state, is_stateful, state_of
from dtctl.runtime.snapshot.format.encoding import (
    is_generator,
)

OPTIMIZER: Final = "optimizer"
"""The root that is the optimizer of the training."""

MAX_LEAVES: Final = 50_000
"""Things that are looked at; a program that has more keeps data there, not state."""

MAX_DEPTH: Final = 12

LONG_ELEMENTS: Final = 100_000
"""Of a longer list of plain values that is still compared; one that has grown is a record."""

_MODULE_KEYS: Final = frozenset(nn.Module().__dict__)

_WEIGHT: Final = torch.zeros(1, requires_grad=True)

_OPTIMIZER_KEYS: Final = frozenset(torch.optim.AdamW([_WEIGHT], fused=True).__dict__) | {"_opt_called", "_step_count"}
"""What torch's own optimizers have beside groups and state; the last two are put there by learning rate schedulers."""

MISSING: Final = object()

_BUILTINS: Final = frozenset(vars(builtins))

_DRAWS: Final = frozenset(
    ("rand", "randn", "randint", "random", "normal", "uniform", "bernoulli", "choice", "shuffle", "randperm", "sample")
)
"""Names of functions that draw random numbers."""


@dataclass(slots=True)
class StateEntry:
    """One value that may change."""

    value: Any
    put: Callable[[Any], None]
    """Replaces it."""
    cache: bool = False
    """Whether it is a container that may grow without a meaning: of samples that a data set has read."""
    copied: bool = False
    """Whether `value` is a copy that a foreign language gave: what is written to it reaches nobody."""
    trusted: bool = False
    """Whether it belongs to an object with a `state_dict`, which answers for what cannot be kept of it here."""


class ObjectWalk:
    """One pass over all that is reached.

    Attributes:
        leaves: by path.
        owners: path of what has attributes -> how to set one.
        aliases: path -> that of the same object, where it was seen first.
        parts: path -> that of a leaf which has the same object as a part.
        blind: what cannot be kept or compared, a phrase each.
    """

    def __init__(
        self, model: nn.Module, describe: dict[str, str] | None, apart: Iterable[object], caches: Iterable[object]
    ) -> None:
        state = model.state_dict(keep_vars=True)
        self._known = {id(value) for value in state.values()} | {id(value) for value in model.parameters()}
        self._seen: dict[int, str] = {}
        self._inner: dict[int, str] = {}
        self._kept: list[object] = []  # so that no number in `_seen` is given to another object
        self._describe, self._cache, self._trusting = describe, False, False
        self._covered: frozenset[int] = frozenset()
        self._caches = {id(value) for value in caches}
        self.leaves: dict[str, StateEntry] = {}
        self.owners: dict[str, Callable[[str, Any], None]] = {}
        self.aliases: dict[str, str] = {}
        self.parts: dict[str, str] = {}
        self.blind: list[str] = []
        for value in apart:
            self._first_time(value, "")
            if isinstance(value, nn.Module):
                for part in (*value.modules(), *value.parameters(), *value.buffers()):
                    self._first_time(part, "")

    def _first_time(self, value: object, path: str) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = path
        self._kept.append(value)
        return True

    def _leaf(self, path: str, value: Any, put: Callable[[Any], None]) -> None:
        inside = list(tensors_in(value)) if self._covered else []
        if inside and all(tensor.data_ptr() in self._covered for tensor in inside):
            return
        cache = self._cache and isinstance(value, CONTAINERS) and not is_value(value, self._known, plain=True)
        self.leaves.setdefault(path, StateEntry(value, put, cache=cache, trusted=self._trusting))

    def _tell(self, phrase: str) -> None:
        if not self._trusting:
            self.blind.append(phrase)

    def declared(self, value: Any, path: str) -> None:
        """The attributes of an object whose `state_dict` is taken by somebody else."""
        if is_own_code(type(value).__module__) and not isinstance(value, nn.Module | torch.optim.Optimizer):
            with self._trusted(value):
                self._below_members(value, path, 0)

    @contextlib.contextmanager
    def _trusted(self, value: Any) -> Iterator[None]:
        """Below an object with a `state_dict`, whose tensors are kept already."""
        before, covered = self._trusting, self._covered
        self._trusting, self._covered = True, covered | {tensor.data_ptr() for tensor in tensors_in(state_of(value))}
        yield
        self._trusting, self._covered = before, covered

    def _note(self, path: str, text: Callable[[], str]) -> None:
        if self._describe is not None:
            self._describe[path] = text()

    @contextlib.contextmanager
    def _describing(self, wanted: bool) -> Iterator[None]:
        kept = self._describe
        self._describe = kept if wanted else None
        yield
        self._describe = kept

    def visit(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        """Everything below a value."""
        try:
            self._visit(value, path, put, depth)
        except Exception:  # noqa: BLE001  # whatever its class does when it is looked at
            self._tell(f"{path} is a {type(value).__qualname__}, which cannot be looked into")

    def _visit(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        if depth > MAX_DEPTH or len(self.leaves) > MAX_LEAVES:
            return
        if isinstance(value, PLAIN):
            text = repr(value)[:200]
            if not (isinstance(value, str) and "/" in value):  # a path may be another on each node and in each run
                self._note(path, lambda: text)
            self._leaf(path, value, put)
            if is_own_code(type(value).__module__) and not isinstance(value, Enum) and self._first_time(value, path):
                self._below_members(value, path, depth)
        elif id(value) in self._known:
            return
        elif id(value) in self._inner:
            if not self._trusting:
                self.parts[path] = self._inner[id(value)]
        elif not self._first_time(value, path):
            plain = (tuple, type, types.ModuleType, types.BuiltinFunctionType, *FUNCTIONS)
            if not self._trusting and not isinstance(value, plain):
                self.aliases[path] = self._seen[id(value)]
        else:
            kept, self._cache = self._cache, self._cache or id(value) in self._caches
            self._below(value, path, put, depth)
            self._cache = kept

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

    def _numbers(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if hasattr(value, "device_mesh") or not has_memory(value):
                return
            if value.numel() * value.element_size() <= SAMPLE_BYTES and value.layout is torch.strided:
                self._note(path, lambda: f"{tuple(value.shape)} {crc_of_bytes(value)}")
            if value.requires_grad and value.is_leaf:  # gradients that live from step to step
                self.visit(value.grad, f"{path}.grad", functools.partial(setattr, value, "grad"), depth + 1)
            self._public(value, path, depth)
        elif isinstance(value, np.ndarray):
            if type(value) is not np.ndarray or value.dtype.kind not in "biufc":
                self._compare(value, path)
                return
            if value.nbytes <= SAMPLE_BYTES:
                self._note(path, lambda: f"{value.shape} {crc_of(value)}")
        elif is_own_code(type(value).__module__):  # a generator that the user has derived from another
            self._below_members(value, path, depth)
        self._leaf(path, value, put)

    def _public(self, value: Any, path: str, depth: int) -> None:
        """Attributes that the user has given a tensor or a function."""
        own = {name: held for name, held in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
        self._attributes(own, path, functools.partial(setattr, value), depth)

    def _container(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        if type(value) not in CONTAINERS:
            if is_own_code(type(value).__module__) and not isinstance(value, tuple):
                self._below_members(value, path, depth)
            else:
                self._public(value, path, depth)
        if len(value) > MAX_ELEMENTS:
            if len(value) <= LONG_ELEMENTS and is_value(value, self._stop(), plain=True):
                self._note(path, lambda: f"{len(value)} elements, {zlib.crc32(text_of(value).encode()):08x}")
                self.leaves.setdefault(path, StateEntry(value, put, cache=self._cache, trusted=self._trusting))
            elif not isinstance(value, tuple | frozenset):
                self.leaves.setdefault(path, StateEntry(Long(value), refuse, cache=self._cache, trusted=self._trusting))
            return
        if is_value(value, self._stop()):
            # As a whole, since it may grow or be replaced. What is empty now may come to have anything, such as paths.
            if value and is_value(value, self._stop(), plain=True) and " at 0x" not in text_of(value):
                self._note(path, lambda: text_of(value)[:200])
            self._leaf(path, value, put)
            for part in parts_of(value):
                self._inner.setdefault(id(part), path)
                self._kept.append(part)
        elif isinstance(value, dict):
            self._items(value, path, depth)
        elif isinstance(value, list):
            for index, item in enumerate(list(value)):
                self.visit(item, f"{path}[{index}]", functools.partial(value.__setitem__, index), depth + 1)
        else:
            for index, item in enumerate(list(value)):
                self.visit(item, f"{path}[{index}]", refuse, depth + 1)

    def _items(self, value: Any, path: str, depth: int) -> None:
        for number, key in enumerate(list(value)):
            name = repr(key) if isinstance(key, PLAIN) else f"<{type(key).__qualname__} {number}>"
            self.visit(value[key], f"{path}[{name}]", functools.partial(value.__setitem__, key), depth + 1)

    def _stop(self) -> AbstractSet[int]:
        """What must not be a part of a container that is kept as a whole."""
        return self._known | self._seen.keys()

    def _module(self, module: nn.Module, path: str, depth: int) -> None:
        self._note(f"{path} (class)", lambda: class_name(module))
        self._leaf(f"{path} (class)", class_name(module), refuse)
        self._leaf(f"{path}.training", module.training, functools.partial(setattr, module, "training"))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if not parameter.requires_grad:
                    self._note(f"{path}.{name} (frozen)", lambda: "frozen")
                put = functools.partial(setattr, parameter, "requires_grad")
                self._leaf(f"{path}.{name}.requires_grad", parameter.requires_grad, put)
                if id(parameter) in self._known and not hasattr(parameter, "device_mesh"):
                    self._public(parameter, f"{path}.{name}", depth)
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    self.visit(tensor, f"{path}.{name}", functools.partial(table.__setitem__, name), depth + 1)
        self._hooks(module, path, depth)
        # What torch's own modules have in private is theirs: LSTM keeps its weights once more.
        theirs = not any(is_own_code(kind.__module__) for kind in type(module).__mro__)
        own = {
            name: value
            for name, value in vars(module).items()
            if name not in _MODULE_KEYS and not (theirs and name.startswith("_"))
        }
        self._attributes(own, path, functools.partial(_set_attribute, module), depth)
        if isinstance(module, torch.jit.ScriptModule):
            self._scripted(module, path, depth)
        self._class_attributes(module, path, depth)
        for name, child in module._modules.items():
            if child is not None and self._first_time(child, f"{path}.{name}"):
                self._module(child, f"{path}.{name}", depth)

    def _scripted(self, module: torch.jit.ScriptModule, path: str, depth: int) -> None:
        """Attributes that TorchScript has, of which Python is given copies."""
        names = getattr(module, "_concrete_type").get_attributes().keys() - vars(module).keys()  # noqa: B009 # no stub
        for name in sorted(names):
            value, put = getattr(module, name), functools.partial(setattr, module, name)
            if isinstance(value, CONTAINERS):
                if is_value(value, self._stop()):
                    self._note(f"{path}.{name}", lambda: text_of(value)[:200])  # noqa: B023 # called at once
                    self.leaves.setdefault(f"{path}.{name}", StateEntry(value, put, copied=True))
                else:
                    self._tell(f"{path}.{name} is a container of TorchScript, which cannot be looked into")
            else:
                self.visit(value, f"{path}.{name}", put, depth + 1)

    def _hooks(self, module: nn.Module, path: str, depth: int) -> None:
        hooks = [
            hook
            for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
            for hook in (getattr(module, table, None) or {}).values()
        ]
        for parameter in module._parameters.values():
            hooks += (getattr(parameter, "_backward_hooks", None) or {}).values()
            hooks += (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        # torch's own strategies work by hooks, too.
        own = [hook for hook in hooks if is_own_code(getattr(hook, "__module__", None) or type(hook).__module__)]
        if own:
            self._note(f"{path} (hooks)", lambda: ", ".join(map(function_name, own)))
        for number, hook in enumerate(own):
            self.visit(hook, f"{path}.hook{number}", refuse, depth + 1)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str, put: Callable[[Any], None], depth: int) -> None:
        own = {name: value for name, value in vars(optimizer).items() if name not in _OPTIMIZER_KEYS}
        if path != OPTIMIZER:  # one that something else has; that of the training has a part of its own in snapshots
            self._leaf(path, optimizer, put)
        else:
            self._note(f"{path} (class)", lambda: class_name(optimizer))
        for table in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            for number, hook in enumerate(getattr(optimizer, table, {}).values()):
                self.visit(hook, f"{path}.{table}{number}", refuse, depth + 1)
        for number, group in enumerate(optimizer.param_groups):  # numbers and tensors are in the optimizer's own part
            for name, value in list(group.items()):
                if name != "params" and not isinstance(value, (*PLAIN, *CONTAINERS, torch.Tensor, np.ndarray)):
                    put = functools.partial(group.__setitem__, name)
                    self.visit(value, f"{path}.param_groups[{number}].{name}", put, depth + 1)
        # A step function that torch has wrapped for its profiler, or a scheduler to count, is none of the user's.
        own = {name: value for name, value in own.items() if not isinstance(value, FUNCTIONS)}
        self._attributes(own, path, functools.partial(_set_attribute, optimizer), depth)
        if is_own_code(type(optimizer).__module__):
            self._class_attributes(optimizer, path, depth)

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

    def _below_members(self, value: Any, path: str, depth: int, *, quiet: bool = False) -> None:
        """Attributes of an object and of its classes."""
        self._attributes(members_of(value), path, functools.partial(_set_attribute, value), depth, quiet=quiet)
        self._class_attributes(value, path, depth)

    def _compare(self, value: Any, path: str) -> None:
        """By its pickled bytes, which nobody ever reads."""
        try:
            digest = f"{zlib.crc32(pickle.dumps(value)):08x}"
        except Exception:  # noqa: BLE001  # whatever it is, it cannot be looked into
            self._tell(f"{path} is a {type(value).__qualname__}, which cannot be looked into")
            return
        self._opaque(path, digest)

    def _opaque(self, path: str, digest: str) -> None:
        self._note(path, lambda: digest)
        self._leaf(path, Opaque(digest), refuse)

    def _class_attributes(self, value: Any, path: str, depth: int) -> None:
        for kind in type(value).__mro__:
            if not is_own_code(kind.__module__):
                plain = {
                    name: held
                    for name, held in vars(kind).items()
                    if not name.startswith("_") and isinstance(held, int | float | str)
                }
                self._attributes(plain, f"{path}.<{kind.__name__}>", functools.partial(setattr, kind), depth)
            elif self._first_time(kind, path):
                self._class(kind, f"{path}.<{kind.__name__}>", depth, methods=path)

    def _class(self, kind: type, path: str, depth: int, methods: str | None = None) -> None:
        """What a class of the user's has for all of its objects; `methods`: path of its functions."""
        if not is_own_code(kind.__module__):
            return
        own = {
            name: held
            for name, held in vars(kind).items()
            if not name.startswith(("__", "_abc_")) and not is_of_class(held)
        }
        self._attributes(own, path, functools.partial(setattr, kind), depth)
        for name, held in vars(kind).items():
            function = held.__func__ if isinstance(held, staticmethod | classmethod) else held
            function = function.fget if isinstance(function, property) else function
            if isinstance(function, types.FunctionType):
                self.visit(function, f"{methods or path}.{name}", refuse, depth + 1)

    def _attributes(
        self, held: Mapping[str, Any], path: str, put: Callable[[str, Any], None], depth: int, *, quiet: bool = False
    ) -> None:
        """Below each attribute; `quiet`: private ones are no circumstance."""
        self.owners[path] = put
        for name, value in list(held.items()):
            if name not in PYTHONS:
                with self._describing(self._describe is not None and not (quiet and name.startswith("_"))):
                    self.visit(value, f"{path}.{name}", functools.partial(put, name), depth + 1)

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


def refuse(_value: Any) -> None:
    """In the place of what would put a value somewhere."""
    raise TypeError("nothing can be put here")


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)
