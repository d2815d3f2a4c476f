"""State that a program keeps outside of parameters and persistent buffers: where it is, whether it changed, and back.

A module counts its calls in an attribute, a loss function keeps a queue in its closure, an augmentation has a generator
of its own. Who resumes without them trains on with other bits. So before training everything is listed that the model,
the loss function, the learning rate and the optimizer can reach (graph.py), with a mark of what it was then (marks.py);
a snapshot takes what has changed since, and a resume puts it back (stateful.py). What it was before training is part of
the circumstances: a dropout of another probability is another training.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dtctl.runtime.program.functions import MISSING
from dtctl.runtime.program.graph import ObjectWalk
from dtctl.runtime.program.kinds import PLAIN, has_storage
from dtctl.runtime.program.marks import has_grown, is_large, mark_of
from dtctl.runtime.program.stateful import content, is_tagged, put_into
from dtctl.runtime.program.walk import MAX_LEAVES, StateEntry, refuse
from dtctl.runtime.snapshot.format.encoding import (
    NotEncodable,
    decode,
    encode,
    is_generator,
    with_devices,
)


def some_of(paths: Iterable[str], count: int = 4) -> str:
    """The first of some paths, and how many more there are."""
    every = list(paths)
    return ", ".join(every[:count]) + (f" and {len(every) - count} more" if len(every) > count else "")


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
        self._marks = {path: mark_of(leaf.value, self._held) for path, leaf in walk.leaves.items()}
        self._lasting = {path for path, leaf in walk.leaves.items() if not leaf.cache and not leaf.trusted}
        self._aliases = walk.aliases
        self.blind = walk.blind

    def _walk(self, describe: dict[str, str] | None = None) -> ObjectWalk:
        walk = ObjectWalk(self._model, describe, self._apart, self._caches)
        for name, root in self._roots.items():
            walk.visit(root, name, refuse, 0)
        for name, value in self._declared.items():
            walk.declared(value, name)
        return walk

    def changed(self) -> tuple[dict[str, Any], list[str]]:
        """What is another than at first.

        Returns:
            By path what it is now, encoded, with tensors that are not copied; and the paths of what has changed to
            something that snapshots do not keep.
        """
        changed_values: dict[str, Any] = {}
        walk = self._walk()
        lost = [path for path, other in walk.aliases.items() if self._aliases.get(path) != other]
        for path, leaf in walk.leaves.items():
            mark, before = mark_of(leaf.value), self._marks.get(path, MISSING)
            if mark == before or (leaf.cache and has_grown(before, mark)):
                continue
            try:
                changed_values[path] = with_devices(encode(content(leaf.value), path))
            except NotEncodable:
                lost += [] if leaf.trusted else [path]
        if len(walk.leaves) < MAX_LEAVES:
            present = walk.leaves.keys() | walk.aliases.keys() | walk.parts.keys()
            lost += sorted(path for path in self._lasting - present if not _is_within(path, changed_values))
        # Put back as a whole, a container gets new parts, and who else has one of the old ones keeps that.
        lost += [path for path, home in walk.parts.items() if home in changed_values]
        return changed_values, lost

    def undo(self, held: Mapping[str, Any]) -> None:
        """Put back what has changed since `hold`, and before anything was trained."""
        changed, _ = self.changed()
        if changed:
            self.load({path: held[path] for path in changed if path in held})

    def hold(self, *, large: bool = True) -> dict[str, Any]:
        """A copy of everything, for `load`, before something runs that is not to leave a trace.

        Args:
            large: with large tensors, arrays and containers.
        """
        held: dict[str, Any] = {}
        for path, leaf in self._walk().leaves.items():
            if not large and is_large(leaf.value):
                continue
            with contextlib.suppress(NotEncodable):
                held[path] = copy.deepcopy(_detached(with_devices(encode(content(leaf.value), path))))
        return held

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Put back what `changed` returned.

        Returns:
            What could not be put back, a phrase each.
        """
        left, failed = dict(state), list[str]()
        model = {
            tensor.untyped_storage().data_ptr() for tensor in self._model.state_dict().values() if has_storage(tensor)
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
            if fits and not is_tagged(value):
                owners[owner](name, value)
                del left[path]
        phrases = [f"{some_of(left)} changed in training, and there is no place for it now"] if left else []
        return phrases + ([f"{some_of(failed)} changed in training, and cannot be set"] if failed else [])


def _detached(tree: Any) -> Any:
    """The same without the graphs of tensors that were computed, such as the weight that weight_norm makes."""
    return tree_map_only(torch.Tensor, lambda value: value if value.is_leaf else value.detach(), tree)


def _is_within(path: str, paths: Mapping[str, Any]) -> bool:
    """Whether something that holds a path is kept as a whole."""
    return any(path[:end] in paths for end, sign in enumerate(path) if sign in ".[(")


def _put(leaf: StateEntry, value: Any, model: AbstractSet[int]) -> bool:
    """Give a leaf a value; whether that was possible.

    Args:
        leaf: of this process.
        value: decoded.
        model: addresses of what the model's state lies in, which must not be written to by another name.
    """
    held = leaf.value
    if isinstance(held, PLAIN) and mark_of(held) == mark_of(value):  # also where it cannot be set (a frozen dataclass)
        return True
    shared = has_storage(held) and held.untyped_storage().data_ptr() in model
    if shared and isinstance(value, torch.Tensor) and held.shape == value.shape and torch.equal(held, value):
        return True  # a view of the model's numbers, which are back already
    if not shared and not leaf.copied and put_into(held, value):
        return True
    if is_tagged(value) or is_generator(held):
        return False
    try:
        leaf.put(value.to(held.device) if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) else value)
    except (AttributeError, TypeError):
        return False
    return True
