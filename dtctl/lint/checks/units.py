"""Rule about the units by which FSDP shards: DT075."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.model import Problem
from dtctl.lint.source_file import find_keyword_value, format_dotted_name

_LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.DictComp)
_POLICY = 4
"""Index of FullyShardedDataParallel's argument with the policy, from 0."""
_BY_HAND = re.compile(r"\b(?:enable_wrap|auto_wrap|wrap)\(|recursive_wrap|_auto_wrap|apply_fsdp|\.apply\(")
"""Pattern of functions that wrap parts of a model instead of a policy."""


def check_one_unit(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT075: FSDP of one unit."""
    module = check.module
    if _BY_HAND.search(module.text):
        return
    for call in module.calls_of(names.FSDP):
        given = {argument.arg for argument in call.keywords}
        policy = find_keyword_value(call, "auto_wrap_policy")
        if None in given or len(call.args) > _POLICY or any(isinstance(one, ast.Starred) for one in call.args):
            continue
        if (
            (policy is not None and not _is_none_constant(policy))
            or "NO_SHARD" in module.text
            or not _is_single_unit_wrap(check, call)
        ):
            continue
        yield check.problem("DT075", call, "without a wrap policy the whole model is one unit, gathered at once")
    for call in module.calls_of(names.FULLY_SHARD):
        given_by_callers = (
            any(isinstance(bound.statement, ast.arg) for bound in module.lookup(call.args[0])) if call.args else True
        )
        if _is_single_unit_wrap(check, call) and not given_by_callers:
            yield check.problem(
                "DT075", call, "`fully_shard` of the whole model alone makes it one unit, gathered at once"
            )


def _is_none_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_single_unit_wrap(check: CheckContext, call: ast.Call) -> bool:
    """Return whether a call wraps a whole model, and no other call wraps a part of it."""
    module = check.module
    name = module.name(call.func) or ""
    inner = call.args[0] if call.args else find_keyword_value(call, "module")
    calls = module.calls_of(name)
    whole = inner.func if isinstance(inner, ast.Call) else inner
    if whole is None or module.find_enclosing_node(call, _LOOPS) is not None:
        return False
    if (
        (format_dotted_name(whole) or "..").count(".") > 1
        or format_dotted_name(whole) == "self"
        or (module.name(whole) or "").startswith("torch.nn.")
    ):
        return False  # a part of a model, or a layer
    others = [one for one in calls if one is not call]
    if any(module.find_enclosing_node(one, _LOOPS) is not None for one in others):
        return False
    apart = {module.scope(one) for one in others}
    return module.scope(call) not in apart or all(
        ast.unparse(one.args[0]) == ast.unparse(call.args[0]) for one in others if one.args and call.args
    )


CHECKS = (check_one_unit,)
