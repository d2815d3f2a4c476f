"""Expressions that differ between ranks, and the conditions on the rank under which a piece of code runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dtctl.lint import names
from dtctl.lint.flow import CallFrame, Value, origins
from dtctl.lint.source_file import Function, SourceFile, constant, key, keyword

RankKind = Literal["global", "local", "spawned"]
"""Kind of a rank: of the world, of the node, or the number of a process of mp.spawn: both where there is one node."""

_GLOBAL = re.compile(r"(?:global_|world_|ddp_|dist_|my_|distributed_)?rank\Z|RANK\Z|process_(?:index|rank)\Z")
_LOCAL = re.compile(r"(?:ddp_|args_)?local_?rank\Z|LOCAL_RANK\Z|local_process_index\Z|gpu(?:_id)?\Z")
_MAIN = re.compile(
    r"(?:is_)?(?:local_)?(?:main|master|primary|leader)_(?:process|rank|proc|worker)\Z"
    r"|is_(?:main|master|primary|chief|leader)\Z"
    r"|(?:is_)?(?:global_)?rank_?(?:0|zero)\Z|is_global_zero\Z|is_(?:rank_?zero|dist_master|logging_process)\Z"
)
_DECORATORS = re.compile(r"rank_?(?:0|zero)|main_process|master_only|main_only|on_main|only_rank")


_FOLLOWED = (ast.Call, ast.Name, ast.Attribute, ast.Subscript, ast.BinOp)


@dataclass(frozen=True, slots=True)
class RankGuard:
    """A condition on the rank."""

    rank: RankKind
    at_zero: bool
    """True if rank 0 goes this way."""
    test: ast.AST
    early: bool = False
    """True if it stands before the code, and leaves, instead of around it."""
    sure: bool = True
    """True if the rank alone decides; not where another condition may send all ranks the same way."""
    sure_not: bool = True
    """The same for the other way."""

    def negated(self, *, early: bool = False) -> RankGuard:
        """Return the guard of the other way."""
        return RankGuard(self.rank, not self.at_zero, self.test, early, sure=self.sure_not, sure_not=self.sure)


def rank_kind(module: SourceFile, node: ast.expr, frame: CallFrame | None = None) -> RankKind | None:
    """Return whether an expression is the rank in the world or in the node; None for ranks in groups and anything else.

    It is followed through assignments, helper functions and their arguments.
    """
    fact = ("rank", node, frame)
    if fact not in module.facts:
        module.facts[fact] = None  # for one that is needed to find itself
        module.facts[fact] = _rank_kind(module, node, frame)
    return module.facts[fact]  # type: ignore[return-value]  # facts of this kind are such


def _rank_kind(module: SourceFile, node: ast.expr, frame: CallFrame | None) -> RankKind | None:
    if not isinstance(
        node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.BinOp | ast.IfExp | ast.NamedExpr
    ):
        return None
    if isinstance(node, ast.Name) and _counts(module, node):
        return None
    by_name = _kind_by_name(node)
    if isinstance(node, ast.Name | ast.Attribute) and by_name is None and not _may_be_rank(module, node):
        return None
    values = origins(module, node, frame)
    if any(_is_group_rank(value.node) for value in values):
        return None
    kinds: set[RankKind] = {kind for value in values if (kind := _kind_of_origin(value, node)) is not None}
    if kinds:
        return next(iter(kinds)) if len(kinds) == 1 else "local" if by_name == "local" else "global"
    constants = [constant(value.node) for value in values if isinstance(value.node, ast.Constant)]
    if len(constants) == len(values) and any(type(one) is int and one > 1 for one in constants):
        return None  # a rank of something else: of a matrix
    return by_name


def _may_be_rank(module: SourceFile, node: ast.expr) -> bool:
    """Return whether it is worth following a name that does not sound like a rank: it is set to a call or to a name."""
    bindings = module.lookup(node)
    return (isinstance(node, ast.Attribute) and not bindings) or any(
        binding.value is None or isinstance(binding.value, _FOLLOWED) for binding in bindings
    )


def _kind_by_name(node: ast.expr) -> RankKind | None:
    last = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name | ast.Attribute):  # config["local_rank"]
        last = str(constant(node.slice) or "")
        last = "" if last.lower() == "rank" else last  # LoRA has one too
    return "local" if _LOCAL.match(last) else "global" if _GLOBAL.match(last) else None


def _kind_of_origin(value: Value, node: ast.expr) -> RankKind | None:
    """Return the kind of rank that a value is, by the place that it comes from."""
    origin, module = value.node, value.module
    if isinstance(origin, ast.Call):
        if (module.name(origin.func) or "") in names.STARTS:
            return "spawned"
        return _rank_of_call(module, origin, value.frame) if value.item is None else None
    if isinstance(origin, ast.Subscript):
        return _of_variable(constant(origin.slice)) if _is_environ(module, origin.value) else _kind_by_name(origin)
    if isinstance(origin, ast.BinOp):
        if isinstance(origin.op, ast.Mod) and rank_kind(module, origin.left, value.frame) == "global":
            return "local"
        if isinstance(origin.op, ast.Add) and "node" in ast.unparse(origin).lower():
            kinds = {rank_kind(module, side, value.frame) for side in (origin.left, origin.right)}
            return "global" if kinds & {"local", "spawned"} else None
        return None
    if isinstance(origin, ast.Name | ast.Attribute) and origin is not node:
        return None if isinstance(origin, ast.Name) and _counts(module, origin) else _kind_by_name(origin)
    return None


def _counts(module: SourceFile, node: ast.Name) -> bool:
    """Return whether a name is that of a loop around it: `for rank in range(4)` goes through all of them on each."""
    scope = module.scope(node)
    return any(
        isinstance(parent, ast.For)
        and any(binding.statement is parent for binding in module.bindings.get((scope, node.id), ()))
        for parent, _ in module.chain(node)
    )


def _rank_of_call(module: SourceFile, call: ast.Call, frame: CallFrame | None) -> RankKind | None:
    name = key(call.func) or ""
    last = name.rpartition(".")[2]
    if last == "int":
        return rank_kind(module, call.args[0], frame) if call.args else None
    if last == "get" and isinstance(call.func, ast.Attribute) and _is_environ(module, call.func.value):
        return _of_variable(constant(call.args[0])) if call.args else None
    if last == "getenv":
        return _of_variable(constant(call.args[0])) if call.args else None
    if call.args or call.keywords:  # the rank in a group
        return None
    if last in ("get_rank", "get_world_rank", "get_global_rank", "Get_rank", "get_ordinal"):
        return "global"  # of a mesh too: its own numbers are get_local_rank()
    if name in ("hvd.rank", "horovod.rank", "idist.get_rank"):
        return "global"
    if last in ("get_local_rank", "get_node_local_rank", "get_local_ordinal") or name in ("hvd.local_rank",):
        return None if "mesh" in name else "local"
    return None


def _is_group_rank(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and (key(value.func) or "").rpartition(".")[2] in ("get_rank", "get_local_rank", "get_group_rank")
        and (
            bool(value.args or value.keywords)
            or ("mesh" in (key(value.func) or "") and not (key(value.func) or "").endswith("get_rank"))
        )
    )


def _is_environ(module: SourceFile, node: ast.expr) -> bool:
    return module.name(node) == "os.environ" or key(node) in ("os.environ", "environ", "env")


def _of_variable(name: object) -> RankKind | None:
    if name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        return "global"
    if name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        return "local"
    return None


def guard(module: SourceFile, test: ast.AST, frame: CallFrame | None = None, depth: int = 4) -> RankGuard | None:
    """Return the restriction of the rank by a condition; None if it does not depend on the rank."""
    fact = ("guard", test, frame)
    if fact not in module.facts:
        module.facts[fact] = None  # for a condition that is needed to find itself
        module.facts[fact] = _guard(module, test, frame, depth)
    return module.facts[fact]  # type: ignore[return-value]  # facts of this kind are such


def _guard(module: SourceFile, test: ast.AST, frame: CallFrame | None, depth: int) -> RankGuard | None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        below = guard(module, test.operand, frame, depth)
        return replace(below.negated(), test=test) if below else None
    if isinstance(test, ast.BoolOp):
        parts = [operand_guard for operand in test.values if (operand_guard := guard(module, operand, frame, depth))]
        if not parts:
            return None
        neutral = isinstance(test.op, ast.Or)
        outcomes = [part.at_zero for part in parts]
        at_zero = any(outcomes) if neutral else all(outcomes)
        rank: RankKind = "local" if all(part.rank == "local" for part in parts) else "global"
        partial = len(parts) < len(test.values)
        sure = all(part.sure for part in parts) and not (partial and neutral)
        sure_not = all(part.sure_not for part in parts) and not (partial and not neutral)
        return RankGuard(rank, at_zero, test, sure=sure, sure_not=sure_not)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(module, test, frame)
    if not isinstance(test, ast.Name | ast.Attribute | ast.Call):
        return None
    return _guard_of_name(module, test, frame, depth)


def _guard_of_name(
    module: SourceFile, test: ast.Name | ast.Attribute | ast.Call, frame: CallFrame | None, depth: int
) -> RankGuard | None:
    name = key(test.func if isinstance(test, ast.Call) else test) or ""
    last = name.rpartition(".")[2]
    found: list[RankGuard] = []
    values = [value for value in origins(module, test, frame) if value.node is not test] if depth else []
    for value in values:
        if isinstance(value.node, ast.Compare | ast.BoolOp | ast.UnaryOp):
            condition = guard(value.module, value.node, value.frame, depth - 1)
            if condition is not None:
                found.append(condition)
    constants = [value for value in values if isinstance(value.node, ast.Constant)]
    if found and len({(one.rank, one.at_zero) for one in found}) == 1:
        known = len(found) + len(constants) == len(values)
        # What a helper answers where nothing is distributed (`return True`) does not make it another condition.
        return RankGuard(
            found[0].rank, found[0].at_zero, test,
            sure=known and all(one.sure for one in found), sure_not=known and all(one.sure_not for one in found),
        )  # fmt: skip
    if _MAIN.match(last):
        if not isinstance(test, ast.Attribute) and constants and len(constants) == len(values):
            return None  # a function that always answers the same, a parameter that callers set
        return RankGuard("local" if "local" in last else "global", at_zero=True, test=test)
    kind = rank_kind(module, test, frame) if "gpu" not in last else None
    if kind:  # `if rank:`, `if dist.get_rank():`
        return RankGuard(kind, at_zero=False, test=test)
    return None


def _compared(module: SourceFile, test: ast.Compare, frame: CallFrame | None) -> RankGuard | None:
    left, op, right = test.left, test.ops[0], test.comparators[0]
    kind = rank_kind(module, left, frame)
    if kind is None:
        left, right = right, left
        kind = rank_kind(module, left, frame)
        if kind is None or not isinstance(op, ast.Eq | ast.NotEq):
            return None
    if isinstance(op, ast.In | ast.NotIn):
        values = [constant(item) for item in getattr(right, "elts", [])]
        return RankGuard(kind, (0 in values) == isinstance(op, ast.In), test)
    value = constant(right)
    if value is None and isinstance(right, ast.Constant):  # `rank is None` and the like
        return None
    if value == -1 and isinstance(op, ast.Eq | ast.NotEq):  # -1 means that the job is not distributed
        return None
    if not isinstance(value, int):
        # Another number, known only at run time: the condition still chooses one rank.
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


def for_some(module: SourceFile, node: ast.AST, depth: int = 3) -> RankGuard | None:
    """Return the condition on the rank under which a node runs: around it, or around every call of its function."""
    own = next(guards(module, node), None)
    if own is not None:
        return own
    function = module.scope(node)
    if not isinstance(function, Function) or not depth or module.neighbours is None:
        return None
    calls = module.neighbours.callers(module, function)
    above = [for_some(caller, call, depth - 1) for caller, call in calls[:20]]
    return above[0] if above and all(above) else None


def by_turns(module: SourceFile, node: ast.AST) -> bool:
    """Return whether the function of a node is called by rank 0 in one branch and by the others in the other one."""
    function = module.scope(node)
    if not isinstance(function, Function) or module.neighbours is None or next(guards(module, node), None) is not None:
        return False
    calls = module.neighbours.callers(module, function)[:20]
    return {one.at_zero for caller, call in calls if (one := for_some(caller, call, 1)) is not None} == {True, False}


_ONE = re.compile(
    r"\bnot \(?\s*[\w.]*(?:is_initialized\(\)|is_available\(\)|distributed|use_ddp|ddp|is_dist\w*|use_dist\w*)"
    r"|(?:world_size|n_gpus?|num_gpus|nprocs|ngpus\w*)(?:\(\))? *(?:==|<=) *1\b|(?:world_size|n_gpus?)(?:\(\))? *< *2\b"
    r"|(?:is_initialized\(\)|distributed) (?:is|==) False|\bgpu is None"
)
_MANY = re.compile(
    r"(?<!not )\b(?:[\w.]*is_initialized\(\)|[\w.]*distributed|use_ddp|ddp|is_dist\w*|use_dist\w*)\Z"
    r"|(?:world_size|n_gpus?|num_gpus|nprocs|ngpus\w*)(?:\(\))? *(?:> *1|>= *2|!= *1)\b"
)


def for_one_process(module: SourceFile, node: ast.AST) -> bool:
    """Return whether a node stands in a branch that is taken where nothing is distributed."""
    for parent, child in module.chain(node):
        if not isinstance(parent, ast.If | ast.IfExp) or child is parent.test:
            continue
        text = ast.unparse(parent.test)
        body = child is parent.body if isinstance(parent, ast.IfExp) else child in parent.body
        if (body and _ONE.search(text)) or (not body and _MANY.search(text)):
            return True
    return _instead_of_ranks(module, module.scope(node))


def one_process(module: SourceFile) -> bool:
    """Return whether the process group of a file has one rank, as in tests and benchmarks."""
    sizes = [(keyword(start, "world_size"), keyword(start, "rank")) for start in module.calls_of(names.INIT)]
    return any(constant(size) == 1 and constant(rank) == 0 for size, rank in sizes) or (
        bool(sizes) and all(constant(size) == 1 for size, _ in sizes)
    )


def _instead_of_ranks(module: SourceFile, function: ast.AST) -> bool:
    """Return whether one branch of an `if` calls a function, and the other one that starts a process group."""
    if not isinstance(function, Function) or any(module.within(call, function) for call in module.calls_of(names.INIT)):
        return False
    starting = {getattr(module.scope(call), "name", "") for call in module.calls_of(names.INIT)}
    calls = [call for call in module.methods.get(function.name, ()) if isinstance(call.func, ast.Name)]
    others = [
        call for name in starting - {""} for call in module.methods.get(name, ()) if isinstance(call.func, ast.Name)
    ]
    return bool(calls) and any(
        isinstance(parent, ast.If)
        and child in parent.body + parent.orelse
        and any(
            module.within(other, branch)
            for other in others
            for branch in (parent.orelse if child in parent.body else parent.body)
        )
        for parent, child in module.chain(calls[0])
    )


def by_launcher(module: SourceFile, node: ast.AST) -> bool:
    """Return whether a node runs in the process that starts the ranks, and not in them."""
    scope = module.scope(node)
    starts = [
        call
        for calls in (
            module.calls_of(*names.STARTS),
            module.calls_of("subprocess.Popen", "subprocess.run", "subprocess.call"),
        )
        for call in calls
        if module.scope(call) is scope
    ]
    starts += [call for call in module.methods.get("notebook_launcher", ()) if module.scope(call) is scope]
    if not starts and isinstance(scope, ast.Module):
        # What stands outside of `if __name__ == "__main__"` is run by every process that is spawned, too.
        main = any(
            isinstance(parent, ast.If) and "__name__" in ast.unparse(parent.test) for parent, _ in module.chain(node)
        )
        return main and bool(module.calls_of(*names.SPAWNS))
    if any(module.scope(call) is scope for call in module.calls_of(names.INIT, *names.WRAPPERS)):
        return False  # what trains may start other programs
    return bool(starts)


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
    """Return whether what comes after a block is not reached over it."""
    return isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def is_world_size(module: SourceFile, node: ast.expr) -> bool:
    """Return whether an expression is the number of ranks."""
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
    """Return whether the rank is part of an expression, over assignments too."""
    name, scope = key(node), module.scope(node)
    added = [
        one.value for one in module.nodes_of(ast.AugAssign) if key(one.target) == name and module.scope(one) is scope
    ]
    for value in (node, *module.values(node), *added):
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
