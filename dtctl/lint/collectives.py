"""Calls in which every rank must take part, through the functions of a project."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from dtctl.lint import names
from dtctl.lint.flow import find_call_argument, find_called_function, is_bound_method
from dtctl.lint.ranks import list_rank_guards
from dtctl.lint.source_file import Definition, Function, SourceFile, find_keyword_value, format_dotted_name
from dtctl.lint.wraps import Kind, model_kinds

_DEPTH = 5
_MOST = {"barrier": 0, "all_reduce": 2, "broadcast": 2, "all_gather": 2, "reduce": 3, "gather": 3, "scatter": 3}


def takes_a_group(name: str, call: ast.Call) -> bool:
    """Return whether a collective has a group, which may have fewer than all ranks."""
    if any(argument.arg in ("group", "process_group") for argument in call.keywords):
        group = find_keyword_value(call, "group") or find_keyword_value(call, "process_group")
        return not (isinstance(group, ast.Constant) and group.value is None)
    return len(call.args) > _MOST.get(name.rpartition(".")[2], 3)


def find_collective(module: SourceFile, function: ast.AST, depth: int = _DEPTH) -> str | None:
    """Return the collective that a function always calls, on every rank; None if there is none."""
    fact = ("collective", function)
    if fact not in module.facts:
        module.facts[fact] = None  # for functions that call each other
        module.facts[fact] = _find_uncached_collective(module, function, depth)
    return module.facts[fact]  # type: ignore[return-value]  # facts of this kind have this type


def collective_called(module: SourceFile, call: ast.Call, depth: int = _DEPTH) -> str | None:
    """Return the collective that a call of a project function runs; None if there is none, or it is not known."""
    target = _find_called_function(module, call)
    return find_collective(target.module, target.node, depth) if target is not None else None


def _find_called_function(module: SourceFile, call: ast.Call) -> Definition | None:
    target = find_called_function(module, call)
    if target is None or not isinstance(target.node, Function):
        return None
    generator = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in _own_nodes(target.node))
    return None if generator else target


def _own_nodes(function: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            stack += ast.iter_child_nodes(node)
    return found


def _find_uncached_collective(module: SourceFile, function: ast.AST, depth: int) -> str | None:
    calls = [node for node in _own_nodes(function) if isinstance(node, ast.Call)]
    left = _left_before(function)
    calls = [call for call in calls if call.lineno < left and not _if_wanted(module, call, function)]
    for call in calls:
        name = module.name(call.func) or ""
        if name in names.COLLECTIVES and not takes_a_group(name, call) and not _is_called_by_some(module, call, calls):
            return name.rpartition(".")[2]
        if _of_mpi(module, call) and not _is_called_by_some(module, call, calls):
            return f"MPI's {ast.unparse(call.func).rpartition('.')[2]}"
    for call in calls if depth else ():
        if not _is_called_by_some(module, call):
            below = collective_called(module, call, depth - 1)
            if below is not None:
                return below
    return None


def _of_mpi(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a call is a collective of mpi4py's world."""
    name = module.name(call.func) or ""
    return name.startswith("mpi4py.MPI.COMM_WORLD.") and name.rpartition(".")[2].lower() in (
        "bcast", "barrier", "allreduce", "allgather", "gather", "scatter", "reduce", "alltoall",
    )  # fmt: skip


def find_forward_kind(module: SourceFile, call: ast.Call, depth: int = 3) -> tuple[Kind, bool] | None:
    """Return the kind of wrapped model whose forward pass a call runs, directly or in a project function.

    Returns:
        (kind of wrapper, True if the model is certainly wrapped); None if the call runs no forward pass.
    """
    if isinstance(call.func, ast.Name | ast.Attribute):
        kinds = model_kinds(module, call.func) if find_called_function(module, call) is None else set()
        for kind in ("fsdp", "fully_shard", "ddp"):
            if kind in kinds:
                return kind, kinds == {kind}
    target = _find_called_function(module, call)
    if target is None or not depth:
        return None
    for model in _models_run(target.module, target.node, depth - 1):
        root = model.id if isinstance(model, ast.Name) else ""
        given = find_call_argument(call, target.node, root, bound=is_bound_method(target.module, target.node))
        parameters = [one.arg for one in target.node.args.args] if isinstance(target.node, Function) else []
        if root in parameters and given is None:
            continue
        kinds = model_kinds(module, given) if given is not None else model_kinds(target.module, model)
        for kind in ("fsdp", "fully_shard", "ddp"):
            if kind in kinds:
                return kind, kinds == {kind}
    return None


def _models_run(module: SourceFile, function: ast.AST, depth: int) -> list[ast.expr]:
    """Return called expressions of a function that may be a model: parameters, and names that are wrapped somewhere."""
    fact = ("models", function)
    cached = module.facts.get(fact)
    if cached is None:
        module.facts[fact] = []
        found: list[ast.expr] = []
        parameters = {one.arg for one in function.args.args} if isinstance(function, Function) else set()
        for node in _own_nodes(function):
            if not isinstance(node, ast.Call) or _is_called_by_some(module, node):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in parameters:
                found.append(node.func)
            elif isinstance(node.func, ast.Name | ast.Attribute) and find_called_function(module, node) is None:
                if format_dotted_name(node.func) and model_kinds(module, node.func) - {None}:
                    found.append(node.func)
            elif depth and (below := _find_called_function(module, node)) is not None:
                for model in _models_run(below.module, below.node, depth - 1):
                    if isinstance(model, ast.Name):
                        given = find_call_argument(
                            node, below.node, model.id, bound=is_bound_method(below.module, below.node)
                        )
                        if isinstance(given, ast.Name | ast.Attribute):
                            found.append(given)
        cached = module.facts[fact] = found
    return cached  # type: ignore[return-value]  # facts of this kind are lists of this type


def _if_wanted(module: SourceFile, call: ast.Call, function: ast.AST) -> bool:
    """Return whether a parameter decides about a call, as in `if reduce:`, so that the caller decides."""
    if not isinstance(function, Function):
        return False
    flags = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
    for parent, child in module.chain(call):
        if parent is function:
            return False
        if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
            tests = parent.test.values if isinstance(parent.test, ast.BoolOp) else [parent.test]
            if any(isinstance(test, ast.Name) and test.id in flags for test in tests):
                return True
    return False


def _left_before(function: ast.AST) -> float:
    """Return the line after which a function only runs if its arguments request it: after `if not wanted: return`."""
    if not isinstance(function, Function):
        return float("inf")
    parameters = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
    lines = [
        statement.lineno
        for statement in function.body
        if isinstance(statement, ast.If)
        and isinstance(statement.body[-1], ast.Return)
        and any(isinstance(part, ast.Name) and part.id in parameters for part in ast.walk(statement.test))
    ]
    return min(lines, default=float("inf"))


def _is_called_by_some(module: SourceFile, call: ast.Call, others: Sequence[ast.Call] = ()) -> bool:
    """Return whether a call depends on the rank, and the other ranks do not make it elsewhere."""
    condition = next(list_rank_guards(module, call), None)
    if condition is None:
        return False
    name = format_dotted_name(call.func)
    return not any(
        other is not call
        and format_dotted_name(other.func) == name
        and (opposite := next(list_rank_guards(module, other), None)) is not None
        and opposite.at_zero != condition.at_zero
        and opposite.sure
        and opposite.sure_not
        and condition.sure
        and condition.sure_not
        for other in others
    )
