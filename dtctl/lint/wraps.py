"""Where a model becomes a distributed one."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from dtctl.lint import names
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
    """The wrap that a call is; None if it is none."""
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
    """All wraps of a file, in its order."""
    candidates = [wrap_of(module, call) for call in module.calls_of(*_KINDS)]
    return [wrap for wrap in candidates if wrap is not None]


def wrapped(module: SourceFile, node: ast.expr, at: ast.AST) -> Wrap | None:
    """The wrap that a name surely stands for at a place; None if it does not, or nobody can tell."""
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
