"""Rules about sums over ranks and what they are divided by: DT019, DT020."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint.check import Check
from dtctl.lint.model import Problem, Severity
from dtctl.lint.ranks import is_world_size
from dtctl.lint.source_file import constant, key, keyword, position

ALL_REDUCE = "torch.distributed.all_reduce"


def fixed_divisor(check: Check) -> Iterator[Problem]:
    """DT019."""
    module = check.module
    if check.cluster.single_node:
        return
    for call in module.calls_of(ALL_REDUCE):
        name = key(call.args[0]) if call.args else None
        op = keyword(call, "op") or (call.args[1] if len(call.args) > 1 else None)
        if name is None or (op is not None and not ast.unparse(op).endswith("SUM")):
            continue
        for node, divisor in _divisions(check, name, call):
            if _last_reduced(check, name, node) is not call or _is_floor(node):
                continue
            for value in module.values(divisor):
                number = constant(value)
                is_device_count = isinstance(value, ast.Call) and (key(value.func) or "").endswith("device_count")
                if is_device_count or _may_be_ranks(number):
                    severity: Severity = "error" if check.cluster.multi_node else "warning"
                    subject = "the GPUs of one node" if is_device_count else f"{number}"
                    message = f"`{name}` is a sum over all ranks, and is divided by {subject}"
                    yield check.problem("DT019", node, message, severity=severity)


def _may_be_ranks(number: object) -> bool:
    """Return whether a number looks like a number of GPUs: 1000, 100 or 1e9 is another unit, 3 and 7 are not."""
    return isinstance(number, int | float) and number in range(2, 1024, 2) and number % 10 != 0


def _last_reduced(check: Check, name: str, before: ast.AST) -> ast.Call | None:
    """The last all_reduce of a name in front of a place in the same function: later ones may take the maximum."""
    module = check.module
    latest = None
    for call in module.calls_of(ALL_REDUCE):
        same_scope = module.scope(call) is module.scope(before) and position(call) <= position(before)
        if same_scope and call.args and key(call.args[0]) == name:
            latest = call
    return latest


def _is_floor(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)


def _divisions(check: Check, name: str, after: ast.Call) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Divisions of a name after a call in the same function: (node, divisor)."""
    module = check.module
    scope = module.scope(after)
    for node in module.nodes_of(ast.BinOp):
        in_scope = node.lineno >= after.lineno and module.scope(node) is scope
        if in_scope and isinstance(node.op, ast.Div | ast.FloorDiv) and key(_bare(node.left)) == name:
            yield node, node.right
    for changed in module.nodes_of(ast.AugAssign):
        in_scope = changed.lineno > after.lineno and module.scope(changed) is scope
        if in_scope and isinstance(changed.op, ast.Div) and key(changed.target) == name:
            yield changed, changed.value
    for call in [*module.methods.get("div_", ()), *module.methods.get("div", ())]:
        in_scope = call.lineno > after.lineno and module.scope(call) is scope
        if in_scope and isinstance(call.func, ast.Attribute) and key(call.func.value) == name and call.args:
            yield call, call.args[0]


def _bare(node: ast.expr) -> ast.expr:
    """`x` of `x.item()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "float"):
        node = node.func.value
    return node


def sum_of_batches(check: Check) -> Iterator[Problem]:
    """DT020."""
    module = check.module
    for call in module.calls_of(ALL_REDUCE):
        name = key(call.args[0]) if call.args else None
        op = keyword(call, "op") or (call.args[1] if len(call.args) > 1 else None)
        if name is None or (op is not None and not ast.unparse(op).endswith("SUM")):
            continue
        total = _summed_over_batches(check, call.args[0], name)
        if total is None or _divided_elsewhere(check, call, {name, total}):
            continue
        for node, divisor in _divisions(check, name, call):
            if is_world_size(module, divisor):
                yield check.problem(
                    "DT020", node, f"`{total}` is a sum over batches, and is divided by the number of ranks only"
                )


def _summed_over_batches(check: Check, tensor: ast.expr, name: str) -> str | None:
    """Return the name that losses are added to in a loop; None if the tensor is not such a sum."""
    module = check.module
    scope = module.scope(tensor)
    sums = {}
    for node in module.nodes_of(ast.AugAssign):
        loop = module.enclosing(node, (ast.For,))
        text = ast.unparse(node.value)
        in_loop = module.scope(node) is scope and isinstance(node.op, ast.Add) and loop is not None
        if in_loop and re.search("loss|criterion", text.lower()) and not re.search(r"\*|len\(|size|sum\(|/", text):
            sums[key(node.target) or ""] = node
    candidates = {name}
    for binding in module.lookup(tensor):
        if binding.value is not None:
            candidates |= {part.id for part in ast.walk(binding.value) if isinstance(part, ast.Name)}
    return next((total for total in sums if total in candidates), None)


def _divided_elsewhere(check: Check, call: ast.Call, names: set[str]) -> bool:
    """Return whether a sum is also divided by something that is not the number of ranks."""
    module = check.module
    scope = module.scope(call)
    divided: list[tuple[ast.AST, ast.operator, ast.expr, ast.expr]] = [
        *((node, node.op, node.left, node.right) for node in module.nodes_of(ast.BinOp)),
        *((node, node.op, node.target, node.value) for node in module.nodes_of(ast.AugAssign)),
    ]
    for node, op, left, right in divided:
        if not isinstance(op, ast.Div) or module.scope(node) is not scope:
            continue
        operands = {key(part) for part in ast.walk(left) if isinstance(part, ast.Name | ast.Attribute)}
        if operands & names and (not is_world_size(module, right) or "len(" in ast.unparse(left)):
            return True
    return False


CHECKS = (fixed_divisor, sum_of_batches)
