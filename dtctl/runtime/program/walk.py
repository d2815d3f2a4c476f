"""What one pass over the objects of a program keeps: what was reached, by which path, and where it cannot look."""

from __future__ import annotations

import contextlib
import functools
import pickle
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import nn

from dtctl.runtime.program.code import is_own_code
from dtctl.runtime.program.kinds import CONTAINERS, FUNCTIONS, PLAIN, is_value, tensors_in
from dtctl.runtime.program.marks import Opaque
from dtctl.runtime.program.members import PYTHONS, is_of_class, members_of
from dtctl.runtime.program.stateful import state_of

MAX_LEAVES: Final = 50_000
"""Things that are looked at; a program that has more keeps data there, not state."""

MAX_DEPTH: Final = 12


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


class Walk:
    """One pass over all that is reached; what is below a value of each kind, subclasses know.

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
        self._plain: dict[type, dict[str, Any]] = {}
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
        """Everything below a value that was not seen before."""
        raise NotImplementedError

    def _attributes(
        self, held: Mapping[str, Any], path: str, put: Callable[[str, Any], None], depth: int, *, quiet: bool = False
    ) -> None:
        """Below each attribute; `quiet`: private ones are no circumstance."""
        self.owners[path] = put
        for name, value in list(held.items()):
            if name not in PYTHONS:
                with self._describing(self._describe is not None and not (quiet and name.startswith("_"))):
                    self.visit(value, f"{path}.{name}", functools.partial(put, name), depth + 1)

    def _below_members(self, value: Any, path: str, depth: int, *, quiet: bool = False) -> None:
        """Attributes of an object and of its classes."""
        self._attributes(members_of(value), path, functools.partial(set_attribute, value), depth, quiet=quiet)
        self._class_attributes(value, path, depth)

    def _class_attributes(self, value: Any, path: str, depth: int) -> None:
        for kind in type(value).__mro__:
            if not is_own_code(kind.__module__):
                if kind not in self._plain:
                    self._plain[kind] = {
                        name: held
                        for name, held in vars(kind).items()
                        if not name.startswith("_") and isinstance(held, int | float | str)
                    }
                self._attributes(
                    self._plain[kind], f"{path}.<{kind.__name__}>", functools.partial(setattr, kind), depth
                )
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

    def _public(self, value: Any, path: str, depth: int) -> None:
        """Attributes that the user has given a tensor or a function."""
        own = {name: held for name, held in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
        self._attributes(own, path, functools.partial(setattr, value), depth)

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


def refuse(_value: Any) -> None:
    """In the place of what would put a value somewhere."""
    raise TypeError("nothing can be put here")


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """In the form that `functools.partial` takes."""
    setattr(owner, name, value)
