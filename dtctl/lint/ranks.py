"""Expressions that differ between ranks, and conditions on the rank under which code runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dtctl.lint import names
from dtctl.lint.flow import CallFrame, TracedValue, find_value_origins
from dtctl.lint.source_file import (
    SCOPES,
    Function,
    SourceFile,
    find_callers,
    find_keyword_value,
    format_dotted_name,
    list_additions,
    read_constant_value,
    read_last_name,
    unparse_node,
)

RankKind = Literal["global", "local", "spawned"]
"""Kind of a rank: global, local, or the process number from mp.spawn, which is both on a single node."""

_GLOBAL = re.compile(r"(?:global_|world_|ddp_|dist_|my_|distributed_)?rank\Z|RANK\Z|process_(?:index|rank)\Z")
_LOCAL = re.compile(r"(?:ddp_|args_)?local_?rank\Z|LOCAL_RANK\Z|local_process_index\Z|gpu(?:_id)?\Z")
_MAIN = re.compile(
    r"(?:is_)?(?:local_)?(?:main|master|primary|leader)_(?:process|rank|proc|worker)\Z"
    r"|is_(?:main|master|primary|chief|leader)\Z|master\Z"
    r"|(?:is_)?(?:global_)?rank_?(?:0|zero)\Z|is_global_zero\Z|is_(?:rank_?zero|dist_master|logging_process)\Z"
)
_DECORATORS = re.compile(r"rank_?(?:0|zero)|main_process|master_only|main_only|on_main|only_rank")


_FOLLOWED = (ast.Call, ast.Name, ast.Attribute, ast.Subscript, ast.BinOp)


@dataclass(frozen=True, slots=True)
class RankGuard:
    """Condition on the rank."""

    rank: RankKind
    at_zero: bool
    """True if rank 0 takes this branch."""
    test: ast.AST
    early: bool = False
    """True if the condition precedes the code and exits, instead of enclosing the code."""
    sure: bool = True
    """True if the rank alone decides; False if another condition may lead all ranks the same way."""
    sure_not: bool = True
    """True if the rank alone decides about the other branch."""

    def negate_guard(self, *, early: bool = False) -> RankGuard:
        """Return the guard of the other branch."""
        return RankGuard(self.rank, not self.at_zero, self.test, early, sure=self.sure_not, sure_not=self.sure)


def rank_kind(module: SourceFile, node: ast.expr, frame: CallFrame | None = None) -> RankKind | None:
    """Return the kind of rank that an expression is; None for ranks in groups and other expressions.

    The expression is followed through assignments, helper functions and their arguments.
    """
    fact = ("rank", node, frame)
    if fact not in module.facts:
        module.facts[fact] = None  # for an expression that refers to itself
        module.facts[fact] = _rank_kind(module, node, frame)
    return module.facts[fact]  # type: ignore[return-value]  # facts of this kind have this type


def _rank_kind(module: SourceFile, node: ast.expr, frame: CallFrame | None) -> RankKind | None:
    if not isinstance(
        node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.BinOp | ast.IfExp | ast.NamedExpr
    ):
        return None
    if isinstance(node, ast.Name) and _is_loop_variable(module, node):
        return None
    by_name = _kind_by_name(node)
    if isinstance(node, ast.Name | ast.Attribute) and by_name is None and not _may_be_rank(module, node):
        return None
    values = find_value_origins(module, node, frame)
    if any(_is_group_rank(value.node) for value in values):
        return None
    kinds: set[RankKind] = {kind for value in values if (kind := _kind_of_origin(value, node)) is not None}
    if kinds:
        return next(iter(kinds)) if len(kinds) == 1 else "local" if by_name == "local" else "global"
    constants = [read_constant_value(value.node) for value in values if isinstance(value.node, ast.Constant)]
    if len(constants) == len(values) and any(type(one) is int and one > 1 for one in constants):
        return None  # another kind of rank, such as that of a matrix
    return by_name


def _may_be_rank(module: SourceFile, node: ast.expr) -> bool:
    """Return whether a name without "rank" is worth following: it is set to a call or to a name."""
    bindings = module.lookup(node)
    return (isinstance(node, ast.Attribute) and not bindings) or any(
        binding.value is None or isinstance(binding.value, _FOLLOWED) for binding in bindings
    )


def _kind_by_name(node: ast.expr) -> RankKind | None:
    last = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    # The name of a subscript such as config["local_rank"] is its key.
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name | ast.Attribute):
        last = str(read_constant_value(node.slice) or "")
        last = "" if last.lower() == "rank" else last  # LoRA also has a rank
    return "local" if _LOCAL.match(last) else "global" if _GLOBAL.match(last) else None


def _kind_of_origin(value: TracedValue, node: ast.expr) -> RankKind | None:
    """Return the kind of rank of a value by its origin; None for other values."""
    origin, module = value.node, value.module
    if isinstance(origin, ast.Call):
        if (module.name(origin.func) or "") in names.STARTS:
            return "spawned"
        return _rank_of_call(module, origin, value.frame) if value.item is None else None
    if isinstance(origin, ast.Subscript):
        if _is_environ_mapping(module, origin.value):
            return _of_variable(read_constant_value(origin.slice))
        return _kind_by_name(origin)
    if isinstance(origin, ast.BinOp):
        if isinstance(origin.op, ast.Mod) and rank_kind(module, origin.left, value.frame) == "global":
            return "local"
        if isinstance(origin.op, ast.Add) and "node" in ast.unparse(origin).lower():
            kinds = {rank_kind(module, side, value.frame) for side in (origin.left, origin.right)}
            return "global" if kinds & {"local", "spawned"} else None
        return None
    if isinstance(origin, ast.Name | ast.Attribute) and origin is not node:
        return None if isinstance(origin, ast.Name) and _is_loop_variable(module, origin) else _kind_by_name(origin)
    return None


def _is_loop_variable(module: SourceFile, node: ast.Name) -> bool:
    """Return whether a name is the variable of a loop: `for rank in range(4)` takes all values on each rank."""
    scope = module.scope(node)
    return any(
        isinstance(parent, ast.For)
        and any(binding.statement is parent for binding in module.bindings.get((scope, node.id), ()))
        for parent, _ in module.chain(node)
    )


def _rank_of_call(module: SourceFile, call: ast.Call, frame: CallFrame | None) -> RankKind | None:
    name = format_dotted_name(call.func) or ""
    last = name.rpartition(".")[2]
    if last == "int":
        return rank_kind(module, call.args[0], frame) if call.args else None
    if last == "get" and isinstance(call.func, ast.Attribute) and _is_environ_mapping(module, call.func.value):
        return _of_variable(read_constant_value(call.args[0])) if call.args else None
    if last == "getenv":
        return _of_variable(read_constant_value(call.args[0])) if call.args else None
    if call.args or call.keywords:  # the call returns the rank in a group
        return None
    if last in ("get_rank", "get_world_rank", "get_global_rank", "Get_rank", "get_ordinal"):
        return "global"  # also for a mesh: its own numbering is get_local_rank()
    if name in ("hvd.rank", "horovod.rank", "idist.get_rank"):
        return "global"
    if last in ("get_local_rank", "get_node_local_rank", "get_local_ordinal") or name in ("hvd.local_rank",):
        return None if "mesh" in name else "local"
    return None


def _is_group_rank(value: ast.expr) -> bool:
    """Return whether a value is the rank in a group, or in a dimension of a mesh."""
    if not isinstance(value, ast.Call):
        return False
    name = format_dotted_name(value.func) or ""
    last = read_last_name(value.func)
    if last not in ("get_rank", "get_local_rank", "get_group_rank"):
        return False
    return bool(value.args or value.keywords) or ("mesh" in name and last != "get_rank")


def _is_environ_mapping(module: SourceFile, node: ast.expr) -> bool:
    return module.name(node) == "os.environ" or format_dotted_name(node) in ("os.environ", "environ", "env")


def _of_variable(name: object) -> RankKind | None:
    if name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        return "global"
    if name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        return "local"
    return None


def find_rank_guard(
    module: SourceFile, test: ast.AST, frame: CallFrame | None = None, depth: int = 4
) -> RankGuard | None:
    """Return the restriction to ranks by a condition; None if the condition does not depend on the rank."""
    fact = ("guard", test, frame)
    if fact not in module.facts:
        module.facts[fact] = None  # for a condition that refers to itself
        module.facts[fact] = _parse_rank_guard(module, test, frame, depth)
    return module.facts[fact]  # type: ignore[return-value]  # facts of this kind have this type


def _parse_rank_guard(module: SourceFile, test: ast.AST, frame: CallFrame | None, depth: int) -> RankGuard | None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        below = find_rank_guard(module, test.operand, frame, depth)
        return replace(below.negate_guard(), test=test) if below else None
    if isinstance(test, ast.BoolOp):
        parts = [
            operand_guard
            for operand in test.values
            if (operand_guard := find_rank_guard(module, operand, frame, depth))
        ]
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
        return _parse_rank_comparison(module, test, frame)
    if not isinstance(test, ast.Name | ast.Attribute | ast.Call):
        return None
    return _guard_of_name(module, test, frame, depth)


def _guard_of_name(
    module: SourceFile, test: ast.Name | ast.Attribute | ast.Call, frame: CallFrame | None, depth: int
) -> RankGuard | None:
    if isinstance(test, ast.Name) and _is_function(module, test):
        return None  # a function that is not called is true on all ranks
    last = read_last_name(test.func if isinstance(test, ast.Call) else test)
    values = [value for value in find_value_origins(module, test, frame) if value.node is not test] if depth else []
    conditions = [value for value in values if isinstance(value.node, ast.Compare | ast.BoolOp | ast.UnaryOp)]
    constants = [value for value in values if isinstance(value.node, ast.Constant)]
    guards = [find_rank_guard(value.module, value.node, value.frame, depth - 1) for value in conditions]
    found = [guard for guard in guards if guard is not None]
    if len({(guard.rank, guard.at_zero) for guard in found}) == 1:
        # A helper's result without a distributed job (`return True`) does not make it a different condition.
        known = len(found) + len(constants) == len(values)
        sure = known and all(guard.sure for guard in found)
        sure_not = known and all(guard.sure_not for guard in found)
        return RankGuard(found[0].rank, found[0].at_zero, test, sure=sure, sure_not=sure_not)
    if _MAIN.match(last):
        if constants and len(constants) == len(values) and _is_fixed_answer(test, constants):
            return None
        return RankGuard("local" if "local" in last else "global", at_zero=True, test=test)
    kind = rank_kind(module, test, frame) if "gpu" not in last else None
    return RankGuard(kind, at_zero=False, test=test) if kind else None  # such as `if rank:`, `if dist.get_rank():`


def _is_function(module: SourceFile, name: ast.Name) -> bool:
    """Return whether a name is a function of the project."""
    if module.lookup(name) or name.id in module.functions:
        return not module.lookup(name)
    qualified, files = module.aliases.get(name.id), module.neighbours
    found = files.definition(module, qualified) if qualified is not None and files is not None else None
    return found is not None and isinstance(found.node, Function)


def _is_fixed_answer(test: ast.expr, constants: list[TracedValue]) -> bool:
    """Return whether callers set a parameter, or a function returns the same on all ranks."""
    if isinstance(test, ast.Call):
        return {read_constant_value(value.node) for value in constants} != {True, False}
    return not isinstance(test, ast.Attribute)


def _parse_rank_comparison(module: SourceFile, test: ast.Compare, frame: CallFrame | None) -> RankGuard | None:
    left, op, right = test.left, test.ops[0], test.comparators[0]
    kind = rank_kind(module, left, frame)
    if kind is None:
        left, right = right, left
        kind = rank_kind(module, left, frame)
        if kind is None or not isinstance(op, ast.Eq | ast.NotEq):
            return None
    if isinstance(op, ast.In | ast.NotIn):
        values = [read_constant_value(item) for item in getattr(right, "elts", [])]
        return RankGuard(kind, (0 in values) == isinstance(op, ast.In), test)
    value = read_constant_value(right)
    if value is None and isinstance(right, ast.Constant):  # such as `rank is None`
        return None
    if value == -1 and isinstance(op, ast.Eq | ast.NotEq):  # -1 means that the job is not distributed
        return None
    if not isinstance(value, int):
        # The number is only known at run time, but the condition still selects one rank.
        return RankGuard(kind, isinstance(op, ast.Eq), test) if isinstance(op, ast.Eq | ast.NotEq) else None
    truths = {
        ast.Eq: value == 0,
        ast.NotEq: value != 0,
        ast.Gt: value < 0,
        ast.GtE: value <= 0,
        ast.Lt: value > 0,
        ast.LtE: value >= 0,
    }
    if isinstance(op, ast.GtE) and value <= 0:  # `rank >= 0` tests if the job is distributed
        return None
    if isinstance(op, ast.Gt) and value < 0:
        return None
    return RankGuard(kind, truths.get(type(op), True), test)


def list_rank_guards(module: SourceFile, node: ast.AST) -> Iterator[RankGuard]:
    """Yield conditions on the rank under which a node runs, the nearest first.

    These are `if`s around the node, exits before it, and decorators of its function.
    """
    child = node
    while (parent := module.parents.get(child)) is not None:
        if isinstance(child, ast.stmt):
            yield from _find_statement_guards(module, child, parent)
            return
        yield from _find_guards_between(module, parent, child)
        if isinstance(parent, SCOPES):
            return
        child = parent


def _find_statement_guards(module: SourceFile, statement: ast.stmt, parent: ast.AST) -> list[RankGuard]:
    """Return the conditions on the rank of a statement; the result is cached."""
    fact = ("guards", statement)
    if fact not in module.facts:
        module.facts[fact] = []  # for a condition that refers to itself
        found = list(_find_guards_between(module, parent, statement))
        module.facts[fact] = found if isinstance(parent, SCOPES) else [*found, *list_rank_guards(module, parent)]
    return module.facts[fact]  # type: ignore[return-value]  # facts of this kind are lists of this type


def _find_guards_between(module: SourceFile, parent: ast.AST, child: ast.AST) -> Iterator[RankGuard]:
    """Yield the conditions on the rank under which a node runs one of its parts."""
    if isinstance(parent, ast.If | ast.IfExp | ast.While):
        condition = find_rank_guard(module, parent.test)
        if condition and child is not parent.test:
            inside = child is parent.body if isinstance(parent, ast.IfExp) else child in parent.body
            yield condition if inside else condition.negate_guard()
    elif isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And):
        for before in parent.values[: parent.values.index(child)] if child in parent.values else ():
            condition = find_rank_guard(module, before)
            if condition:
                yield condition
    if isinstance(child, ast.stmt):
        yield from _exits_before(module, child)
    if isinstance(parent, Function) and any(
        _DECORATORS.search(ast.unparse(decorator)) for decorator in parent.decorator_list
    ):
        yield RankGuard("global", at_zero=True, test=parent)


def resolve_rank_guard(module: SourceFile, node: ast.AST, depth: int = 3) -> RankGuard | None:
    """Return the condition on the rank around a node, or around every call of its function; None without one."""
    own = next(list_rank_guards(module, node), None)
    if own is not None:
        return own
    calls = find_callers(module, module.scope(node))[:20] if depth else []
    above = [resolve_rank_guard(caller, call, depth - 1) for caller, call in calls]
    return above[0] if above and all(above) else None


def by_turns(module: SourceFile, node: ast.AST) -> bool:
    """Return whether rank 0 calls the node's function in one branch, and the others in the other branch."""
    if next(list_rank_guards(module, node), None) is not None:
        return False
    calls = find_callers(module, module.scope(node))[:20]
    guards = [resolve_rank_guard(caller, call, 1) for caller, call in calls]
    return {guard.at_zero for guard in guards if guard is not None} == {True, False}


_ONE = re.compile(
    r"\bnot \(?\s*[\w.]*(?:is_initialized\(\)|is_available\(\)|distributed|use_ddp|ddp|is_dist\w*|use_dist\w*)"
    r"|(?:world_size|n_gpus?|num_gpus|nprocs|ngpus\w*)(?:\(\))? *(?:==|<=) *1\b|(?:world_size|n_gpus?)(?:\(\))? *< *2\b"
    r"|(?:is_initialized\(\)|distributed) (?:is|==) False|\bgpu is None"
)
_MANY = re.compile(
    r"(?<!not )\b(?:[\w.]*is_initialized\(\)|[\w.]*distributed|use_ddp|ddp|is_dist\w*|use_dist\w*)\Z"
    r"|(?:world_size|n_gpus?|num_gpus|nprocs|ngpus\w*)(?:\(\))? *(?:> *1|>= *2|!= *1)\b"
)


def is_single_process_code(module: SourceFile, node: ast.AST) -> bool:
    """Return whether a node is in a branch for jobs that are not distributed."""
    for parent, child in module.chain(node):
        if not isinstance(parent, ast.If | ast.IfExp) or child is parent.test:
            continue
        text = unparse_node(module, parent.test)
        body = child is parent.body if isinstance(parent, ast.IfExp) else child in parent.body
        if (body and _ONE.search(text)) or (not body and _MANY.search(text)):
            return True
    return _instead_of_ranks(module, module.scope(node))


def one_process(module: SourceFile) -> bool:
    """Return whether the process group of a file has one rank, as in tests and benchmarks."""
    sizes = [
        (find_keyword_value(start, "world_size"), find_keyword_value(start, "rank"))
        for start in module.calls_of(names.INIT)
    ]
    return any(read_constant_value(size) == 1 and read_constant_value(rank) == 0 for size, rank in sizes) or (
        bool(sizes) and all(read_constant_value(size) == 1 for size, _ in sizes)
    )


def _instead_of_ranks(module: SourceFile, function: ast.AST) -> bool:
    """Return whether an `if` has a call of a function in one branch, and one that starts a group in the other."""
    if not isinstance(function, Function) or any(
        module.is_node_within(call, function) for call in module.calls_of(names.INIT)
    ):
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
            module.is_node_within(other, branch)
            for other in others
            for branch in (parent.orelse if child in parent.body else parent.body)
        )
        for parent, child in module.chain(calls[0])
    )


def is_launcher_code(module: SourceFile, node: ast.AST) -> bool:
    """Return whether a node runs in the process that starts the ranks, and not in the ranks."""
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
    for name in ("notebook_launcher", "TorchDistributor"):
        starts += [call for call in module.methods.get(name, ()) if module.scope(call) is scope]
    if not starts and isinstance(scope, ast.Module):
        # Spawned processes also run the code outside of `if __name__ == "__main__"`.
        main = any(
            isinstance(parent, ast.If) and "__name__" in ast.unparse(parent.test) for parent, _ in module.chain(node)
        )
        return main and bool(module.calls_of(*names.SPAWNS))
    if any(module.scope(call) is scope for call in module.calls_of(names.INIT, *names.WRAPPERS)):
        return False  # code that trains may start other programs
    return bool(starts)


def _exits_before(module: SourceFile, statement: ast.stmt) -> Iterator[RankGuard]:
    """Yield conditions of exits such as `if rank != 0: return` before a statement in its block."""
    for before in module.block(statement):
        if before is statement:
            return
        if isinstance(before, ast.If) and not before.orelse and is_leaving_block(before.body):
            condition = find_rank_guard(module, before.test)
            if condition:
                yield condition.negate_guard(early=True)


def is_leaving_block(body: list[ast.stmt]) -> bool:
    """Return whether the code after a block cannot be reached through the block."""
    return isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def is_world_size(module: SourceFile, node: ast.expr) -> bool:
    """Return whether an expression is the number of ranks."""
    for value in module.values(node):
        if isinstance(value, ast.Call) and (format_dotted_name(value.func) or "").endswith("get_world_size"):
            return True
        if isinstance(value, ast.Call) and value.args and is_world_size(module, value.args[0]):
            return True
        if isinstance(value, ast.Subscript) and read_constant_value(value.slice) == "WORLD_SIZE":
            return True
        if read_last_name(value) in (
            "world_size",
            "WORLD_SIZE",
            "ddp_world_size",
            "num_replicas",
        ):
            return True
    return read_last_name(node) in ("world_size", "WORLD_SIZE", "ddp_world_size")


def mentions_rank(module: SourceFile, node: ast.expr) -> bool:
    """Return whether an expression contains the rank, also through assignments."""
    added = [one.value for one in list_additions(module, format_dotted_name(node), module.scope(node))]
    for value in (node, *module.values(node), *added):
        for part in ast.walk(value):
            if isinstance(part, ast.expr) and rank_kind(module, part):
                return True
            if isinstance(part, ast.Name | ast.Attribute) and "rank" in (format_dotted_name(part) or "").lower():
                return True
            if isinstance(part, ast.Name) and part is not node:
                bound = [binding.value for binding in module.lookup(part)[-3:] if binding.value is not None]
                if any("rank" in ast.unparse(binding).lower() for binding in bound):
                    return True
    return False
