"""Calls that make a model distributed."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from dtctl.lint import names
from dtctl.lint.flow import find_value_origins
from dtctl.lint.source_file import SourceFile, find_argument, format_dotted_name

Kind = Literal["ddp", "fsdp", "fully_shard"]
_KINDS: dict[str, Kind] = {names.DDP: "ddp", names.FSDP: "fsdp", names.FULLY_SHARD: "fully_shard"}


@dataclass(frozen=True, slots=True)
class ModelWrap:
    """Call that wraps a model."""

    kind: Kind
    call: ast.Call
    source: str | None
    """Name of the wrapped model; None for another expression."""
    target: str | None
    """Name of the result; None if the result is not assigned."""


def find_call_wrap(module: SourceFile, call: ast.Call) -> ModelWrap | None:
    """Return the wrap for a call; None if the call wraps nothing."""
    kind = _KINDS.get(module.name(call.func) or "")
    if kind is None:
        return None
    inner = find_argument(call, "module", 0)
    source = format_dotted_name(inner) if inner is not None else None
    above = module.parents.get(call)
    target = format_dotted_name(above.targets[0]) if isinstance(above, ast.Assign) and len(above.targets) == 1 else None
    return ModelWrap(kind, call, source, source if kind == "fully_shard" and target is None else target)


def list_model_wraps(module: SourceFile) -> list[ModelWrap]:
    """Return all wraps of a file, in the order of the file."""
    candidates = [find_call_wrap(module, call) for call in module.calls_of(*_KINDS)]
    return [wrap for wrap in candidates if wrap is not None]


def find_model_wrap(module: SourceFile, node: ast.expr, at: ast.AST) -> ModelWrap | None:
    """Return the wrap that a name certainly holds at a place; None without one, or if it is uncertain."""
    name = format_dotted_name(node)
    if name is None:
        return None
    if not name.startswith("self."):
        binding = module.find_current_binding(node, at)
        return find_call_wrap(module, binding.value) if binding and isinstance(binding.value, ast.Call) else None
    bound = module.lookup(node)
    if not bound or not isinstance(bound[-1].value, ast.Call):
        return None
    wrap = find_call_wrap(module, bound[-1].value)
    if wrap is None or any(isinstance(parent, ast.If | ast.Try) for parent, _ in module.chain(wrap.call)):
        return None
    first = module.scope(wrap.call)
    later = module.scope(at) is not first or getattr(at, "lineno", 0) > wrap.call.lineno
    return wrap if later and getattr(first, "name", "") == "__init__" else None


def model_kinds(module: SourceFile, node: ast.expr) -> set[Kind | None]:
    """Return the kinds of wrappers of a model, one for every possible origin; None stands for an unwrapped one.

    The model is followed through helper functions, arguments and attributes. `fully_shard(model)` wraps its argument.
    """
    fact = ("model", node)
    cached = module.facts.get(fact)
    if cached is None:
        module.facts[fact] = set()
        cached = module.facts[fact] = _model_kinds(module, node)
    return cached  # type: ignore[return-value]  # facts of this kind are sets of this type


def _model_kinds(module: SourceFile, node: ast.expr) -> set[Kind | None]:
    kinds: set[Kind | None] = set()
    for value in find_value_origins(module, node):
        if isinstance(value.node, ast.Constant):
            continue
        whole = value.node if value.item is None else None
        wrap = find_call_wrap(value.module, whole) if isinstance(whole, ast.Call) else None
        kinds.add(wrap.kind if wrap is not None else None)
    if None in kinds and _sharded_in_place(module, node):
        kinds.add("fully_shard")
    return kinds


def _sharded_in_place(module: SourceFile, node: ast.expr) -> bool:
    """Return whether fully_shard, or a project function that calls it on its parameter, gets a name as argument."""
    name = format_dotted_name(node)
    return name is not None and any(
        wrap.kind == "fully_shard" and wrap.source == name and module.scope(wrap.call) is module.scope(node)
        for wrap in list_model_wraps(module)
    )


def can_be_wrapped(module: SourceFile, node: ast.expr, *kinds: Kind) -> bool:
    """Return whether a model has one of these wrappers for some of its origins."""
    return bool(model_kinds(module, node) & set(kinds))
