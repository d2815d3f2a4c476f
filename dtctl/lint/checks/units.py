"""Rules about the units that FSDP shards by, and the meshes that they lie on: DT074, DT075."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.model import Problem
from dtctl.lint.source_file import SourceFile, constant, key, keyword

_LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.DictComp)
_POLICY = 4
"""Position of the argument of FullyShardedDataParallel that is the policy, from 0."""
_BY_HAND = re.compile(r"\b(?:enable_wrap|auto_wrap|wrap)\(|recursive_wrap|_auto_wrap|apply_fsdp|\.apply\(")
"""Functions that wrap parts of a model besides a policy."""


def clipped_over_meshes(check: Check) -> Iterator[Problem]:
    """DT074."""
    module = check.module
    for call in module.calls_of("torch.nn.utils.clip_grad_norm_"):
        parameters = call.args[0] if call.args else keyword(call, "parameters")
        if not isinstance(parameters, ast.Call) or not (key(parameters.func) or "").endswith(".parameters"):
            continue
        meshes = sorted(_meshes(module))
        if len(meshes) > 1:
            yield check.problem(
                "DT074", call, f"parameters lie on several meshes ({', '.join(f'`{mesh}`' for mesh in meshes[:3])})"
            )


def _meshes(module: SourceFile) -> set[str]:
    """Return the meshes over which parts of one model are sharded, in the function that shards most of them."""
    by_scope: dict[ast.AST, set[str]] = {}
    for call in module.calls_of(names.FULLY_SHARD):
        mesh = keyword(call, "mesh")
        if mesh is None or constant(mesh) is not None or isinstance(mesh, ast.IfExp) or _in_a_branch(module, call):
            continue
        by_scope.setdefault(module.scope(call), set()).add(ast.unparse(mesh))
    return max(by_scope.values(), key=len, default=set())


def _in_a_branch(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a call stands in one of several branches, so that others may not come with it."""
    return any(isinstance(parent, ast.If) and parent.orelse for parent, _ in module.chain(call))


def one_unit(check: Check) -> Iterator[Problem]:
    """DT075."""
    module = check.module
    if _BY_HAND.search(module.text):
        return
    for call in module.calls_of(names.FSDP):
        given = {argument.arg for argument in call.keywords}
        policy = keyword(call, "auto_wrap_policy")
        if None in given or len(call.args) > _POLICY or any(isinstance(one, ast.Starred) for one in call.args):
            continue
        if (policy is not None and not _is_none(policy)) or "NO_SHARD" in module.text or not _alone(check, call):
            continue
        yield check.problem("DT075", call, "without a wrap policy the whole model is one unit, gathered at once")
    for call in module.calls_of(names.FULLY_SHARD):
        given_by_callers = (
            any(isinstance(bound.statement, ast.arg) for bound in module.lookup(call.args[0])) if call.args else True
        )
        if _alone(check, call) and not given_by_callers:
            yield check.problem(
                "DT075", call, "`fully_shard` of the whole model alone makes it one unit, gathered at once"
            )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _alone(check: Check, call: ast.Call) -> bool:
    """Return whether a call wraps a whole model, and nothing else of it is wrapped."""
    module = check.module
    name = module.name(call.func) or ""
    inner = call.args[0] if call.args else keyword(call, "module")
    calls = module.calls_of(name)
    whole = inner.func if isinstance(inner, ast.Call) else inner
    if whole is None or module.enclosing(call, _LOOPS) is not None:
        return False
    if (
        (key(whole) or "..").count(".") > 1
        or key(whole) == "self"
        or (module.name(whole) or "").startswith("torch.nn.")
    ):
        return False  # a part of a model, or a layer
    others = [one for one in calls if one is not call]
    if any(module.enclosing(one, _LOOPS) is not None for one in others):
        return False
    apart = {module.scope(one) for one in others}
    return module.scope(call) not in apart or all(
        ast.unparse(one.args[0]) == ast.unparse(call.args[0]) for one in others if one.args and call.args
    )


CHECKS = (clipped_over_meshes, one_unit)
