"""The rules about what only some ranks have: DT070, DT071."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.flow import origins
from dtctl.lint.model import Problem
from dtctl.lint.ranks import RankGuard, by_launcher, for_one_process, for_some, guard, guards
from dtctl.lint.source_file import Binding, Function, SourceFile, key, keyword

_ASKS = re.compile(r"is not None|is None|hasattr|getattr|isinstance|in locals|in globals")
_NO_RANK = re.compile(r"(?i)rank\b.{0,3} == -1")
"""A program that runs alone has rank -1, by a habit of older launchers."""
_OF_A_RUN = ("log", "save", "watch", "finish", "define_metric", "alert")
"""Functions of wandb for the run that init() has begun."""


def absent_elsewhere(check: Check) -> Iterator[Problem]:
    """DT070."""
    module = check.module
    if not check.project.distributed(module):
        return
    yield from _runs(check)
    for (home, name), bindings in list(module.bindings.items()):
        if name.startswith("self.") and isinstance(home, ast.ClassDef):
            yield from _attributes(check, home, name, bindings)
        elif isinstance(home, ast.FunctionDef) and "." not in name:
            yield from _names(check, home, name, bindings)


def _runs(check: Check) -> Iterator[Problem]:
    """Calls of wandb on all ranks, where only some have begun a run."""
    module = check.module
    begins = [
        (source, call)
        for source in check.project.having(module, "wandb.init")
        for call in source.calls_of("wandb.init")
    ]
    alone = [for_some(source, call) for source, call in begins]
    if not begins or any(condition is None or not condition.at_zero for condition in alone):
        return
    for name in _OF_A_RUN:
        for call in module.calls_of(f"wandb.{name}"):
            if for_some(module, call) is None and not _asked(module, call, "wandb") and not by_launcher(module, call):
                yield check.problem("DT070", call, f"wandb.{name} on all ranks, and only one of them has begun a run")
                return


def _attributes(check: Check, owner: ast.ClassDef, name: str, bindings: list[Binding]) -> Iterator[Problem]:
    condition = _of_some_ranks(check.module, bindings)
    last = name.rpartition(".")[2]
    if condition is None or any(isinstance(part, ast.Name) and part.id == last for part in owner.body):
        return
    if any(isinstance(member, Function) and member.name == last for member in owner.body) or owner.bases:
        return
    for use in check.module.nodes_of(ast.Attribute):
        if key(use) != name or not isinstance(use.ctx, ast.Load) or not check.module.within(use, owner):
            continue
        if _missed(check.module, use, name):
            yield _reported(check, use, name, condition, bindings)
            return


def _names(check: Check, function: ast.FunctionDef, name: str, bindings: list[Binding]) -> Iterator[Problem]:
    condition = _of_some_ranks(check.module, bindings)
    if condition is None or re.search(rf"\\b(?:global|nonlocal)\\b[^\\n]*\\b{re.escape(name)}\\b", check.module.text):
        return
    if check.module.bindings.get((check.module.tree, name)):
        return
    first = bindings[0].line
    for use in ast.walk(function):
        if not isinstance(use, ast.Name) or use.id != name or not isinstance(use.ctx, ast.Load) or use.lineno < first:
            continue
        if check.module.scope(use) is function and _missed(check.module, use, name):
            yield _reported(check, use, name, condition, bindings)
            return


def _of_some_ranks(module: SourceFile, bindings: list[Binding]) -> RankGuard | None:
    """The condition on the rank under which a name is set, wherever it is; None if other ranks may have it too."""
    if not bindings or any(isinstance(binding.statement, ast.arg) or binding.value is None for binding in bindings):
        return None
    found = [next(guards(module, binding.statement), None) for binding in bindings]
    if any(one is None or one.early or not one.at_zero or not one.sure for one in found):
        return None
    return found[0]


def _missed(module: SourceFile, use: ast.expr, name: str) -> bool:
    """Return whether a use is reached by ranks that do not have what is used."""
    if for_some(module, use) is not None or for_one_process(module, use) or _asked(module, use, name):
        return False
    statement = module.statement(use)
    if isinstance(statement, ast.If | ast.While | ast.Assert | ast.Delete | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any(
        isinstance(parent, ast.Try | ast.BoolOp | ast.IfExp)
        or any(isinstance(one, ast.Name) and one.id == name for one in _targets(parent))
        or (isinstance(parent, ast.If) and child is not parent.test and _NO_RANK.search(ast.unparse(parent.test)))
        or (isinstance(parent, ast.If) and child is not parent.test and guard(module, parent.test) is not None)
        for parent, child in module.chain(use)
    )


def _targets(comprehension: ast.AST) -> list[ast.AST]:
    """Parts of the names that a comprehension binds for itself."""
    loops = getattr(comprehension, "generators", ())
    return [part for loop in loops for part in ast.walk(loop.target)]


def _asked(module: SourceFile, node: ast.AST, name: str) -> bool:
    """Return whether a condition around a node tests what it uses, or a flag that may stand for the rank."""
    for parent, child in module.chain(node):
        if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
            text = ast.unparse(parent.test)
            if re.search(rf"\\b{re.escape(name)}\\b", text) or _ASKS.search(text):
                return True
            if isinstance(parent.test, ast.Name | ast.Attribute) and any(
                guard(value.module, value.node, value.frame) is not None or not isinstance(value.node, ast.Attribute)
                for value in origins(module, parent.test) if value.node is not parent.test
            ):  # fmt: skip
                return True
    return False


def _reported(check: Check, use: ast.expr, name: str, condition: RankGuard, bindings: list[Binding]) -> Problem:
    return check.problem(
        "DT070", use, f"`{name}` is set in line {bindings[0].line} on rank 0 only, and used here by all ranks",
        fix=None if condition.rank == "global" else "set it on all ranks, or ask for the same rank here",
    )  # fmt: skip


def share_of_one_rank(check: Check) -> Iterator[Problem]:
    """DT071."""
    module = check.module
    if not check.project.calls(module, names.SAMPLER) or check.project.runs_loop(module):
        return
    for loop in module.nodes_of(ast.For):
        data = loop.iter
        while isinstance(data, ast.Call) and data.args and (key(data.func) or "").rpartition(".")[2] in (
            "enumerate", "tqdm", "iter",
        ):  # fmt: skip
            data = data.args[0]
        if not isinstance(data, ast.Name | ast.Attribute):
            continue
        condition = for_some(module, loop)
        if condition is None or not condition.at_zero or not condition.sure:
            continue
        if _divided(module, data):
            yield check.problem(
                "DT071", loop,
                f"rank 0 alone goes through `{ast.unparse(data)}`, whose DistributedSampler gives it one share",
            )  # fmt: skip


def _divided(module: SourceFile, data: ast.expr) -> bool:
    """Return whether what is gone through is a DataLoader with a DistributedSampler wherever it comes from."""
    values = [value for value in origins(module, data) if not isinstance(value.node, ast.Constant)]
    loaders = [value for value in values if isinstance(value.node, ast.Call)
               and value.module.name(value.node.func) == names.LOADER]  # fmt: skip
    if not loaders or len(loaders) != len(values):
        return False
    for value in loaders:
        sampler = keyword(value.node, "sampler") if isinstance(value.node, ast.Call) else None
        made = origins(value.module, sampler, value.frame) if sampler is not None else []
        if not any(isinstance(one.node, ast.Call) and one.module.name(one.node.func) == names.SAMPLER for one in made):
            return False
    return True


CHECKS = (absent_elsewhere, share_of_one_rank)
