"""Rules about files: DT014, DT015."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.model import Problem
from dtctl.lint.ranks import guards, mentions_rank
from dtctl.lint.source_file import Function, key

_NODE_LOCAL = re.compile(r"/tmp|/dev/shm|scratch|local|tempfile")  # noqa: S108 - looked for, not used
_OWN_PATH = re.compile(r"tempfile|mk[ds]temp|Temporary(?:File|Directory)|tmp_?(?:path|dir)|uuid|getpid|hostname")
_SAVES = re.compile(r"(?:^|_)save_?(?:checkpoint|model|state|ckpt|snapshot|weights)")


def every_rank_writes(check: Check) -> Iterator[Problem]:
    """DT014."""
    module = check.module
    saves = [name for name in module.methods if _SAVES.search(name)]
    if not saves and not module.calls_of("torch.save"):
        return
    if check.project.framework(module) or not _distributed(check):
        return
    for call in module.calls_of("torch.save"):
        if len(call.args) < 2 or _guarded(check, call) or not _fixed_path(check, call.args[1]):
            continue
        yield check.problem("DT014", call, f"every rank writes `{ast.unparse(call.args[1])}`")
    for name in sorted(module.methods):
        if not _SAVES.search(name) or (name in module.functions and _guarded_inside(check, name)):
            continue
        for call in module.methods[name]:
            handler = module.enclosing(call, (ast.ExceptHandler,))
            if (
                handler is None
                or _guarded(check, call)
                or any(mentions_rank(module, argument) for argument in call.args)
            ):
                continue
            roots = {argument.partition(".")[0] for argument in module.aliases.values()}
            if key(call.func) == name and ((name not in module.aliases and name not in module.functions) or roots):
                yield check.problem(
                    "DT014", call, f"`{name}` in an exception handler: every rank that fails writes one path"
                )


def _distributed(check: Check) -> bool:
    return any(check.project.calls(check.module, name) for name in (names.INIT, *names.WRAPPERS))


def _guarded(check: Check, call: ast.AST, depth: int = 2) -> bool:
    """Whether a condition on the rank stands around a call, or around all calls of its function."""
    module = check.module
    if any(True for _ in guards(module, call)):
        return True
    function = module.scope(call)
    if not isinstance(function, Function) or not depth:
        return False
    calls = [
        other_call for other_call in module.methods.get(function.name, []) if module.scope(other_call) is not function
    ]
    return bool(calls) and all(_guarded(check, other_call, depth - 1) for other_call in calls)


def _guarded_inside(check: Check, name: str) -> bool:
    """Whether a function of this file looks at the rank itself before it saves."""
    module = check.module
    saves = [
        call
        for function in module.functions[name]
        for call in module.calls_of("torch.save")
        if module.scope(call) is function
    ]
    if any(any(True for _ in guards(module, call)) for call in saves):
        # A method of that name somewhere is not the function that is called by its bare name.
        return any(isinstance(module.parents[definition], ast.Module) for definition in module.functions[name])
    return False


def _fixed_path(check: Check, path: ast.expr) -> bool:
    """Whether all ranks have the same path, and it is known here that it is one."""
    module = check.module
    if mentions_rank(module, path):
        return False
    for value in module.values(path):
        if _OWN_PATH.search(ast.unparse(value)):
            return False
        if isinstance(value, ast.Call) and (key(value.func) or "").rpartition(".")[2] in ("BytesIO", "StringIO"):
            return False
        function = module.scope(path)
        if isinstance(function, Function):
            parameters = {parameter.arg for parameter in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
            if any(isinstance(part, ast.Name) and part.id in parameters for part in ast.walk(value)):
                return False  # a path that the caller chooses
    return True


def local_rank_writes(check: Check) -> Iterator[Problem]:
    """DT015."""
    module = check.module
    if check.cluster.single_node:
        return
    for call in module.calls_of("torch.save"):
        condition = next(guards(module, call), None)
        if (
            condition is None
            or condition.rank != "local"
            or not condition.at_zero
            or len(call.args) < 2
            or condition.early
        ):
            continue
        text = " ".join(ast.unparse(value) for value in module.values(call.args[1]))
        if not re.search(r"\bgpu", ast.unparse(condition.test)) and not _NODE_LOCAL.search(text):
            yield check.problem("DT015", call, "one rank of every node writes, and all of them the same file")


CHECKS = (every_rank_writes, local_rank_writes)
