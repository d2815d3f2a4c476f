"""Rules about sums over ranks and their divisors: DT020."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint.check import CheckContext
from dtctl.lint.model import Problem
from dtctl.lint.ranks import is_world_size
from dtctl.lint.source_file import SourceFile, find_argument, format_dotted_name, list_calls_on

ALL_REDUCE = "torch.distributed.all_reduce"
_Operation = tuple[ast.BinOp | ast.AugAssign, ast.operator, ast.expr, ast.expr]
"""Operation on two values: node, operator, left and right side."""


def _list_operations(module: SourceFile, function: ast.AST) -> list[_Operation]:
    """Return the operations on two values in a function, including `left /= right`."""
    operations: list[_Operation] = [
        *((node, node.op, node.left, node.right) for node in module.nodes_of(ast.BinOp)),
        *((node, node.op, node.target, node.value) for node in module.nodes_of(ast.AugAssign)),
    ]
    return [one for one in operations if module.scope(one[0]) is function]


def _find_divisions(module: SourceFile, name: str, after: ast.Call) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield divisions of a name after a call in the same function: (node, divisor)."""
    scope = module.scope(after)
    for node, op, left, right in _list_operations(module, scope):
        if isinstance(node, ast.BinOp):
            divides = isinstance(op, ast.Div | ast.FloorDiv) and node.lineno >= after.lineno
        else:
            divides = isinstance(op, ast.Div) and node.lineno > after.lineno
        if divides and format_dotted_name(_strip_item_calls(left)) == name:
            yield node, right
    for call in [*list_calls_on(module, name, "div_"), *list_calls_on(module, name, "div")]:
        if call.args and call.lineno > after.lineno and module.scope(call) is scope:
            yield call, call.args[0]


def _strip_item_calls(node: ast.expr) -> ast.expr:
    """Return `x` for `x.item()`, and any other expression unchanged."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "float"):
        node = node.func.value
    return node


def check_sum_of_batches(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT020: sum of batches divided by ranks."""
    module = check.module
    for call in module.calls_of(ALL_REDUCE):
        name = format_dotted_name(call.args[0]) if call.args else None
        op = find_argument(call, "op", 1)
        if name is None or (op is not None and not ast.unparse(op).endswith("SUM")):
            continue
        total = _summed_over_batches(check, call.args[0], name)
        if total is None or _divided_elsewhere(module, call, {name, total}):
            continue
        for node, divisor in _find_divisions(module, name, call):
            if is_world_size(module, divisor):
                yield check.problem(
                    "DT020", node, f"`{total}` is a sum over batches, and is divided by the number of ranks only"
                )


def _summed_over_batches(check: CheckContext, tensor: ast.expr, name: str) -> str | None:
    """Return the name to which losses are added in a loop; None if the tensor is not such a sum."""
    module = check.module
    scope = module.scope(tensor)
    sums = {}
    for node in module.nodes_of(ast.AugAssign):
        loop = module.find_enclosing_node(node, (ast.For,))
        text = ast.unparse(node.value)
        in_loop = module.scope(node) is scope and isinstance(node.op, ast.Add) and loop is not None
        if in_loop and re.search("loss|criterion", text.lower()) and not re.search(r"\*|len\(|size|sum\(|/", text):
            sums[format_dotted_name(node.target) or ""] = node
    candidates = {name}
    for binding in module.lookup(tensor):
        if binding.value is not None:
            candidates |= {part.id for part in ast.walk(binding.value) if isinstance(part, ast.Name)}
    return next((total for total in sums if total in candidates), None)


def _divided_elsewhere(module: SourceFile, call: ast.Call, names: set[str]) -> bool:
    """Return whether a sum is also divided by a value that is not the number of ranks."""
    for _, op, left, right in _list_operations(module, module.scope(call)):
        operands = {format_dotted_name(part) for part in ast.walk(left) if isinstance(part, ast.Name | ast.Attribute)}
        if not isinstance(op, ast.Div) or not operands & names:
            continue
        if not is_world_size(module, right) or "len(" in ast.unparse(left):
            return True
    return False


CHECKS = (check_sum_of_batches,)
