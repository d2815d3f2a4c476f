"""Which expressions differ between ranks, and under which conditions on the rank a piece of code runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dtctl.lint.source_file import Function, SourceFile, constant, key

RankKind = Literal["global", "local"]

_GLOBAL = re.compile(r"(?:global_|world_|ddp_|dist_|my_|distributed_)?rank\Z|RANK\Z|process_(?:index|rank)\Z")
_LOCAL = re.compile(r"(?:ddp_|args_)?local_?rank\Z|LOCAL_RANK\Z|local_process_index\Z|gpu(?:_id)?\Z")
_MAIN = re.compile(
    r"(?:is_)?(?:local_)?(?:main|master|primary)_(?:process|rank|proc|worker)\Z|is_(?:main|master|primary|chief)\Z"
    r"|(?:is_)?(?:global_)?rank_?(?:0|zero)\Z|is_global_zero\Z|is_(?:rank_?zero|dist_master|logging_process)\Z"
)
_DECORATORS = re.compile(r"rank_?(?:0|zero)|main_process|master_only|main_only|on_main|only_rank")


@dataclass(frozen=True, slots=True)
class RankGuard:
    """A condition on the rank."""

    rank: RankKind
    at_zero: bool
    """Whether rank 0 goes this way."""
    test: ast.AST
    early: bool = False
    """Whether it stands before the code, and leaves, instead of around it."""
    sure: bool = True
    """Whether the rank alone decides; not where another condition may send all ranks the same way."""
    sure_not: bool = True
    """The same for the other way."""

    def negated(self, *, early: bool = False) -> RankGuard:
        """The guard of the other way."""
        return RankGuard(self.rank, not self.at_zero, self.test, early, sure=self.sure_not, sure_not=self.sure)


def rank_kind(module: SourceFile, node: ast.expr, depth: int = 4) -> RankKind | None:
    """Whether an expression is the rank in the world or in the node; None for ranks in groups and anything else."""
    if isinstance(node, ast.NamedExpr):
        return rank_kind(module, node.value, depth) or rank_kind(module, node.target, depth)
    if isinstance(node, ast.Call):
        return _rank_of_call(module, node, depth)
    if isinstance(node, ast.Subscript):
        return _of_variable(constant(node.slice)) if _is_environ(module, node.value) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return "local" if rank_kind(module, node.left, depth) == "global" else None
    if not isinstance(node, ast.Name | ast.Attribute):
        return None
    last = node.id if isinstance(node, ast.Name) else node.attr
    kind_by_name: RankKind | None = "local" if _LOCAL.match(last) else "global" if _GLOBAL.match(last) else None
    if depth:
        if isinstance(node, ast.Name) and _counts(module, node):
            return None
        values = [binding.value for binding in module.lookup(node) if binding.value is not None]
        kinds = {rank_kind(module, value, depth - 1) for value in values if not isinstance(value, ast.Constant)}
        if kinds - {None}:
            return next(iter(kinds - {None})) if len(kinds - {None}) == 1 else "global"
        if kind_by_name and any(_is_group_rank(value) for value in values):
            return None
    return kind_by_name


def _counts(module: SourceFile, node: ast.Name) -> bool:
    """Whether a name is that of a loop around it: `for rank in range(4)` goes through all of them on each."""
    scope = module.scope(node)
    return any(
        isinstance(parent, ast.For)
        and any(binding.statement is parent for binding in module.bindings.get((scope, node.id), ()))
        for parent, _ in module.chain(node)
    )


def _rank_of_call(module: SourceFile, call: ast.Call, depth: int) -> RankKind | None:
    name = module.name(call.func) or ""
    last = (key(call.func) or "").rpartition(".")[2]
    if name == "int" or last == "int":
        return rank_kind(module, call.args[0], depth) if call.args else None
    if last == "get" and isinstance(call.func, ast.Attribute) and _is_environ(module, call.func.value):
        return _of_variable(constant(call.args[0])) if call.args else None
    if last == "getenv":
        return _of_variable(constant(call.args[0])) if call.args else None
    if call.args or call.keywords:  # the rank in a group
        return None
    if last in ("get_rank", "get_world_rank", "get_global_rank"):
        return None if "mesh" in (key(call.func) or "") else "global"
    if last == "get_local_rank" and isinstance(call.func, ast.Name):
        return "local"
    return None


def _is_group_rank(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and (key(value.func) or "").rpartition(".")[2] in ("get_rank", "get_local_rank", "get_group_rank")
        and (bool(value.args or value.keywords) or "mesh" in (key(value.func) or ""))
    )


def _is_environ(module: SourceFile, node: ast.expr) -> bool:
    return module.name(node) == "os.environ" or key(node) in ("os.environ", "environ", "env")


def _of_variable(name: object) -> RankKind | None:
    if name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        return "global"
    if name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        return "local"
    return None


def guard(module: SourceFile, test: ast.AST, depth: int = 4) -> RankGuard | None:
    """What a condition says about the rank; None when it does not depend on it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        below = guard(module, test.operand, depth)
        return replace(below.negated(), test=test) if below else None
    if isinstance(test, ast.BoolOp):
        parts = [operand_guard for operand in test.values if (operand_guard := guard(module, operand, depth))]
        if not parts:
            return None
        neutral = isinstance(test.op, ast.Or)
        outcomes = [part.at_zero for part in parts]
        at_zero = any(outcomes) if neutral else all(outcomes)
        rank: RankKind = "global" if any(part.rank == "global" for part in parts) else "local"
        partial = len(parts) < len(test.values)
        sure = all(part.sure for part in parts) and not (partial and neutral)
        sure_not = all(part.sure_not for part in parts) and not (partial and not neutral)
        return RankGuard(rank, at_zero, test, sure=sure, sure_not=sure_not)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(module, test, depth)
    if not isinstance(test, ast.Name | ast.Attribute | ast.Call):
        return None
    return _guard_of_name(module, test, depth)


def _guard_of_name(module: SourceFile, test: ast.Name | ast.Attribute | ast.Call, depth: int) -> RankGuard | None:
    name = key(test.func if isinstance(test, ast.Call) else test) or ""
    last = name.rpartition(".")[2]
    for value in (binding.value for binding in module.lookup(test)) if depth and not isinstance(test, ast.Call) else ():
        if value is not None and isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp):
            value_guard = guard(module, value, depth - 1)
            if value_guard:
                return RankGuard(
                    value_guard.rank, value_guard.at_zero, test, sure=value_guard.sure, sure_not=value_guard.sure_not
                )
    kind = None if _MAIN.match(last) else rank_kind(module, test)
    if kind:  # `if rank:`, `if dist.get_rank():`
        return RankGuard(kind, at_zero=False, test=test)
    if _MAIN.match(last):
        return RankGuard("local" if "local" in last else "global", at_zero=True, test=test)
    return None


def _compared(module: SourceFile, test: ast.Compare, depth: int) -> RankGuard | None:
    left, op, right = test.left, test.ops[0], test.comparators[0]
    kind = rank_kind(module, left, depth)
    if kind is None:
        left, right = right, left
        kind = rank_kind(module, left, depth)
        if kind is None or not isinstance(op, ast.Eq | ast.NotEq):
            return None
    if isinstance(op, ast.In | ast.NotIn):
        values = [constant(item) for item in getattr(right, "elts", [])]
        return RankGuard(kind, (0 in values) == isinstance(op, ast.In), test)
    value = constant(right)
    if value == -1 and isinstance(op, ast.Eq | ast.NotEq):  # -1 says that the job is not distributed
        return None
    if not isinstance(value, int):
        # Another number that only the run knows: the condition still chooses one rank.
        return RankGuard(kind, isinstance(op, ast.Eq), test) if isinstance(op, ast.Eq | ast.NotEq) else None
    truths = {
        ast.Eq: value == 0,
        ast.NotEq: value != 0,
        ast.Gt: value < 0,
        ast.GtE: value <= 0,
        ast.Lt: value > 0,
        ast.LtE: value >= 0,
    }
    if isinstance(op, ast.GtE) and value <= 0:  # `rank >= 0`: whether the job is distributed
        return None
    if isinstance(op, ast.Gt) and value < 0:
        return None
    return RankGuard(kind, truths.get(type(op), True), test)


def guards(module: SourceFile, node: ast.AST) -> Iterator[RankGuard]:
    """Conditions on the rank under which a node runs, the nearest first.

    They are `if`s around it, exits before it, and decorators of its function.
    """
    for parent, child in module.chain(node):
        if isinstance(parent, ast.If | ast.IfExp | ast.While):
            condition = guard(module, parent.test)
            if condition and child is not parent.test:
                inside = child is parent.body if isinstance(parent, ast.IfExp) else child in parent.body
                yield condition if inside else condition.negated()
        elif isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And):
            for before in parent.values[: parent.values.index(child)] if child in parent.values else ():
                condition = guard(module, before)
                if condition:
                    yield condition
        if isinstance(child, ast.stmt):
            yield from _exits_before(module, child)
        if isinstance(parent, Function) and any(
            _DECORATORS.search(ast.unparse(decorator)) for decorator in parent.decorator_list
        ):
            yield RankGuard("global", at_zero=True, test=parent)


def _exits_before(module: SourceFile, statement: ast.stmt) -> Iterator[RankGuard]:
    """`if rank != 0: return` further up in the same block."""
    for before in module.block(statement):
        if before is statement:
            return
        if isinstance(before, ast.If) and not before.orelse and leaves(before.body):
            condition = guard(module, before.test)
            if condition:
                yield condition.negated(early=True)


def leaves(body: list[ast.stmt]) -> bool:
    """Whether what comes after a block is not reached over it."""
    return isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def is_world_size(module: SourceFile, node: ast.expr) -> bool:
    """Whether an expression is the number of ranks."""
    for value in module.values(node):
        if isinstance(value, ast.Call) and (key(value.func) or "").endswith("get_world_size"):
            return True
        if isinstance(value, ast.Call) and value.args and is_world_size(module, value.args[0]):
            return True
        if isinstance(value, ast.Subscript) and constant(value.slice) == "WORLD_SIZE":
            return True
        if (key(value) or "").rpartition(".")[2] in ("world_size", "WORLD_SIZE", "ddp_world_size", "num_replicas"):
            return True
    return (key(node) or "").rpartition(".")[2] in ("world_size", "WORLD_SIZE", "ddp_world_size")


def mentions_rank(module: SourceFile, node: ast.expr) -> bool:
    """Whether the rank is part of an expression, over assignments too."""
    for value in (node, *module.values(node)):
        for part in ast.walk(value):
            if isinstance(part, ast.expr) and rank_kind(module, part):
                return True
            if isinstance(part, ast.Name | ast.Attribute) and "rank" in (key(part) or "").lower():
                return True
            if isinstance(part, ast.Name) and part is not node:
                bound = [binding.value for binding in module.lookup(part)[-3:] if binding.value is not None]
                if any("rank" in ast.unparse(binding).lower() for binding in bound):
                    return True
    return False
