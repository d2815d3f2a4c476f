"""Rules about sums over ranks and their divisors: DT020."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint.check import CheckContext
from dtctl.lint.model import Problem
from dtctl.lint.ranks import is_world_size
from dtctl.lint.source_file import find_keyword_value, format_dotted_name

ALL_REDUCE = "torch.distributed.all_reduce"


def _find_divisions(check: CheckContext, name: str, after: ast.Call) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield divisions of a name after a call in the same function: (node, divisor)."""
    module = check.module
    scope = module.scope(after)
    for node in module.nodes_of(ast.BinOp):
        in_scope = node.lineno >= after.lineno and module.scope(node) is scope
        if (
            in_scope
            and isinstance(node.op, ast.Div | ast.FloorDiv)
            and format_dotted_name(_strip_item_calls(node.left)) == name
        ):
            yield node, node.right
    for changed in module.nodes_of(ast.AugAssign):
        in_scope = changed.lineno > after.lineno and module.scope(changed) is scope
        if in_scope and isinstance(changed.op, ast.Div) and format_dotted_name(changed.target) == name:
            yield changed, changed.value
    for call in [*module.methods.get("div_", ()), *module.methods.get("div", ())]:
        in_scope = call.lineno > after.lineno and module.scope(call) is scope
        if (
            in_scope
            and isinstance(call.func, ast.Attribute)
            and format_dotted_name(call.func.value) == name
            and call.args
        ):
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
        op = find_keyword_value(call, "op") or (call.args[1] if len(call.args) > 1 else None)
        if name is None or (op is not None and not ast.unparse(op).endswith("SUM")):
            continue
        total = _summed_over_batches(check, call.args[0], name)
        if total is None or _divided_elsewhere(check, call, {name, total}):
            continue
        for node, divisor in _find_divisions(check, name, call):
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


def _divided_elsewhere(check: CheckContext, call: ast.Call, names: set[str]) -> bool:
    """Return whether a sum is also divided by a value that is not the number of ranks."""
    module = check.module
    scope = module.scope(call)
    divided: list[tuple[ast.AST, ast.operator, ast.expr, ast.expr]] = [
        *((node, node.op, node.left, node.right) for node in module.nodes_of(ast.BinOp)),
        *((node, node.op, node.target, node.value) for node in module.nodes_of(ast.AugAssign)),
    ]
    for node, op, left, right in divided:
        if not isinstance(op, ast.Div) or module.scope(node) is not scope:
            continue
        operands = {format_dotted_name(part) for part in ast.walk(left) if isinstance(part, ast.Name | ast.Attribute)}
        if operands & names and (not is_world_size(module, right) or "len(" in ast.unparse(left)):
            return True
    return False


CHECKS = (check_sum_of_batches,)
