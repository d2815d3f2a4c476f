"""Places where a model becomes a distributed one."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from dtctl.lint import names
from dtctl.lint.flow import origins
from dtctl.lint.source_file import SourceFile, key

Kind = Literal["ddp", "fsdp", "fully_shard"]
_KINDS: dict[str, Kind] = {names.DDP: "ddp", names.FSDP: "fsdp", names.FULLY_SHARD: "fully_shard"}


@dataclass(frozen=True, slots=True)
class Wrap:
    """One call that wraps a model."""

    kind: Kind
    call: ast.Call
    source: str | None
    """Name of what is wrapped; None for an expression."""
    target: str | None
    """Name of the result; None when it goes elsewhere."""


def wrap_of(module: SourceFile, call: ast.Call) -> Wrap | None:
    """Return the wrap that a call is; None if it is none."""
    kind = _KINDS.get(module.name(call.func) or "")
    if kind is None:
        return None
    inner = (
        call.args[0]
        if call.args
        else next((argument.value for argument in call.keywords if argument.arg == "module"), None)
    )
    source = key(inner) if inner is not None else None
    above = module.parents.get(call)
    target = key(above.targets[0]) if isinstance(above, ast.Assign) and len(above.targets) == 1 else None
    return Wrap(kind, call, source, source if kind == "fully_shard" and target is None else target)


def wraps(module: SourceFile) -> list[Wrap]:
    """Return all wraps of a file, in its order."""
    candidates = [wrap_of(module, call) for call in module.calls_of(*_KINDS)]
    return [wrap for wrap in candidates if wrap is not None]


def wrapped(module: SourceFile, node: ast.expr, at: ast.AST) -> Wrap | None:
    """Return the wrap that a name surely stands for at a place; None if there is none, or it is uncertain."""
    name = key(node)
    if name is None:
        return None
    if not name.startswith("self."):
        binding = module.current(node, at)
        return wrap_of(module, binding.value) if binding and isinstance(binding.value, ast.Call) else None
    bound = module.lookup(node)
    if not bound or not isinstance(bound[-1].value, ast.Call):
        return None
    wrap = wrap_of(module, bound[-1].value)
    if wrap is None or any(isinstance(parent, ast.If | ast.Try) for parent, _ in module.chain(wrap.call)):
        return None
    first = module.scope(wrap.call)
    later = module.scope(at) is not first or getattr(at, "lineno", 0) > wrap.call.lineno
    return wrap if later and getattr(first, "name", "") == "__init__" else None


def model_kinds(module: SourceFile, node: ast.expr) -> set[Kind | None]:
    """Return the kinds of wrappers of a model: one for every place that it may come from, None for an unwrapped one.

    Followed through helper functions, arguments and attributes. `fully_shard(model)` wraps what it is given.
    """
    fact = ("model", node)
    cached = module.facts.get(fact)
    if cached is None:
        module.facts[fact] = set()
        cached = module.facts[fact] = _model_kinds(module, node)
    return cached  # type: ignore[return-value]  # facts of this kind are such sets


def _model_kinds(module: SourceFile, node: ast.expr) -> set[Kind | None]:
    kinds: set[Kind | None] = set()
    for value in origins(module, node):
        if isinstance(value.node, ast.Constant):
            continue
        wrap = wrap_of(value.module, value.node) if isinstance(value.node, ast.Call) and value.item is None else None
        kinds.add(wrap.kind if wrap is not None else None)
    if None in kinds and _sharded_in_place(module, node):
        kinds.add("fully_shard")
    return kinds


def _sharded_in_place(module: SourceFile, node: ast.expr) -> bool:
    """Return whether fully_shard, or a function of the project that calls it on its parameter, gets a name there."""
    name = key(node)
    return name is not None and any(
        wrap.kind == "fully_shard" and wrap.source == name and module.scope(wrap.call) is module.scope(node)
        for wrap in wraps(module)
    )


def maybe(module: SourceFile, node: ast.expr, *kinds: Kind) -> bool:
    """Return whether a model is wrapped as one of these in some way that leads here."""
    return bool(model_kinds(module, node) & set(kinds))
