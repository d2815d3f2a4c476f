"""Work that every rank does as if it were alone, and shares cut by hand: DT072, DT073, DT076."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.flow import origins
from dtctl.lint.model import Problem
from dtctl.lint.ranks import is_world_size, rank_kind
from dtctl.lint.source_file import SourceFile, constant, key, keyword

_CPUS = ("os.cpu_count", "multiprocessing.cpu_count", "torch.multiprocessing.cpu_count", "psutil.cpu_count")
LONG_S = 2 * 3600
"""Seconds from which a time-out is reported as long."""
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1, "weeks": 604800}


def workers_of_the_machine(check: Check) -> Iterator[Problem]:
    """DT072."""
    module = check.module
    if not check.project.distributed(module) or check.project.runs_loop(module):
        return
    for calls in module.methods.values():
        for call in calls:
            given = keyword(call, "num_workers") or keyword(call, "num_threads")
            for value in origins(module, given) if given is not None else ():
                # Divided by a number of ranks it is this rank's part; by two it is still the machine's.
                node = value.node
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Div):
                    node = node.left if isinstance(constant(node.right), int) else node
                if isinstance(node, ast.Call) and value.module.name(node.func) in _CPUS:
                    yield check.problem(
                        "DT072", given or call, "every rank of a node starts a worker for each of its processors"
                    )
                    break


def long_timeout(check: Check) -> Iterator[Problem]:
    """DT073."""
    module = check.module
    waits = ("accelerate.InitProcessGroupKwargs", "accelerate.utils.InitProcessGroupKwargs")
    for call in module.calls_of(names.INIT, *waits):
        given = keyword(call, "timeout")
        for value in origins(module, given) if given is not None else ():
            seconds = _seconds(value.node)
            if seconds is not None and seconds >= LONG_S:
                hours = seconds / 3600
                yield check.problem("DT073", given or call, f"a rank that hangs is noticed after {hours:g} hours")
                break


def _seconds(node: ast.AST) -> float | None:
    """Return the seconds of `timedelta(hours=2)`; None if they are not known."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("timedelta"):
        return None
    total = 0.0
    for argument in (*node.keywords, *(ast.keyword("days", one) for one in node.args[:1])):
        number = _product(argument.value)
        if argument.arg not in _UNITS or number is None:
            return None
        total += number * _UNITS[argument.arg]
    return total


def _product(node: ast.expr) -> float | None:
    """Return the value of a number, or of a product of numbers."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _product(node.left), _product(node.right)
        return left * right if left is not None and right is not None else None
    number = constant(node)
    return float(number) if isinstance(number, int | float) else None


def uneven_share(check: Check) -> Iterator[Problem]:
    """DT076."""
    module = check.module
    if not check.project.distributed(module) or "join" in module.text.lower().replace("os.path.join", "").replace(
        ".join(", ""
    ):
        return
    for cut in module.nodes_of(ast.Subscript):
        if not isinstance(cut.value, ast.Call) or rank_kind(module, cut.slice) != "global":
            continue
        statement = module.statement(cut)
        target = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
        size = _size_of_share(module, cut.value)
        if size == "rounded up" and "train" in target.lower() and "backward" in module.text:
            yield check.problem(
                "DT076", cut, f"`{target}` is of another length on the last rank: the others wait in a step more"
            )
        elif size == "rounded down" and re.search(r"val|test|eval|dev", target.lower()):
            yield check.problem("DT076", cut, f"what is left of `{target}` belongs to no rank", severity="info")


def _size_of_share(module: SourceFile, call: ast.Call) -> str | None:
    """Return how the parts into which a call divides something come out: "rounded up", "rounded down", or not known."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else (key(call.func) or "")
    parts = call.args[-1] if call.args else None
    if parts is None:
        return None
    if name in ("chunk", "array_split", "tensor_split"):
        return "rounded up" if is_world_size(module, parts) else None
    if name != "split":
        return None
    for value in origins(module, call.args[0]):
        node = value.node
        if isinstance(node, ast.Call) and (key(node.func) or "").endswith("ceil"):
            return "rounded up" if _by_world(module, node) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.BinOp):  # -(-a // b)
            return "rounded up" if _by_world(module, node) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            return "rounded down" if _by_world(module, node) else None
    return None


def _by_world(module: SourceFile, node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Div | ast.FloorDiv)
        and is_world_size(module, part.right)
        for part in ast.walk(node)
    )


CHECKS = (workers_of_the_machine, long_timeout, uneven_share)
