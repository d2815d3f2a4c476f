"""State that a program keeps outside of parameters and persistent buffers: where it is, whether it changed, and back.

A module counts its calls in an attribute, a loss function keeps a queue in its closure, an augmentation has a generator
of its own. Who resumes without them trains on with other bits. So before training everything is listed that the model,
the loss function, the learning rate and the optimizer can reach, with a mark of what it was then; a snapshot takes what
has changed since, and a resume puts it back. What it was before training is part of the circumstances: a dropout of
another probability is another training.

What is reached: attributes, elements of containers, closures, defaults, hooks, and global variables that the user's own
functions name. What is there and of a kind that cannot be put back is compared by its pickled bytes, which are never
read; what cannot even be compared is told, unless it is of a kind that has no say in a training (a logger, a lock).
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import copy
import ctypes
import dis
import functools
import io
import itertools
import os
import pickle
import queue
import subprocess
import sys
import sysconfig
import threading
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dtctl.runtime import outside
from dtctl.runtime.idle_names import idle_names
from dtctl.runtime.snapshot.encoding import (
    NotEncodable,
    decode,
    encode,
    generator_state,
    is_generator,
    set_generator_state,
    with_devices,
)

OPTIMIZER: Final = "optimizer"
"""The root that is the optimizer of the training."""
MAX_LEAVES: Final = 50_000
"""Things that are looked at; a program that has more keeps data there, not state."""
MAX_ELEMENTS: Final = 1024
"""Of a container. A longer one is a record of what happened, or data."""
MAX_DEPTH: Final = 12
SAMPLE_BYTES: Final = 1 << 16
"""Of a larger array that are compared."""

LONG_ELEMENTS: Final = 100_000
"""Of a longer list of plain values that is still compared; one that has grown is a record."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, range, type(None), torch.dtype, torch.device, np.generic, Enum)
_FUNCTIONS: Final = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS: Final = (dict, OrderedDict, list, tuple, set, frozenset, deque)
_MODULE_KEYS: Final = frozenset(nn.Module().__dict__)
_WEIGHT: Final = torch.zeros(1, requires_grad=True)
_OPTIMIZER_KEYS: Final = frozenset(torch.optim.AdamW([_WEIGHT], fused=True).__dict__) | {"_opt_called", "_step_count"}
"""What torch's own optimizers have beside groups and state; the last two are put there by learning rate schedulers."""
_INSTALLED: Final = tuple(
    {str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_MISSING: Final = object()
_BUILTINS: Final = frozenset(vars(builtins))
_PYTHONS: Final = frozenset(("__dict__", "__weakref__", "__doc__", "__module__", "__wrapped__", "__annotations__"))
"""Attributes by which Python describes things."""
_DRAWS: Final = frozenset(
    ("rand", "randn", "randint", "random", "normal", "uniform", "bernoulli", "choice", "shuffle", "randperm", "sample")
)
"""Names of functions that draw random numbers."""
_STATE: Final = "\0state"
"""Before the class and the state of an object that has `state_dict`."""
_NO_SAY: Final = (
    *(
        "logging",
        "io",
        "_io",
        "threading",
        "_thread",
        "socket",
        "ssl",
        "subprocess",
        "concurrent",
        "asyncio",
        "selectors",
    ),
    *(
        "_csv.writer",
        "multiprocessing.context",
        "multiprocessing.synchronize",
        "multiprocessing.pool",
        "multiprocessing.process",
        "multiprocessing.queues",
        "tensorboard",
        "wandb",
        "mlflow",
        "tqdm",
        "rich",
        "pathlib",
        "re",
        "typing",
        "abc",
        "warnings",
    ),
    *(
        "contextlib",
        "inspect",
        "dtctl",
        "torch.cuda",
        "torch.distributed",
        "torch.profiler",
        "torch._C",
        "torch._dynamo",
    ),
    *("torch.autograd", "torch.amp", "torch.utils.tensorboard", "torch.utils.hooks", "torch.nn.parallel", "unittest"),
    *("_pytest", "pytest", "tempfile", "signal", "argparse._", "importlib", "zipimport", "weakref", "torch._ops"),
)
"""Modules whose objects do not change what is trained."""


@functools.lru_cache(maxsize=4096)
def is_own_code(module: str) -> bool:
    """Whether a module, by its name, is the user's: neither installed, nor Python's, nor dtctl's."""
    if module.partition(".")[0] in ("dtctl", "builtins", "torch"):
        return False
    found = sys.modules.get(module)
    path = getattr(found, "__file__", None)
    if found is None or path is None:
        return module == "__main__"
    return not str(Path(path).resolve()).startswith(_INSTALLED) and "site-packages" not in str(path)


@dataclass(slots=True)
class _Leaf:
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


@dataclass(frozen=True, slots=True)
class _Long:
    """A container of which too much is there to be kept."""

    value: Any

    def mark(self) -> tuple[Any, ...]:
        """By which most changes are seen."""
        return ("long", len(self.value), [id(item) for item in _some_items(self.value)])


@dataclass(frozen=True, slots=True)
class _Opaque:
    """Something that is compared, and cannot be put back."""

    digest: str

    def mark(self) -> tuple[Any, ...]:
        """By which a change is seen."""
        return ("opaque", self.digest)


class ProgramState:
    """What is reached from some roots, and what it was when this was made.

    Attributes:
        plain: path -> value, as text, of plain values and classes, as they were.
        blind: what cannot be kept or compared, a phrase each.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        model: nn.Module,
        apart: Iterable[object] = (),
        caches: Iterable[object] = (),
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        """Look at everything.

        Args:
            roots: name -> object, such as `{"model": model, "loss": loss}`.
            model: its parameters and persistent buffers are in snapshots anyway.
            apart: objects that somebody else takes care of.
            caches: objects whose containers may grow without a meaning: data sets.
            declared: name -> object with a `state_dict`, which may leave out some of what the object has.
        """
        self._roots, self._model, self._apart, self._caches = dict(roots), model, list(apart), list(caches)
        self._declared = dict(declared or {})
        self.plain: dict[str, str] = {}
        self._held: list[object] = []
        """What was there: as long as it lives, nothing else has its address."""
        walk = self._walk(self.plain)
        self._marks = {path: _mark(leaf.value, self._held) for path, leaf in walk.leaves.items()}
        self._lasting = {path for path, leaf in walk.leaves.items() if not leaf.cache and not leaf.trusted}
        self._aliases = walk.aliases
        self.blind = walk.blind

    def _walk(self, describe: dict[str, str] | None = None) -> _Walk:
        walk = _Walk(self._model, describe, self._apart, self._caches)
        for name, root in self._roots.items():
            walk.visit(root, name, _refuse, 0)
        for name, value in self._declared.items():
            walk.declared(value, name)
        return walk

    def changed(self) -> tuple[dict[str, Any], list[str]]:
        """What is another than at first.

        Returns:
            By path what it is now, encoded, with tensors that are not copied; and the paths of what has changed to
            something that snapshots do not keep.
        """
        kept: dict[str, Any] = {}
        walk = self._walk()
        lost = [path for path, other in walk.aliases.items() if self._aliases.get(path) != other]
        for path, leaf in walk.leaves.items():
            mark, before = _mark(leaf.value), self._marks.get(path, _MISSING)
            if mark == before or (leaf.cache and _has_grown(before, mark)):
                continue
            try:
                kept[path] = with_devices(encode(content(leaf.value), path))
            except NotEncodable:
                lost += [] if leaf.trusted else [path]
        if len(walk.leaves) < MAX_LEAVES:
            there = walk.leaves.keys() | walk.aliases.keys() | walk.parts.keys()
            lost += sorted(path for path in self._lasting - there if not _is_within(path, kept))
        # Put back as a whole, a container gets new parts, and who else has one of the old ones keeps that.
        lost += [path for path, home in walk.parts.items() if home in kept]
        return kept, lost

    def hold(self) -> dict[str, Any]:
        """A copy of everything, for `load`, before something runs that is not to leave a trace."""
        found: dict[str, Any] = {}
        for path, leaf in self._walk().leaves.items():
            with contextlib.suppress(NotEncodable):
                found[path] = copy.deepcopy(with_devices(encode(content(leaf.value), path)))
        return found

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Put back what `changed` returned.

        Returns:
            What could not be put back, a phrase each.
        """
        left, failed = dict(state), list[str]()
        model = {
            tensor.untyped_storage().data_ptr() for tensor in self._model.state_dict().values() if _has_storage(tensor)
        }
        owners: dict[str, Callable[[str, Any], None]] = {}
        # Twice: what is put back first may be where something else belongs, such as an entry of a dict.
        for _ in range(2):
            walk = self._walk()
            owners = walk.owners
            for path, leaf in walk.leaves.items():
                if path in left and not _put(leaf, decode(left.pop(path)), model):
                    failed.append(path)
        for path in list(left):  # attributes that training has made
            owner, _, name = path.rpartition(".")
            fits = owner in owners and name.isidentifier()
            value = decode(left[path]) if fits else None
            if fits and not _is_tagged(value):
                owners[owner](name, value)
                del left[path]
        found = [f"{some_of(left)} changed in training, and there is no place for it now"] if left else []
        return found + ([f"{some_of(failed)} changed in training, and cannot be set"] if failed else [])


def _is_within(path: str, kept: Mapping[str, Any]) -> bool:
    """Whether something that holds a path is kept as a whole."""
    return any(path[:end] in kept for end, sign in enumerate(path) if sign in ".[(")


def _has_storage(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and not hasattr(tensor, "device_mesh") and tensor.layout is torch.strided


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers are there: sharding frees those of whole parameters, and leaves the tensors."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return not tensor.is_meta
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > tensor.storage_offset() * tensor.element_size()


def _has_grown(before: Any, mark: Any) -> bool:
    """Whether two marks of a container tell of other lengths."""
    return isinstance(before, tuple) and before[0] == mark[0] and len(before) > 1 and before[1] != mark[1]


def _refuse(_value: Any) -> None:
    raise TypeError("nothing can be put here")


def some_of(paths: Iterable[str], count: int = 4) -> str:
    """The first of some paths, and how many more there are."""
    every = list(paths)
    return ", ".join(every[:count]) + (f" and {len(every) - count} more" if len(every) > count else "")


def _put(leaf: _Leaf, value: Any, model: AbstractSet[int]) -> bool:
    """Give a leaf a value; whether that was possible.

    Args:
        leaf: of this process.
        value: decoded.
        model: addresses of what the model's state lies in, which must not be written to by another name.
    """
    held = leaf.value
    if isinstance(held, _PLAIN) and _mark(held) == _mark(value):  # also where it cannot be set (a frozen dataclass)
        return True
    shared = _has_storage(held) and held.untyped_storage().data_ptr() in model
    if not shared and not leaf.copied and put_into(held, value):
        return True
    if _is_tagged(value) or is_generator(held):
        return False
    try:
        leaf.put(value.to(held.device) if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) else value)
    except (AttributeError, TypeError):
        return False
    return True


def _is_tagged(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str) and value[0] == _STATE


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
    if _is_tagged(value):
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
    return value.stride() if _has_storage(value) else getattr(value, "strides", None)


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


class _Walk:
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
        self.leaves: dict[str, _Leaf] = {}
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
        inside = list(_tensors_in(value)) if self._covered else []
        if inside and all(tensor.data_ptr() in self._covered for tensor in inside):
            return
        cache = self._cache and isinstance(value, _CONTAINERS) and not _is_value(value, self._known, plain=True)
        self.leaves.setdefault(path, _Leaf(value, put, cache=cache, trusted=self._trusting))

    def _tell(self, phrase: str) -> None:
        if not self._trusting:
            self.blind.append(phrase)

    def declared(self, value: Any, path: str) -> None:
        """The attributes of an object whose `state_dict` is taken by somebody else."""
        if is_own_code(type(value).__module__) and not isinstance(value, nn.Module | torch.optim.Optimizer):
            with self._trusted(value):
                self._members(value, path, 0)

    @contextlib.contextmanager
    def _trusted(self, value: Any) -> Iterator[None]:
        """Below an object with a `state_dict`, whose tensors are kept already."""
        before, covered = self._trusting, self._covered
        self._trusting, self._covered = True, covered | {tensor.data_ptr() for tensor in _tensors_in(_state_of(value))}
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
        if isinstance(value, _PLAIN):
            text = repr(value)[:200]
            if not (isinstance(value, str) and "/" in value):  # a path may be another on each node and in each run
                self._note(path, lambda: text)
            self._leaf(path, value, put)
        elif id(value) in self._known:
            return
        elif id(value) in self._inner:
            if not self._trusting:
                self.parts[path] = self._inner[id(value)]
        elif not self._first_time(value, path):
            plain = (tuple, type, types.ModuleType, types.BuiltinFunctionType, *_FUNCTIONS)
            if not self._trusting and not isinstance(value, plain):
                self.aliases[path] = self._seen[id(value)]
        else:
            kept, self._cache = self._cache, self._cache or id(value) in self._caches
            self._below(value, path, put, depth)
            self._cache = kept

    def _below(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        if isinstance(value, torch.Tensor | np.ndarray) or is_generator(value):
            self._numbers(value, path, put, depth)
        elif isinstance(value, _CONTAINERS):
            self._container(value, path, put, depth)
        elif isinstance(value, nn.Module):
            self._module(value, path, depth)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, path, put, depth)
        elif isinstance(value, _FUNCTIONS):
            self._function(value, path, depth)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self._leaf(f"{path} (function)", _builtin_name(value), _refuse)
            self._note(f"{path} (function)", lambda: _builtin_name(value))
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, types.ModuleType | type):
                self.visit(owner, f"{path}.__self__", _refuse, depth + 1)
        elif isinstance(value, type):
            if is_own_code(value.__module__):
                own = {name: held for name, held in vars(value).items() if not name.startswith("__")}
                self._attributes(own, path, functools.partial(setattr, value), depth)
        elif not isinstance(value, types.ModuleType) and not self._indirect(value, path, depth):
            self._object(value, path, put, depth)

    def _indirect(self, value: Any, path: str, depth: int) -> bool:
        """Below what stands for something else; whether it is such."""
        if isinstance(value, weakref.ref):
            self.visit(value(), f"{path}()", _refuse, depth + 1)
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            self._items(value, path, depth)
        elif isinstance(value, weakref.WeakSet):
            self._container(list(value), path, _refuse, depth)
        elif isinstance(value, contextvars.ContextVar):
            self.visit(value.get(None), f"{path}.get()", lambda new: (value.set(new), None)[1], depth + 1)
        elif isinstance(value, types.MappingProxyType):
            self._container(dict(value), path, _refuse, depth)
        else:
            return False
        return True

    def _numbers(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if hasattr(value, "device_mesh") or not _has_memory(value):
                return
            if value.numel() * value.element_size() <= SAMPLE_BYTES and value.layout is torch.strided:
                self._note(path, lambda: f"{tuple(value.shape)} {_mark_of_bytes(value)}")
            if value.requires_grad and value.is_leaf:  # gradients that live from step to step
                self.visit(value.grad, f"{path}.grad", functools.partial(setattr, value, "grad"), depth + 1)
            self._public(value, path, depth)
        elif isinstance(value, np.ndarray):
            if type(value) is not np.ndarray or value.dtype.kind not in "biufc":
                self._compare(value, path)
                return
            if value.nbytes <= SAMPLE_BYTES:
                self._note(path, lambda: f"{value.shape} {_crc(value)}")
        elif is_own_code(type(value).__module__):  # a generator that the user has derived from another
            self._members(value, path, depth)
        self._leaf(path, value, put)

    def _public(self, value: Any, path: str, depth: int) -> None:
        """Attributes that the user has given a tensor or a function."""
        own = {name: held for name, held in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
        self._attributes(own, path, functools.partial(setattr, value), depth)

    def _container(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        if type(value) not in _CONTAINERS:
            if is_own_code(type(value).__module__) and not isinstance(value, tuple):
                self._members(value, path, depth)
            else:
                self._public(value, path, depth)
        if len(value) > MAX_ELEMENTS:
            if len(value) <= LONG_ELEMENTS and _is_value(value, self._stop(), plain=True):
                self._note(path, lambda: f"{len(value)} elements, {zlib.crc32(_text(value).encode()):08x}")
                self.leaves.setdefault(path, _Leaf(value, put, cache=self._cache, trusted=self._trusting))
            elif not isinstance(value, tuple | frozenset):
                self.leaves.setdefault(path, _Leaf(_Long(value), _refuse, cache=self._cache, trusted=self._trusting))
            return
        if _is_value(value, self._stop()):
            # As a whole, since it may grow or be replaced. What is empty now may come to have anything, such as paths.
            if value and _is_value(value, self._stop(), plain=True) and " at 0x" not in _text(value):
                self._note(path, lambda: _text(value)[:200])
            self._leaf(path, value, put)
            for part in _parts(value):
                self._inner.setdefault(id(part), path)
                self._kept.append(part)
        elif isinstance(value, dict):
            self._items(value, path, depth)
        elif isinstance(value, list):
            for index, item in enumerate(list(value)):
                self.visit(item, f"{path}[{index}]", functools.partial(value.__setitem__, index), depth + 1)
        else:
            for index, item in enumerate(list(value)):
                self.visit(item, f"{path}[{index}]", _refuse, depth + 1)

    def _items(self, value: Any, path: str, depth: int) -> None:
        for number, key in enumerate(list(value)):
            name = repr(key) if isinstance(key, _PLAIN) else f"<{type(key).__qualname__} {number}>"
            self.visit(value[key], f"{path}[{name}]", functools.partial(value.__setitem__, key), depth + 1)

    def _stop(self) -> AbstractSet[int]:
        """What must not be a part of a container that is kept as a whole."""
        return self._known | self._seen.keys()

    def _module(self, module: nn.Module, path: str, depth: int) -> None:
        self._note(f"{path} (class)", lambda: class_name(module))
        self._leaf(f"{path} (class)", class_name(module), _refuse)
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
            if isinstance(value, _CONTAINERS):
                if _is_value(value, self._stop()):
                    self._note(f"{path}.{name}", lambda: _text(value)[:200])  # noqa: B023 # called at once
                    self.leaves.setdefault(f"{path}.{name}", _Leaf(value, put, copied=True))
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
            self._note(f"{path} (hooks)", lambda: ", ".join(map(_function_name, own)))
        for number, hook in enumerate(own):
            self.visit(hook, f"{path}.hook{number}", _refuse, depth + 1)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str, put: Callable[[Any], None], depth: int) -> None:
        own = {name: value for name, value in vars(optimizer).items() if name not in _OPTIMIZER_KEYS}
        if path != OPTIMIZER:  # one that something else has; that of the training has a part of its own in snapshots
            self._leaf(path, optimizer, put)
        else:
            self._note(f"{path} (class)", lambda: class_name(optimizer))
        for table in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            for number, hook in enumerate(getattr(optimizer, table, {}).values()):
                self.visit(hook, f"{path}.{table}{number}", _refuse, depth + 1)
        # A step function that torch has wrapped for its profiler, or a scheduler to count, is none of the user's.
        own = {name: value for name, value in own.items() if not isinstance(value, _FUNCTIONS)}
        self._attributes(own, path, functools.partial(_set_attribute, optimizer), depth)
        if is_own_code(type(optimizer).__module__):
            self._class_attributes(optimizer, path, depth)

    def _object(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> None:
        kind = type(value)
        own = is_own_code(kind.__module__)
        if isinstance(value, Number):  # fractions and decimals
            self._compare(value, path)
            return
        elsewhere = _elsewhere(value)
        if elsewhere:
            self._tell(f"{path} is {elsewhere}, of which snapshots keep nothing")
            return
        if isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Union | ctypes.Array) and not own:
            self._opaque(path, f"{zlib.crc32(bytes(value)):08x}")
            return
        if (
            f"{kind.__module__}.{kind.__qualname__}".startswith(_NO_SAY)
            and not isinstance(value, threading.local)
            and not is_stateful(value)
        ):
            return
        if isinstance(value, functools._lru_cache_wrapper):
            self.visit(value.__wrapped__, path, _refuse, depth + 1)
            if not _DRAWS.isdisjoint(_names_in(getattr(value.__wrapped__, "__code__", _refuse.__code__))):
                self._tell(f"{path} keeps what it has drawn (lru_cache), which snapshots do not")
            return
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not own:
            self._tell(f"{path} is an iterator, whose position snapshots do not keep")
            return
        if is_stateful(value):
            self._leaf(path, value, put)
            for name, inner in inner_state(value).items():
                self.visit(inner, f"{path}.{name}", _refuse, depth + 1)
            if own:  # a state_dict may leave out some of what there is
                with self._trusted(value):
                    self._members(value, path, depth)
            return
        if not own and not _members(value):
            self._compare(value, path)
            return
        self._note(f"{path} (class)", lambda: kind.__qualname__)
        self._leaf(f"{path} (class)", kind.__qualname__, _refuse)
        self._members(value, path, depth, quiet=not own)
        if own and _has_more_inside(kind):
            self._compare(value, f"{path} (inside)")

    def _members(self, value: Any, path: str, depth: int, *, quiet: bool = False) -> None:
        """Attributes of an object and of its classes."""
        self._attributes(_members(value), path, functools.partial(_set_attribute, value), depth, quiet=quiet)
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
        self._leaf(path, _Opaque(digest), _refuse)

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
                own = {
                    name: held
                    for name, held in vars(kind).items()
                    if not name.startswith(("__", "_abc_")) and not _is_of_class(held)
                }
                self._attributes(own, f"{path}.<{kind.__name__}>", functools.partial(setattr, kind), depth)
                for name, held in vars(kind).items():
                    function = held.__func__ if isinstance(held, staticmethod | classmethod) else held
                    function = function.fget if isinstance(function, property) else function
                    if isinstance(function, types.FunctionType):
                        self.visit(function, f"{path}.{name}", _refuse, depth + 1)

    def _attributes(
        self, held: Mapping[str, Any], path: str, put: Callable[[str, Any], None], depth: int, *, quiet: bool = False
    ) -> None:
        """Below each attribute; `quiet`: private ones are no circumstance."""
        self.owners[path] = put
        for name, value in list(held.items()):
            if name not in _PYTHONS:
                with self._describing(self._describe is not None and not (quiet and name.startswith("_"))):
                    self.visit(value, f"{path}.{name}", functools.partial(put, name), depth + 1)

    def _function(self, function: Any, path: str, depth: int) -> None:
        if isinstance(function, functools.partial):
            self.visit(function.func, path, _refuse, depth + 1)
            for index, item in enumerate(function.args):
                self.visit(item, f"{path}({index})", _refuse, depth + 1)
            for name, item in function.keywords.items():
                put = functools.partial(function.keywords.__setitem__, name)
                self.visit(item, f"{path}({name})", put, depth + 1)
            return
        if isinstance(function, types.MethodType):
            self.visit(function.__self__, path, _refuse, depth + 1)
            function = function.__func__
            path = f"{path}.{_function_name(function).rpartition('.')[2]}"  # the object itself has the path
        if not isinstance(function, types.FunctionType):
            return
        made_by_hand = function.__code__.co_filename.startswith("<")
        if not made_by_hand and not is_own_code(function.__module__ or ""):
            self._leaf(f"{path} (function)", _builtin_name(function), _refuse)
            self._note(f"{path} (function)", lambda: _builtin_name(function))
            self._public(function, path, depth)
            return
        digest = code_digest(function.__code__)
        self._note(f"{path} (code)", lambda: digest)
        self._leaf(f"{path} (code)", digest, _refuse)
        self._public(function, path, depth)
        # What has no say in what a function computes is state that is kept, and no circumstance.
        idle = idle_names(function) if self._describe is not None else frozenset()
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            with self._describing(self._describe is not None and name not in idle):
                put = functools.partial(setattr, cell, "cell_contents")
                self.visit(held, f"{path}.{name}", put, depth + 1)
        for index, default in enumerate(function.__defaults__ or ()):
            self.visit(default, f"{path}.default{index}", _refuse, depth + 1)
        for name, default in (function.__kwdefaults__ or {}).items():
            self.visit(default, f"{path}.{name}", _refuse, depth + 1)
        self._globals(function, path, idle, depth)

    def _builtin(self, name: str, depth: int) -> None:
        self.owners.setdefault("builtins", functools.partial(setattr, builtins))
        self.visit(vars(builtins)[name], f"builtins.{name}", functools.partial(setattr, builtins, name), depth + 1)

    def _globals(self, function: types.FunctionType, path: str, idle: AbstractSet[str], depth: int) -> None:
        """The global variables that a function names, and those of the user's modules that it names."""
        if function.__globals__.get("__name__") != function.__module__ and not is_own_code(
            function.__globals__.get("__name__", "__main__")
        ):
            return  # a wrapper of somebody else's, by the name of what it wraps
        module, names = function.__globals__, _names_in(function.__code__)
        if "os" not in idle:
            for name in outside.variables(names):
                digest = zlib.crc32(os.environ.get(name, "").encode())  # it may be a secret
                self._note(f"environment variable {name}", lambda: f"{digest:08x}")  # noqa: B023 # called at once
                self._leaf(f"environment variable {name}", os.environ.get(name), functools.partial(_set_variable, name))
        if self._describe is not None:
            source = outside.unrepeatable(function, files=not path.startswith("data"))
            self.blind += [f"{path} goes by {source}"] if source and not self._trusting else []
        written = _names_set_in(function.__code__)
        label = module_name(function.__module__)
        self.owners.setdefault(label, module.__setitem__)
        for name in sorted(names):
            held = module.get(name, _MISSING)
            if held is _MISSING:
                held = sys.modules.get(name, _MISSING)  # imported where it is used
            if held is _MISSING and name in vars(builtins).keys() - _BUILTINS:
                self._builtin(name, depth)
            if held is _MISSING or name.startswith("__"):
                continue
            with self._describing(self._describe is not None and name not in idle):
                if issubclass(type(held), types.ModuleType):
                    own = is_own_code(held.__name__)
                    for attribute in sorted(names & vars(held).keys()):
                        value = vars(held)[attribute]
                        # Of an installed module, what the user has put in its place, or given attributes.
                        changed = isinstance(value, types.FunctionType) and (
                            is_own_code(value.__module__) or bool(vars(value))
                        )
                        if own or changed or attribute in written:
                            self.owners.setdefault(held.__name__, functools.partial(setattr, held))
                            put = functools.partial(setattr, held, attribute)
                            self.visit(value, f"{held.__name__}.{attribute}", put, depth + 1)
                else:
                    self.visit(held, f"{label}.{name}", functools.partial(module.__setitem__, name), depth + 1)


def _elsewhere(value: Any) -> str | None:
    """What another process or thread has a hand in; None of anything else."""
    if isinstance(value, subprocess.Popen) and (value.stdout is not None or value.stdin is not None):
        return "a process that is talked to"
    if type(value).__module__ in ("multiprocessing.connection", "multiprocessing.managers"):
        return "another process's"
    if isinstance(value, queue.Queue | queue.SimpleQueue) and any(_is_own_thread(t) for t in threading.enumerate()):
        return "a queue between threads"
    return None


def _is_own_thread(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None) or type(thread).run
    return is_own_code(getattr(target, "__module__", None) or "")


def _slots(kind: type) -> list[str]:
    """Names of a class's slots, by which they are found in its objects."""
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else found
    private = f"_{kind.__name__.lstrip('_')}"
    return [f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]


def _members(value: Any) -> dict[str, Any]:
    """What lies in an object, in slots too; its `__getattr__` is not asked."""
    slots = sorted({name for kind in type(value).__mro__ for name in _slots(kind)} - _PYTHONS)
    held = {name: object.__getattribute__(value, name) for name in slots if _has_slot(value, name)}
    with contextlib.suppress(AttributeError):
        held |= object.__getattribute__(value, "__dict__")
    return held


def _is_of_class(value: Any) -> bool:
    """Whether a class has it for all of its objects, such as a function, and it is no state."""
    found = hasattr(type(value), "__get__") or isinstance(value, type | types.ModuleType | types.GenericAlias)
    return found and not is_own_code(type(value).__module__)


def _has_slot(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def _has_more_inside(kind: type) -> bool:
    """Whether objects of a class have room for more than their attributes: state that only C code sees."""
    slots = sum(name not in _PYTHONS for base in kind.__mro__ for name in _slots(base))
    attributes_and_weak_references = 16
    return kind.__basicsize__ - object.__basicsize__ - 8 * slots > attributes_and_weak_references


def _builtin_name(function: Any) -> str:
    return f"{getattr(function, '__module__', None) or ''}.{_function_name(function)}"


def _text(value: Any) -> str:
    """As `repr`, with sets in an order that is the same in every process."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple | deque):
        return f"({', '.join(map(_text, value))})"
    return repr(value)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _state_of(value: Any) -> Any:
    try:
        return value.state_dict()
    except Exception:  # noqa: BLE001  # the user's code, at a time when nobody calls it
        return None


def _parts(value: Any) -> Iterator[object]:
    """What is in a container and may be in another one, too."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (torch.Tensor, np.ndarray, list, dict, set, deque)):
            yield item
        if isinstance(item, _CONTAINERS):
            yield from _parts(item)


def _is_value(value: Any, stop: AbstractSet[int], *, plain: bool = False) -> bool:
    """Whether a container has numbers, text and tensors alone, none of which is in snapshots anyway.

    Args:
        value: a container.
        stop: identities of what must not be in it.
        plain: whether tensors do not count as such.
    """
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for item in items:
        if isinstance(item, _CONTAINERS):
            fits = id(item) not in stop and type(item) in _CONTAINERS and len(item) <= MAX_ELEMENTS
            fits = fits and _is_value(item, stop, plain=plain)
        elif isinstance(item, torch.Tensor):
            fits = not plain and id(item) not in stop and not hasattr(item, "device_mesh") and _has_memory(item)
        else:
            fits = isinstance(item, _PLAIN) or (not plain and type(item) is np.ndarray and id(item) not in stop)
        if not fits:
            return False
    return True


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _mark(value: Any, held: list[object] | None = None) -> Any:
    """Equal as long as a value is what it was; nothing is copied, and of tensors nothing is read.

    Args:
        value: anything that is looked at.
        held: is given the tensors, by whose addresses the mark goes.
    """
    if isinstance(value, torch.Tensor):
        if held is not None:
            held.append(value)
        return ("tensor", value.data_ptr() if value.layout is torch.strided else id(value), value._version, value.shape)
    if isinstance(value, np.ndarray):
        return ("array", _crc(value))
    if is_generator(value):
        state = decode(generator_state(value))
        return ("generator", _mark_of_bytes(state["torch"]) if "torch" in state else repr(state))
    if isinstance(value, torch.optim.Optimizer):
        tensors = [_mark(one, held) for state in value.state.values() for one in state.values()]
        return ("optimizer", tensors, repr([{k: v for k, v in g.items() if k != "params"} for g in value.param_groups]))
    if isinstance(value, _CONTAINERS) and len(value) > MAX_ELEMENTS:
        return (type(value).__name__, len(value), zlib.crc32(_text(value).encode()))
    if isinstance(value, set | frozenset):
        return (type(value).__name__, len(value), _text(value))
    if isinstance(value, Mapping):
        return ("mapping", len(value), [(repr(key), _mark(item, held)) for key, item in value.items()])
    if isinstance(value, list | tuple | deque):
        return (type(value).__name__, len(value), [_mark(item, held) for item in value])
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, _Opaque | _Long):
        return value.mark()
    if is_stateful(value):
        try:
            return ("state", _mark(value.state_dict(), held))
        except Exception as exc:  # noqa: BLE001  # the user's code, at a time when nobody calls it
            return ("state", type(exc).__qualname__)
    return ("other", type(value).__qualname__)


def _some_items(value: Any) -> Iterable[Any]:
    """Of a long container, few enough to be looked at each time: its ends, and some between."""
    if not isinstance(value, list | deque):
        items = value.values() if isinstance(value, dict) else value
        return itertools.islice(items, 64)
    stride = max(1, len(value) // 64)
    return [*itertools.islice(value, 0, None, stride), *itertools.islice(reversed(value), 16)]


def _crc(value: np.ndarray[Any, Any]) -> str:
    if value.nbytes <= 1 << 20:
        return f"{zlib.crc32(np.ascontiguousarray(value).tobytes()):08x}"
    flat = value.reshape(-1)
    some = flat[:: max(1, flat.size * flat.itemsize // SAMPLE_BYTES)]
    return f"{zlib.crc32(np.ascontiguousarray(some).tobytes()):08x}"


def _mark_of_bytes(value: torch.Tensor) -> str:
    plain = value.detach().cpu().contiguous().reshape(-1)
    return f"{zlib.crc32(plain.view(torch.uint8).numpy().tobytes()):08x}" if plain.numel() else "empty"


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


def _names_in(code: types.CodeType) -> set[str]:
    """The global names that a piece of code and those inside of it mention."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # globals()["name"], getattr(module, "name")
            names.add(constant)
    return names


def _names_set_in(code: types.CodeType) -> frozenset[str]:
    """The attributes that a piece of code and those inside of it set, of whatever."""
    inner = [_names_set_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(_attributes_set(code)).union(*inner)


@functools.lru_cache(maxsize=4096)
def _attributes_set(code: types.CodeType) -> tuple[str, ...]:
    return tuple(str(one.argval) for one in dis.get_instructions(code) if one.opname in ("STORE_ATTR", "DELETE_ATTR"))


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


def _function_name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
