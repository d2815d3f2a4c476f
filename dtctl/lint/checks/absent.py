"""Rules about values that only some ranks have: DT070, DT071."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.flow import find_value_origins
from dtctl.lint.model import Problem
from dtctl.lint.ranks import (
    RankGuard,
    find_rank_guard,
    is_launcher_code,
    is_single_process_code,
    list_rank_guards,
    resolve_rank_guard,
)
from dtctl.lint.source_file import Binding, Function, SourceFile, find_keyword_value, format_dotted_name, read_last_name

_ASKS = re.compile(r"is not None|is None|hasattr|getattr|isinstance|in locals|in globals")
_NO_RANK = re.compile(r"(?i)rank\b.{0,3} == -1")
"""Pattern of a condition for a program that runs alone, in which older launchers set the rank to -1."""
_OF_A_RUN = ("log", "save", "watch", "finish", "define_metric", "alert")
"""Functions of wandb that need the run which init() has started."""


def check_absent_elsewhere(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT070: set on one rank, used by all."""
    module = check.module
    if not check.project.distributed(module):
        return
    yield from _check_wandb_calls(check)
    for (home, name), bindings in list(module.bindings.items()):
        if name.startswith("self.") and isinstance(home, ast.ClassDef):
            yield from _check_absent_attributes(check, home, name, bindings)
        elif isinstance(home, ast.FunctionDef) and "." not in name:
            yield from _check_absent_names(check, home, name, bindings)


def _check_wandb_calls(check: CheckContext) -> Iterator[Problem]:
    """Yield calls of wandb on all ranks, if only some ranks have started a run."""
    module = check.module
    begins = [
        (source, call)
        for source in check.project.find_modules_with_words(module, "wandb.init")
        for call in source.calls_of("wandb.init")
    ]
    alone = [resolve_rank_guard(source, call) for source, call in begins]
    if not begins or any(condition is None or not condition.at_zero for condition in alone):
        return
    for name in _OF_A_RUN:
        for call in module.calls_of(f"wandb.{name}"):
            if (
                resolve_rank_guard(module, call) is None
                and not _has_guarding_condition(module, call, "wandb")
                and not is_launcher_code(module, call)
            ):
                yield check.problem("DT070", call, f"wandb.{name} on all ranks, and only one of them has started a run")
                return


def _check_absent_attributes(
    check: CheckContext, owner: ast.ClassDef, name: str, bindings: list[Binding]
) -> Iterator[Problem]:
    condition = _of_some_ranks(check.module, bindings)
    last = name.rpartition(".")[2]
    if condition is None or any(isinstance(part, ast.Name) and part.id == last for part in owner.body):
        return
    if any(isinstance(member, Function) and member.name == last for member in owner.body) or owner.bases:
        return
    for use in check.module.nodes_of(ast.Attribute):
        if (
            format_dotted_name(use) != name
            or not isinstance(use.ctx, ast.Load)
            or not check.module.is_node_within(use, owner)
        ):
            continue
        if _is_used_where_absent(check.module, use, name):
            yield _build_absence_problem(check, use, name, condition, bindings)
            return


def _check_absent_names(
    check: CheckContext, function: ast.FunctionDef, name: str, bindings: list[Binding]
) -> Iterator[Problem]:
    condition = _of_some_ranks(check.module, bindings)
    if condition is None or re.search(rf"\b(?:global|nonlocal)\b[^\n]*\b{re.escape(name)}\b", check.module.text):
        return
    if check.module.bindings.get((check.module.tree, name)):
        return
    first = bindings[0].line
    for use in _list_loads(check.module, function).get(name, ()):
        if use.lineno < first:
            continue
        if check.module.scope(use) is function and _is_used_where_absent(check.module, use, name):
            yield _build_absence_problem(check, use, name, condition, bindings)
            return


def _list_loads(module: SourceFile, function: ast.FunctionDef) -> dict[str, list[ast.Name]]:
    """Return name -> its uses in a function; the result is cached."""
    fact = ("loads", function)
    if fact not in module.facts:
        found: dict[str, list[ast.Name]] = {}
        for part in ast.walk(function):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                found.setdefault(part.id, []).append(part)
        module.facts[fact] = found
    return module.facts[fact]  # type: ignore[return-value]  # facts of this kind have this type


def _of_some_ranks(module: SourceFile, bindings: list[Binding]) -> RankGuard | None:
    """Return the condition on the rank under which a name is set everywhere; None if other ranks may set it, too."""
    if not bindings or any(isinstance(binding.statement, ast.arg) or binding.value is None for binding in bindings):
        return None
    found = [next(list_rank_guards(module, binding.statement), None) for binding in bindings]
    if any(one is None or one.early or not one.at_zero or not one.sure for one in found):
        return None
    return found[0]


def _is_used_where_absent(module: SourceFile, use: ast.expr, name: str) -> bool:
    """Return whether ranks that lack a value may reach this use of the value."""
    if (
        resolve_rank_guard(module, use) is not None
        or is_single_process_code(module, use)
        or _has_guarding_condition(module, use, name)
    ):
        return False
    statement = module.statement(use)
    if isinstance(statement, ast.If | ast.While | ast.Assert | ast.Delete | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any(
        isinstance(parent, ast.Try | ast.BoolOp | ast.IfExp)
        or any(isinstance(one, ast.Name) and one.id == name for one in _list_comprehension_targets(parent))
        or (isinstance(parent, ast.If) and child is not parent.test and _NO_RANK.search(ast.unparse(parent.test)))
        or (
            isinstance(parent, ast.If) and child is not parent.test and find_rank_guard(module, parent.test) is not None
        )
        for parent, child in module.chain(use)
    )


def _list_comprehension_targets(comprehension: ast.AST) -> list[ast.AST]:
    """Return the parts of the names that a comprehension binds."""
    loops = getattr(comprehension, "generators", ())
    return [part for loop in loops for part in ast.walk(loop.target)]


def _has_guarding_condition(module: SourceFile, node: ast.AST, name: str) -> bool:
    """Return whether a condition around a node tests the name, or is a flag that may depend on the rank."""
    for parent, child in module.chain(node):
        if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
            text = ast.unparse(parent.test)
            if re.search(rf"\b{re.escape(name)}\b", text) or _ASKS.search(text):
                return True
            if isinstance(parent.test, ast.Name | ast.Attribute) and any(
                find_rank_guard(value.module, value.node, value.frame) is not None
                or not isinstance(value.node, ast.Attribute)
                for value in find_value_origins(module, parent.test)
                if value.node is not parent.test
            ):
                return True
    return False


def _build_absence_problem(
    check: CheckContext, use: ast.expr, name: str, condition: RankGuard, bindings: list[Binding]
) -> Problem:
    return check.problem(
        "DT070", use, f"`{name}` is set in line {bindings[0].line} on rank 0 only, and used here by all ranks",
        fix=None if condition.rank == "global" else "set it on all ranks, or test for the same rank here",
    )  # fmt: skip


def check_share_of_one_rank(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT071: one rank evaluates its share."""
    module = check.module
    if not check.project.calls(module, names.SAMPLER) or check.project.framework_has_loop(module):
        return
    for loop in module.nodes_of(ast.For):
        data = loop.iter
        while isinstance(data, ast.Call) and data.args and read_last_name(data.func) in (
            "enumerate", "tqdm", "iter",
        ):  # fmt: skip
            data = data.args[0]
        if not isinstance(data, ast.Name | ast.Attribute):
            continue
        condition = resolve_rank_guard(module, loop)
        if condition is None or not condition.at_zero or not condition.sure:
            continue
        if _has_distributed_sampler(module, data):
            yield check.problem(
                "DT071", loop,
                f"rank 0 alone goes through `{ast.unparse(data)}`, whose DistributedSampler gives it one share",
            )  # fmt: skip


def _has_distributed_sampler(module: SourceFile, data: ast.expr) -> bool:
    """Return whether an iterable is a DataLoader with a DistributedSampler, for every possible origin."""
    values = [value for value in find_value_origins(module, data) if not isinstance(value.node, ast.Constant)]
    loaders = [value for value in values if isinstance(value.node, ast.Call)
               and value.module.name(value.node.func) == names.LOADER]  # fmt: skip
    if not loaders or len(loaders) != len(values):
        return False
    for value in loaders:
        sampler = find_keyword_value(value.node, "sampler") if isinstance(value.node, ast.Call) else None
        made = find_value_origins(value.module, sampler, value.frame) if sampler is not None else []
        if not any(isinstance(one.node, ast.Call) and one.module.name(one.node.func) == names.SAMPLER for one in made):
            return False
    return True


CHECKS = (check_absent_elsewhere, check_share_of_one_rank)
