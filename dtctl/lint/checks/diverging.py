"""Rules about state that differs between ranks, or decisions of single ranks: DT045, DT047, DT059, DT060."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.checks.exits import find_backward_calls
from dtctl.lint.collectives import collective_called, takes_a_group
from dtctl.lint.flow import find_value_origins, resolve_callee
from dtctl.lint.model import Problem
from dtctl.lint.ranks import list_rank_guards
from dtctl.lint.source_file import Function, SourceFile, format_dotted_name, list_contexts
from dtctl.lint.wraps import can_be_wrapped, find_model_wrap, list_model_wraps

_AGREED = re.compile(r"all_reduce|all_gather|broadcast(?!_buffers)|\bJoin\(|model\.join\(")
_CLOCK = frozenset(["time.time", "time.monotonic", "time.perf_counter", "datetime.datetime.now"])
_SCHEDULER = re.compile(r"sched", re.IGNORECASE)
_OPTIMIZER = re.compile(r"(?:^|[._])opt(?:im|imizer)?(?:$|[._\d])", re.IGNORECASE)


def check_decided_alone(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT045: decided by each rank alone."""
    module = check.module
    if not check.project.is_distributed_training(module):
        return
    for node in module.nodes_of(ast.If):
        if not _own_clock(module, node.test) or any(True for _ in list_rank_guards(module, node)):
            continue
        for statement in node.body:
            collective = _collective_in(module, statement)
            if collective is not None:
                yield check.problem(
                    "DT045", node.test, f"each rank reads its own clock here, and {collective} waits for all ranks"
                )
                break


def check_ended_alone(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT045 for loops: `while time.time() < end`, and `if time.time() > end: break`."""
    module = check.module
    if not any(check.project.calls(module, name) for name in names.WRAPPERS):
        return
    ends: list[tuple[ast.expr, ast.AST]] = [(loop.test, loop) for loop in module.nodes_of(ast.While)]
    for leave in module.nodes_of(ast.Break):
        asked, left = module.parents.get(leave), module.find_enclosing_node(leave, (ast.For, ast.While))
        if isinstance(asked, ast.If) and leave in asked.body and left is not None:
            ends.append((asked.test, left))
    for test, loop in ends:
        if find_backward_calls(module, loop) and _own_clock(module, test):
            if _AGREED.search(ast.unparse(loop)) or next(list_rank_guards(module, test), None) is not None:
                continue
            yield check.problem("DT045", test, "each rank ends by its own clock, and the last one waits for gradients")


def _own_clock(module: SourceFile, test: ast.expr) -> bool:
    """Return whether a condition compares the time of this process."""
    return any(module.calls.get(name) for name in _CLOCK) and any(
        isinstance(part, ast.Compare)
        and any(
            isinstance(call, ast.Call) and module.name(call.func) in _CLOCK
            for side in (part.left, *part.comparators)
            for value in _list_expression_parts(module, side)
            for call in ast.walk(value)
        )
        for part in ast.walk(test)
    )


def _list_expression_parts(module: SourceFile, node: ast.expr) -> Iterator[ast.expr]:
    yield node
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield from (value.node for value in find_value_origins(module, part) if value.module is module)


def _collective_in(module: SourceFile, statement: ast.stmt) -> str | None:
    for call in ast.walk(statement):
        if not isinstance(call, ast.Call) or any(True for _ in list_rank_guards(module, call)):
            continue
        name = module.name(call.func) or ""
        if name in names.STATE_COLLECTIVES or (name in names.COLLECTIVES and not takes_a_group(name, call)):
            return name.rpartition(".")[2]
        below = collective_called(module, call)
        if below is not None:
            return below
    return None


def check_stepped_in_a_hook(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT047: optimizer step in a gradient hook."""
    module = check.module
    if not check.project.calls(module, names.DDP):
        return
    for name in ("register_post_accumulate_grad_hook", "register_hook"):
        for call in module.methods.get(name, ()):
            hook = call.args[0] if call.args else None
            body: ast.AST | None = hook if isinstance(hook, ast.Lambda) else None
            if isinstance(hook, ast.Name):
                functions = module.functions.get(hook.id, [])
                body = functions[-1] if functions else None
            if body is None or not _on_ddp(check, call):
                continue
            if any(
                isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "step"
                for part in ast.walk(body)
            ):
                yield check.problem("DT047", call, "the optimizer steps before DDP has averaged the gradient")


def _on_ddp(check: CheckContext, call: ast.Call) -> bool:
    """Return whether a hook is registered on parameters of a model that DDP wraps, here or later in the function."""
    module = check.module
    loop = module.find_enclosing_node(call, (ast.For,))
    if not isinstance(loop, ast.For):
        return False
    for part in ast.walk(loop.iter):
        if isinstance(part, ast.Attribute) and part.attr in ("parameters", "named_parameters"):
            name = format_dotted_name(part.value)
            if can_be_wrapped(module, part.value, "ddp"):
                return True
            return any(
                wrap.kind == "ddp" and wrap.source == (name or "").removesuffix(".module")
                for wrap in list_model_wraps(module)
            )
    return False


def check_past_the_wrapper(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT059: forward pass past DDP."""
    module = check.module
    if not module.methods.get("backward") or ("GradScaler" in module.text and "all_reduce" in module.text):
        return
    for call in module.methods.get("module", ()):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is None:
            continue
        wrap = find_model_wrap(module, owner, call)
        if wrap is None or wrap.kind != "ddp" or _without_gradients(module, call):
            continue
        function = module.scope(call)
        if any(
            module.scope(one) is function and one.lineno >= call.lineno for one in module.methods["backward"]
        ) and not _averaged_by_hand(module, function):
            yield check.problem(
                "DT059",
                call,
                f"`{format_dotted_name(call.func)}` bypasses DDP: its gradients are not exchanged",
                fix=f"`{format_dotted_name(owner)}(...)`",
            )


def check_parts_past_the_wrapper(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT059 for parts of the module inside DDP, if the model itself is never called."""
    module = check.module
    reported: set[ast.AST] = set()
    called = [call for calls in module.methods.values() for call in calls] if module.methods.get("backward") else []
    for part in sorted(called, key=lambda call: call.lineno):
        name = format_dotted_name(part.func) or ""
        owner_name, past, rest = name.partition(".module.")
        if not past or not rest or _NO_FORWARD.search(rest) or not isinstance(part.func, ast.Attribute):
            continue
        owner = _find_dotted_owner(part.func, owner_name)
        function = module.scope(part)
        if (
            owner is None
            or function in reported
            or _without_gradients(module, part)
            or _averaged_by_hand(module, function)
        ):
            continue
        wrap = find_model_wrap(module, owner, part)
        calls_itself = any(
            format_dotted_name(one.func) == owner_name for one in module.methods.get(owner_name.rpartition(".")[2], ())
        )
        if wrap is None or wrap.kind != "ddp" or calls_itself or _averaged_by_hand(module, function):
            continue
        if any(module.scope(one) is function and one.lineno >= part.lineno for one in module.methods["backward"]):
            reported.add(function)
            yield check.problem(
                "DT059", part, f"`{name}` bypasses DDP, and `{owner_name}` is never called: no gradient is exchanged",
                fix=f"write one forward that does all of it, and call `{owner_name}(...)`",
            )  # fmt: skip


_NO_FORWARD = re.compile(
    r"(?:^|\.)(?:parameters|named_\w+|modules|children|state_dict|load_\w*|save\w*|train\w*|eval|to|cuda|half|float|"
    r"zero_grad|requires_grad_|register_\w+|get_\w+|set_\w+|freeze\w*|unfreeze\w*|update\w*|reset\w*|clip_\w+|no_sync|\w*config\w*|"
    r"dtype|device|apply|append|keys|values|items|extra_repr|print_\w+|log_\w+)$"
)
"""Pattern of methods of a module that compute nothing with gradients."""


def _find_dotted_owner(node: ast.expr, name: str) -> ast.expr | None:
    """Return the part of a dotted expression that has this name; None without one."""
    while isinstance(node, ast.Attribute):
        node = node.value
        if format_dotted_name(node) == name:
            return node
    return None


def _averaged_by_hand(module: SourceFile, function: ast.AST) -> bool:
    """Return whether a function exchanges gradients itself."""
    reduced = [call for name in ("all_reduce", "reduce_scatter", "reduce") for call in module.methods.get(name, ())]
    return any(module.scope(call) is function for call in reduced) and ".grad" in ast.unparse(function)


def check_beside_the_wrapper(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT059 for a model that is wrapped under another name, but called under its own."""
    module = check.module
    for wrap in list_model_wraps(module) if module.methods.get("backward") else ():
        name = wrap.source
        if wrap.kind != "ddp" or name is None or wrap.target in (None, name) or "." in name:
            continue
        scope = module.scope(wrap.call)
        for call in module.methods.get(name, ()):
            if not isinstance(call.func, ast.Name) or module.scope(call) is not scope or call.lineno < wrap.call.lineno:
                continue
            current = module.find_current_binding(call.func, call)
            later = current is not None and current.line > wrap.call.lineno
            if later or not module.dominates(wrap.call, call) or _without_gradients(module, call):
                continue
            loop = module.find_enclosing_node(call, (ast.For, ast.While))
            passes = list(module.find_calls_below(loop, "backward")) if loop is not None else []
            if passes and not module.methods.get(str(wrap.target)) and not _averaged_by_hand(module, scope):
                own = any(one.args for one in passes)  # a function of the program that gets the loss
                yield check.problem(
                    "DT059", call, f"`{name}` is called, and not `{wrap.target}`: its gradients are not exchanged",
                    fix=f"`{wrap.target}(...)`", severity="warning" if own else None,
                )  # fmt: skip
                return


def _without_gradients(module: SourceFile, node: ast.AST) -> bool:
    around = [*list_contexts(module, node), *getattr(module.scope(node), "decorator_list", ())]
    return any(re.search(r"no_grad|inference_mode|no_sync", ast.unparse(one)) for one in around)


def check_stepped_by_some(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT060: step on some ranks."""
    module = check.module
    if not any(check.project.calls(module, name) for name in names.WRAPPERS) or "rpc" in module.text:
        return
    for call in module.methods.get("step", ()):
        text = format_dotted_name(call.func.value) if isinstance(call.func, ast.Attribute) else None
        if text is None:
            continue
        kind = "scheduler" if _SCHEDULER.search(text) else "optimizer" if _OPTIMIZER.search(text) else None
        if kind is None:
            continue
        condition = next((one for one in list_rank_guards(module, call) if one.sure), None)
        if condition is None or condition.early or _elsewhere_too(module, call):
            continue
        yield check.problem(
            "DT060", call, f"the {kind} steps on some ranks only: they train with different "
            + ("learning rates" if kind == "scheduler" else "parameters"),
        )  # fmt: skip


def _elsewhere_too(module: SourceFile, call: ast.Call) -> bool:
    """Return whether the same call is made in another branch of the function, too."""
    function = module.scope(call)
    name = format_dotted_name(call.func)
    return any(
        other is not call and format_dotted_name(other.func) == name and module.scope(other) is function
        for other in module.methods.get("step", ())
    ) or (isinstance(function, Function) and resolve_callee(module, call) is not None)


CHECKS = (
    check_decided_alone,
    check_ended_alone,
    check_stepped_in_a_hook,
    check_past_the_wrapper,
    check_parts_past_the_wrapper,
    check_beside_the_wrapper,
    check_stepped_by_some,
)
