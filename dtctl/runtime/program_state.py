"""State that a program keeps outside of parameters and persistent buffers: where it is, whether it changed, and back.

A module counts its calls in an attribute, a loss function keeps a queue in its closure, an augmentation has a generator
of its own. Who resumes without them trains on with other bits. So before training everything is listed that the model,
the loss function, the learning rate and the optimizer can reach, with a mark of what it was then; a snapshot takes what
has changed since, and a resume puts it back. What it was before training is part of the circumstances: a dropout of
another probability is another training.

What is reached: attributes, elements of containers, closures, defaults and global variables that functions name, as
far as they belong to the user's own code. What is there and of no known kind (an open file, an object of an extension)
is not looked into.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import sys
import sysconfig
import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

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

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
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


class ProgramState:
    """What is reached from some roots, and what it was when this was made.

    Attributes:
        plain: path -> value, as text, of plain values and classes, as they were.
    """

    def __init__(self, roots: Mapping[str, Any], *, model: nn.Module, apart: Iterable[object] = ()) -> None:
        """Look at everything.

        Args:
            roots: name -> object, such as `{"model": model, "loss": loss}`.
            model: its parameters and persistent buffers are in snapshots anyway.
            apart: objects that somebody else takes care of.
        """
        self._roots, self._model, self._apart = dict(roots), model, list(apart)
        self.plain: dict[str, str] = {}
        self._held: list[torch.Tensor] = []
        """Tensors that were there: as long as they live, no other one has their address."""
        self._marks = {path: _mark(leaf.value, self._held) for path, leaf in self._leaves(describe=self.plain)}

    def changed(self) -> tuple[dict[str, Any], list[str]]:
        """What is another than at first.

        Returns:
            By path what it is now, encoded, with tensors that are not copied; and the paths of what has changed to
            something that snapshots do not keep.
        """
        kept: dict[str, Any] = {}
        lost: list[str] = []
        for path, leaf in self._leaves():
            if _mark(leaf.value) != self._marks.get(path, _MISSING):
                try:
                    kept[path] = with_devices(encode(content(leaf.value), path))
                except NotEncodable:
                    lost.append(path)
        return kept, lost

    def hold(self) -> dict[str, Any]:
        """A copy of everything, for `load`, before something runs that is not to leave a trace."""
        found: dict[str, Any] = {}
        for path, leaf in self._leaves():
            with contextlib.suppress(NotEncodable):
                found[path] = copy.deepcopy(encode(content(leaf.value), path))
        return found

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Put back what `changed` returned.

        Returns:
            What could not be put back, a phrase each.
        """
        left = dict(state)
        failed = []
        # Twice: what is put back first may be where something else belongs, such as an entry of a dict.
        for _ in range(2):
            for path, leaf in list(self._leaves()):
                if path in left and not _put(leaf, decode(left.pop(path))):
                    failed.append(path)
        owners = self._owners()
        for path in list(left):  # attributes that training has made
            owner, _, name = path.rpartition(".")
            if owner in owners:
                owners[owner](name, decode(left.pop(path)))
        found = [f"{some_of(left)} changed in training, and there is no place for it now"] if left else []
        return found + ([f"{some_of(failed)} changed in training, and cannot be set"] if failed else [])

    # -- the walk ---------------------------------------------------------------------------------------------------

    def _leaves(self, describe: dict[str, str] | None = None) -> Iterator[tuple[str, _Leaf]]:
        return self._walked(_Walk(self._model, describe, self._apart))

    def iterators(self) -> list[str]:
        """Paths of iterators, whose position cannot be kept."""
        walk = _Walk(self._model, None, self._apart)
        for _ in self._walked(walk):
            pass
        return walk.iterators

    def _owners(self) -> dict[str, Callable[[str, Any], None]]:
        walk = _Walk(self._model, None, self._apart)
        for _ in self._walked(walk):
            pass
        return walk.owners

    def _walked(self, walk: _Walk) -> Iterator[tuple[str, _Leaf]]:
        for name, root in self._roots.items():
            yield from walk.visit(root, name, lambda _: None, 0)


def some_of(paths: Iterable[str], count: int = 4) -> str:
    """The first of some paths, and how many more there are."""
    every = list(paths)
    return ", ".join(every[:count]) + (f" and {len(every) - count} more" if len(every) > count else "")


def _put(leaf: _Leaf, value: Any) -> bool:
    """Give a leaf a value; whether that was possible."""
    held = leaf.value
    if isinstance(held, _PLAIN) and _mark(held) == _mark(value):  # also where it cannot be set (a frozen dataclass)
        return True
    if put_into(held, value):
        return True
    try:
        leaf.put(value.to(held.device) if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) else value)
    except (AttributeError, TypeError):
        return False
    return True


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


def put_into(held: Any, value: Any) -> bool:
    """Give an object the state that `content` had of it; whether that is possible in place."""
    if isinstance(held, torch.Tensor):
        fits = isinstance(value, torch.Tensor) and held.shape == value.shape and held.dtype == value.dtype
        if fits:
            with torch.no_grad():
                held.copy_(value)
        return fits
    if isinstance(held, np.ndarray):
        fits = isinstance(value, np.ndarray) and held.shape == value.shape and held.dtype == value.dtype
        if fits:
            held[...] = value
        return fits
    if is_generator(held):
        set_generator_state(held, value)
    elif isinstance(held, list | deque) and isinstance(value, list | deque):
        held.clear()
        held.extend(value)
    elif isinstance(held, dict | set) and isinstance(value, dict | set):
        held.clear()
        held.update(value)
    elif is_stateful(held):
        held.load_state_dict(value)
    else:
        return False
    return True


class _Walk:
    """One pass over all that is reached."""

    def __init__(self, model: nn.Module, describe: dict[str, str] | None, apart: Iterable[object]) -> None:
        state = model.state_dict(keep_vars=True)
        self._known = {id(value) for value in state.values()} | {id(value) for value in model.parameters()}
        self._seen: set[int] = set()
        self._kept: list[object] = []  # so that no number in `_seen` is given to another object
        self._count = 0
        self._describe = describe
        self.iterators: list[str] = []
        """Paths of what has a position that nobody can ask for."""
        self.owners: dict[str, Callable[[str, Any], None]] = {}
        """Path of what has attributes -> how to set one."""
        for value in apart:
            self._first_time(value)
            if isinstance(value, nn.Module):
                for part in (*value.modules(), *value.parameters(), *value.buffers()):
                    self._first_time(part)

    def _first_time(self, value: object) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def visit(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> Iterator[tuple[str, _Leaf]]:
        """Everything below a value."""
        self._count += 1
        if depth > MAX_DEPTH or self._count > MAX_LEAVES:
            return
        if isinstance(value, _PLAIN):
            if not (isinstance(value, str) and "/" in value):  # a path may be another on each node and in each run
                self._note(path, lambda: repr(value)[:200])
            yield path, _Leaf(value, put)
        elif id(value) not in self._known and self._first_time(value):
            if isinstance(value, torch.Tensor | np.ndarray) or is_generator(value):
                yield from self._numbers(value, path, put)
            elif isinstance(value, _CONTAINERS):
                yield from self._container(value, path, put, depth)
            else:
                yield from self._inside(value, path, put, depth)

    def _note(self, path: str, text: Callable[[], str]) -> None:
        if self._describe is not None:
            self._describe[path] = text()

    @contextlib.contextmanager
    def _describing(self, wanted: bool) -> Iterator[None]:
        kept = self._describe
        self._describe = kept if wanted else None
        yield
        self._describe = kept

    def _numbers(self, value: Any, path: str, put: Callable[[Any], None]) -> Iterator[tuple[str, _Leaf]]:
        if isinstance(value, torch.Tensor):
            if hasattr(value, "device_mesh"):
                return
            if value.numel() * value.element_size() <= SAMPLE_BYTES and value.layout is torch.strided:
                self._note(path, lambda: f"{tuple(value.shape)} {_mark_of_bytes(value)}")
        elif isinstance(value, np.ndarray):
            if value.dtype.kind not in "biufc":
                return
            if value.nbytes <= SAMPLE_BYTES:
                self._note(path, lambda: f"{value.shape} {_crc(value)}")
        yield path, _Leaf(value, put)

    def _inside(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> Iterator[tuple[str, _Leaf]]:
        if isinstance(value, nn.Module):
            yield from self._module(value, path, depth)
        elif isinstance(value, torch.optim.Optimizer):
            yield from self._optimizer(value, path, put, depth)
        elif isinstance(value, _FUNCTIONS):
            yield from self._function(value, path, depth)
        elif isinstance(value, type):
            if is_own_code(value.__module__):
                yield from self._attributes(vars(value), path, functools.partial(setattr, value), depth)
        elif (
            isinstance(value, types.ModuleType | torch.utils.data.Dataset)
            or type(value).__module__.partition(".")[0] == "dtctl"
        ):
            return
        elif isinstance(value, Iterator) and _is_advanced_by_use(value):
            self.iterators.append(path)
        elif is_stateful(value):
            yield path, _Leaf(value, put)
            for name, inner in inner_state(value).items():
                yield from self.visit(inner, f"{path}.{name}", lambda _: None, depth + 1)
        elif is_own_code(type(value).__module__):
            self._note(f"{path} (class)", lambda: type(value).__qualname__)
            yield from self._object(value, path, depth)

    def _container(self, value: Any, path: str, put: Callable[[Any], None], depth: int) -> Iterator[tuple[str, _Leaf]]:
        if len(value) > MAX_ELEMENTS:
            return
        if _is_value(value, self._known):
            # As a whole, since it may grow or be replaced. What is empty now may come to have anything, such as paths.
            if value and _is_value(value, self._known, plain=True):
                self._note(path, lambda: repr(value)[:200])
            yield path, _Leaf(value, put)
        elif isinstance(value, dict):
            for key in list(value):
                yield from self.visit(
                    value[key], f"{path}[{key!r}]", functools.partial(value.__setitem__, key), depth + 1
                )
        elif isinstance(value, list):
            for index, item in enumerate(list(value)):
                yield from self.visit(item, f"{path}[{index}]", functools.partial(value.__setitem__, index), depth + 1)
        elif isinstance(value, tuple | deque):
            for index, item in enumerate(list(value)):
                yield from self.visit(item, f"{path}[{index}]", lambda _: None, depth + 1)

    def _module(self, module: nn.Module, path: str, depth: int) -> Iterator[tuple[str, _Leaf]]:
        self._note(f"{path} (class)", lambda: class_name(module))
        yield f"{path}.training", _Leaf(module.training, functools.partial(_set_attribute, module, "training"))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if not parameter.requires_grad:
                    self._note(f"{path}.{name} (frozen)", lambda: "frozen")
                put = functools.partial(_set_attribute, parameter, "requires_grad")
                yield f"{path}.{name}.requires_grad", _Leaf(parameter.requires_grad, put)
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    put = functools.partial(table.__setitem__, name)
                    yield from self.visit(tensor, f"{path}.{name}", put, depth + 1)
        yield from self._hooks(module, path, depth)
        own = {name: value for name, value in vars(module).items() if name not in _MODULE_KEYS}
        yield from self._attributes(own, path, functools.partial(_set_attribute, module), depth)
        yield from self._class_attributes(module, path, depth)
        for name, child in module._modules.items():
            if child is not None and self._first_time(child):
                yield from self._module(child, f"{path}.{name}", depth)

    def _hooks(self, module: nn.Module, path: str, depth: int) -> Iterator[tuple[str, _Leaf]]:
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
            yield from self.visit(hook, f"{path}.hook{number}", lambda _: None, depth + 1)

    def _optimizer(
        self, optimizer: torch.optim.Optimizer, path: str, put: Callable[[Any], None], depth: int
    ) -> Iterator[tuple[str, _Leaf]]:
        own = {name: value for name, value in vars(optimizer).items() if name not in _OPTIMIZER_KEYS}
        if path != OPTIMIZER:  # one that something else has; that of the training has a part of its own in snapshots
            yield path, _Leaf(optimizer, put)
        else:
            self._note(f"{path} (class)", lambda: class_name(optimizer))
        # A step function that torch has wrapped for its profiler, or a scheduler to count, is none of the user's.
        own = {name: value for name, value in own.items() if not isinstance(value, _FUNCTIONS)}
        yield from self._attributes(own, path, functools.partial(_set_attribute, optimizer), depth)

    def _object(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, _Leaf]]:
        if hasattr(value, "__dict__"):
            yield from self._attributes(dict(vars(value)), path, functools.partial(_set_attribute, value), depth)
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        yield from self._attributes(held, path, functools.partial(_set_attribute, value), depth)
        yield from self._class_attributes(value, path, depth)

    def _class_attributes(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, _Leaf]]:
        for kind in type(value).__mro__:
            if is_own_code(kind.__module__) and self._first_time(kind):
                own = {
                    name: held
                    for name, held in vars(kind).items()
                    if not name.startswith("__") and isinstance(held, (*_PLAIN, *_CONTAINERS, torch.Tensor))
                }
                yield from self._attributes(own, f"{path}.<{kind.__name__}>", functools.partial(setattr, kind), depth)
                for name, held in vars(kind).items():
                    function = held.__func__ if isinstance(held, staticmethod | classmethod) else held
                    if isinstance(function, types.FunctionType):
                        yield from self.visit(function, f"{path}.{name}", lambda _: None, depth + 1)

    def _attributes(
        self, held: Mapping[str, Any], path: str, put: Callable[[str, Any], None], depth: int
    ) -> Iterator[tuple[str, _Leaf]]:
        self.owners[path] = put
        for name, value in list(held.items()):
            if not name.startswith("__"):
                yield from self.visit(value, f"{path}.{name}", functools.partial(put, name), depth + 1)

    def _function(self, function: Any, path: str, depth: int) -> Iterator[tuple[str, _Leaf]]:
        if isinstance(function, functools.partial):
            yield from self.visit(function.func, path, lambda _: None, depth + 1)
            for index, item in enumerate(function.args):
                yield from self.visit(item, f"{path}({index})", lambda _: None, depth + 1)
            for name, item in function.keywords.items():
                put = functools.partial(function.keywords.__setitem__, name)
                yield from self.visit(item, f"{path}({name})", put, depth + 1)
            return
        if isinstance(function, types.MethodType):
            yield from self.visit(function.__self__, path, lambda _: None, depth + 1)
            function = function.__func__
        if not isinstance(function, types.FunctionType) or not is_own_code(function.__module__ or ""):
            return
        self._note(f"{path} (code)", lambda: code_digest(function.__code__))
        # What has no say in what a function computes is state that is kept, and no circumstance.
        idle = idle_names(function) if self._describe is not None else frozenset()
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            with self._describing(name not in idle):
                put = functools.partial(setattr, cell, "cell_contents")
                yield from self.visit(held, f"{path}.{name}", put, depth + 1)
        for index, default in enumerate(function.__defaults__ or ()):
            yield from self.visit(default, f"{path}.default{index}", lambda _: None, depth + 1)
        for name, default in (function.__kwdefaults__ or {}).items():
            yield from self.visit(default, f"{path}.{name}", lambda _: None, depth + 1)
        module = function.__globals__
        self.owners[module_name(function.__module__)] = module.__setitem__
        for name in sorted(_names_in(function.__code__)):
            held = module.get(name, _MISSING)
            if held is _MISSING or name.startswith("__"):
                continue
            label = f"{module_name(function.__module__)}.{name}"
            with self._describing(name not in idle):
                yield from self.visit(held, label, functools.partial(module.__setitem__, name), depth + 1)


def _is_advanced_by_use(value: object) -> bool:
    """Whether an iterator is one that has a position, rather than an open file."""
    return not isinstance(value, io.IOBase)


def _is_value(value: Any, known: AbstractSet[int], *, plain: bool = False) -> bool:
    """Whether a container has numbers, text and tensors alone, none of which is in snapshots anyway.

    Args:
        value: a container.
        known: identities of tensors that are in snapshots.
        plain: whether tensors do not count as such.
    """
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for item in items:
        if isinstance(item, _CONTAINERS):
            fits = len(item) <= MAX_ELEMENTS and _is_value(item, known, plain=plain)
        elif isinstance(item, torch.Tensor):
            fits = not plain and id(item) not in known and not hasattr(item, "device_mesh")
        else:
            fits = isinstance(item, _PLAIN) or (not plain and isinstance(item, np.ndarray))
        if not fits:
            return False
    return True


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def content(value: Any) -> Any:
    """What is kept of a value: of what has a state, its state."""
    if is_generator(value):
        return decode(generator_state(value))
    if is_stateful(value):
        return value.state_dict()
    return value


def _mark(value: Any, held: list[torch.Tensor] | None = None) -> Any:
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
    if isinstance(value, Mapping):
        return ("mapping", [(repr(key), _mark(item, held)) for key, item in value.items()])
    if isinstance(value, list | tuple | deque):
        return (type(value).__name__, [_mark(item, held) for item in value])
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    if is_stateful(value):
        try:
            return ("state", _mark(value.state_dict(), held))
        except Exception as exc:  # noqa: BLE001  # the user's code, at a time when nobody calls it
            return ("state", type(exc).__qualname__)
    return ("other", repr(value) if isinstance(value, set | frozenset) else type(value).__qualname__)


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
    return names


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
