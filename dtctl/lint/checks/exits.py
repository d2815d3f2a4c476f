"""Rules about ranks that diverge from the others: DT013, DT033."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.flow import find_called_function
from dtctl.lint.model import Problem
from dtctl.lint.ranks import RankGuard, find_rank_guard, is_leaving_block, is_single_process_code, list_rank_guards
from dtctl.lint.source_file import (
    SourceFile,
    find_keyword_value,
    format_dotted_name,
    list_contexts,
    read_constant_value,
)

_NOT_FINITE = re.compile(r"\b(?:isnan|isinf|isfinite)\b")
_TRAIN_NAMES = re.compile(r"train|fit|epoch|step|run|update|optimi|learn", re.IGNORECASE)
_PATIENCE = re.compile(
    r"patien|(?:approx|target)_?kl|early_?stop|not_improved|no_improve|without_improv|stop_count|should_stop|stopper"
    r"|bad_(?:epochs|count)|num_bad|\bbad\b|trigger_times|stale_epochs",
    re.IGNORECASE,
)
_SIZES = re.compile(r"batch_?size|epoch|step|iter|_idx\b|index", re.IGNORECASE)
"""Pattern of values that are the same on all ranks, or should be."""
_READS = re.compile(r"loader|batch|dataset|\bdata\b|\bdl\b|stream|reader|iterator", re.IGNORECASE)
"""Pattern of iterables in a loop over samples."""
_TRAINS = re.compile(r"train|backward|optimizer\.step|fit\b")
_AGREED = re.compile(r"all_reduce|all_gather|reduce_dict|broadcast|reduce_tensor|reduce_loss|gather_for_metrics")


def check_left_alone(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT013: some ranks leave early."""
    module = check.module
    if not module.trains and not check.project.distributed(module):
        return
    reported: set[ast.stmt] = set()
    for node in module.nodes_of(ast.If):
        if _is_ended_by_figure(check, node):
            yield check.problem(
                "DT013", node.body[-1],
                f"a rank whose `{ast.unparse(node.test)}` holds ends alone, and the others wait for its gradients "
                "until something ends them", severity="info",
            )  # fmt: skip
        if not is_leaving_block(node.body) or node.orelse:
            continue
        condition = find_rank_guard(module, node.test)
        if condition is not None:
            alone = (
                condition.sure
                and condition.sure_not
                and not _has_collective_before_exit(check, node)
                and not is_single_process_code(module, node)
            )
            collective = _collective_after(check, node) if alone else None
            if collective is not None:
                message = f"some ranks leave here, and {collective} further down waits for them"
                reported.add(node.body[-1])
                yield check.problem("DT013", node.body[-1], message)
            continue
        text = ast.unparse(node.test)
        own_batch = _NOT_FINITE.search(text) or _of_its_batch(check, node)
        loop = module.find_enclosing_node(node, (ast.For, ast.While))
        if isinstance(node.body[-1], ast.Return) and (loop is None or module.scope(loop) is not module.scope(node)):
            continue
        if own_batch and _waited_for(check, node) and not _is_condition_agreed(check, node, text):
            yield check.problem(
                "DT013",
                node.body[-1],
                f"a rank whose `{text}` holds leaves here alone, and the others wait for its gradients",
                severity="warning",
            )
    if not module.trains:
        return
    yield from _out_of_memory(check)
    yield from _stopped_early(check)
    yield from (problem for statement, problem in _left_loop(check) if statement not in reported)


def _is_ended_by_figure(check: CheckContext, node: ast.If) -> bool:
    """Return whether a rank exits with an error because its own figure is not finite: `sys.exit(1)`, `raise`."""
    last, text = node.body[-1], ast.unparse(node.test)
    ends = isinstance(last, ast.Raise) or (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Call)
        and format_dotted_name(last.value.func) in ("exit", "quit", "sys.exit", "os._exit")
    )
    return bool(
        ends and _NOT_FINITE.search(text) and _waited_for(check, node) and not _is_condition_agreed(check, node, text)
    )


def _of_its_batch(check: CheckContext, node: ast.If) -> bool:
    """Return whether a condition skips a batch because of its content, which differs between ranks."""
    module = check.module
    loop = module.find_enclosing_node(node, (ast.For, ast.While))
    if not isinstance(node.body[-1], ast.Continue) or not isinstance(loop, ast.For) or is_inside_join(module, node):
        return False
    if not any(_comes_after(check, node, call, loop) for call in find_backward_calls(module, loop)):
        return False
    if _READS.search(ast.unparse(loop.iter)) is None:
        return False
    counted = isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func).rpartition(".")[2] in ("enumerate", "zip")
    targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
    own = {part.id for target in (targets[1:] if counted else targets) for part in ast.walk(target)
           if isinstance(part, ast.Name)}  # fmt: skip
    for statement in loop.body:
        if statement.lineno >= node.lineno:
            break
        if isinstance(statement, ast.Assign) and _collect_used_names(statement.value) & own:
            own |= {name for target in statement.targets for name in _collect_used_names(target)}
    return bool(_collect_used_names(node.test) & own) and _SIZES.search(ast.unparse(node.test)) is None


def _collect_used_names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _has_collective_before_exit(check: CheckContext, node: ast.If) -> bool:
    """Return whether the ranks that leave first call a collective, which the others may wait for."""
    calls = check.module.calls
    return any(
        check.module.is_node_within(call, statement)
        for name in names.COLLECTIVES
        for call in calls.get(name, ())
        for statement in node.body
    )


def _left_loop(check: CheckContext) -> Iterator[tuple[ast.stmt, Problem]]:
    """Yield each `break` and `continue` that depends on the rank, in a loop whose backward pass needs all ranks."""
    module = check.module
    leaving: list[ast.stmt] = [
        *module.nodes_of(ast.Break), *module.nodes_of(ast.Continue), *module.nodes_of(ast.Return),
        *(module.statement(call) for call in _ends_without_error(module)),
    ]  # fmt: skip
    decided = [(leave, condition) for leave in leaving if (condition := _decided_by_rank(check, leave)) is not None]
    for leave, condition in decided:
        loop = module.find_enclosing_node(leave, (ast.For, ast.While))
        if loop is None or not _waited_for(check, leave) or is_inside_join(check.module, leave):
            continue
        if module.scope(loop) is not module.scope(leave):
            continue
        if any(
            type(other) is type(leave)
            and other_condition.at_zero != condition.at_zero
            and module.find_enclosing_node(other, (ast.For, ast.While)) is loop
            for other, other_condition in decided
        ):
            continue
        passes = [
            call
            for call in find_backward_calls(module, loop)
            if all(condition_before.early for condition_before in list_rank_guards(module, call))
        ]
        if isinstance(leave, ast.Continue):
            passes = [call for call in passes if _comes_after(check, leave, call, loop)]
        if passes:
            yield leave, check.problem(
                "DT013", leave, "some ranks leave here, and the others wait for their gradients",
                # The other ranks may return there, too, and a launcher may notice the end of a process.
                severity="warning" if isinstance(leave, ast.Return | ast.Expr) else None,
            )  # fmt: skip


def _ends_without_error(module: SourceFile) -> list[ast.Call]:
    """Return the calls that end the process with exit code 0, after which no launcher ends the others."""
    calls = [*module.methods.get("exit", ()), *module.methods.get("quit", ()), *module.methods.get("_exit", ())]
    return [
        call
        for call in calls
        if format_dotted_name(call.func) in ("exit", "quit", "sys.exit", "os._exit")
        and (not call.args or read_constant_value(call.args[0]) == 0)
        and isinstance(module.parents.get(call), ast.Expr)
    ]


def find_backward_calls(module: SourceFile, loop: ast.AST) -> list[ast.Call]:
    """Return the calls in a loop that run a backward pass, directly or in a function of the project."""
    fact = ("backward", loop)
    cached = module.facts.get(fact)
    if cached is None:
        found = list(module.find_calls_below(loop, "backward"))
        for name in module.methods:
            if not _TRAIN_NAMES.search(name):
                continue
            for call in module.find_calls_below(loop, name):
                target = find_called_function(module, call)
                if target is not None and target.module.find_calls_below(target.node, "backward"):
                    found.append(call)
        cached = module.facts[fact] = found
    return cached  # type: ignore[return-value]  # facts of this kind are lists of this type


def _stopped_early(check: CheckContext) -> Iterator[Problem]:
    """Yield loops over epochs that each rank leaves by its own figures: early stopping without an agreement."""
    module = check.module
    if not check.project.distributed(module) or check.project.uses_framework(module):
        return
    for leave in [*module.nodes_of(ast.Break), *module.nodes_of(ast.Return)]:
        loop = module.find_enclosing_node(leave, (ast.For, ast.While))
        if loop is None or module.scope(loop) is not module.scope(leave) or not find_backward_calls(module, loop):
            continue
        test = next((parent.test for parent, child in module.chain(leave)
                     if isinstance(parent, ast.If) and child is not parent.test and module.is_node_within(parent, loop)
                     and _PATIENCE.search(ast.unparse(parent.test))), None)  # fmt: skip
        if test is None or _agreed_on(module, loop, test) or any(True for _ in list_rank_guards(module, leave)):
            continue
        called = [find_called_function(module, call) for call in ast.walk(loop) if isinstance(call, ast.Call)]
        if any(target is not None and _AGREED.search(ast.unparse(target.node)) for target in called):
            continue
        yield check.problem(
            "DT013", leave,
            f"each rank decides on `{ast.unparse(test)}` by its own figures, and the others wait for its gradients",
            severity="warning",
        )  # fmt: skip


def _agreed_on(module: SourceFile, loop: ast.AST, test: ast.expr) -> bool:
    """Return whether the ranks exchange anything in the loop of a condition, except for gradients."""
    about = _collect_used_names(test) | {name for part in ast.walk(test) if isinstance(part, ast.Name | ast.Attribute)
                            for binding in module.lookup(part) if binding.value is not None
                            for name in _collect_used_names(binding.value)}  # fmt: skip
    for call in (part for part in ast.walk(loop) if isinstance(part, ast.Call)):
        if not _AGREED.search(ast.unparse(call.func)):
            continue
        gradients = call.args and re.search(r"grad", ast.unparse(call.args[0]))
        if not gradients or _collect_used_names(call) & about:
            return True
    return False


def _decided_by_rank(check: CheckContext, leave: ast.stmt) -> RankGuard | None:
    """Return the condition on the rank inside of a loop under which a statement leaves the loop; None without one."""
    module = check.module
    loop = module.find_enclosing_node(leave, (ast.For, ast.While))
    for condition in list_rank_guards(module, leave):
        inside = loop is not None and condition.test is not loop and module.is_node_within(condition.test, loop)
        if inside and condition.sure and not condition.early and condition.test is not getattr(loop, "test", None):
            return condition
    return None


def _comes_after(check: CheckContext, leave: ast.stmt, call: ast.Call, loop: ast.AST | None) -> bool:
    """Return whether a call follows a statement, in its block or an enclosing one, within a loop or its function."""
    module = check.module
    for parent, child in module.chain(leave):
        block = module.block(child) if isinstance(child, ast.stmt) else []
        later = block[block.index(child) + 1 :] if isinstance(child, ast.stmt) and block else []
        if any(module.is_node_within(call, statement) for statement in later):
            return True
        if parent is loop:
            return False
    return False


def is_inside_join(module: SourceFile, node: ast.AST) -> bool:
    """Return whether `with model.join()` or `with Join(...)` encloses a node; ranks may stop one by one there."""
    return any(re.search(r"\bJoin\(|\.join\b", ast.unparse(context)) for context in list_contexts(module, node))


def _out_of_memory(check: CheckContext) -> Iterator[Problem]:
    module = check.module
    for handler in module.nodes_of(ast.ExceptHandler):
        try_statement = module.parents[handler]
        text = ast.unparse(handler).lower()
        if ("out of memory" not in text and "outofmemoryerror" not in text) or not isinstance(try_statement, ast.Try):
            continue
        leaving: list[ast.stmt] = [*module.nodes_of(ast.Continue), *module.nodes_of(ast.Break)]
        if module.find_enclosing_node(handler, (ast.For, ast.While)) is None:
            leaving += module.nodes_of(ast.Return)
        exits = [statement for statement in leaving if module.is_node_within(statement, handler)]
        body = "\n".join(ast.unparse(statement) for statement in try_statement.body)
        if is_single_process_code(module, handler):
            continue
        ends = any(isinstance(part, ast.Raise) for part in ast.walk(handler)) or re.search(r"exit\(|abort", text)
        if (exits or not ends) and _TRAINS.search(body) and _trained_together(check) and not _AGREED.search(text):
            yield check.problem(
                "DT013",
                handler,
                "a rank that runs out of memory leaves here alone, and the others wait for its gradients",
                severity="warning",
            )


def _collective_after(check: CheckContext, node: ast.If) -> str | None:
    """Return a collective that the other ranks reach after an `if`, within its function or loop; None without one."""
    module = check.module
    inside = not isinstance(node.body[-1], ast.Return)
    around = list(module.chain(node))
    loops = [parent for parent, _ in around if isinstance(parent, ast.For | ast.While)]
    loop = loops[0] if inside and loops else None
    last = loop or around[-1][1]
    for name in names.COLLECTIVES:
        for call in module.calls.get(name, ()):
            below = module.is_node_within(call, last) if inside else module.scope(call) is module.scope(node)
            if call.lineno <= (node.end_lineno or 0) or not below or find_keyword_value(call, "group") is not None:
                continue
            conditions = [condition for condition in list_rank_guards(module, call) if condition.test is not node.test]
            if not conditions and _comes_after(check, node, call, loop):
                return name.rpartition(".")[2]
    return None


def _waited_for(check: CheckContext, node: ast.stmt) -> bool:
    """Return whether a loop around a statement trains a model that is wrapped somewhere."""
    loop = check.module.find_enclosing_node(node, (ast.For, ast.While))
    if loop is None or not find_backward_calls(check.module, loop):
        return False
    return _trained_together(check)


def _trained_together(check: CheckContext) -> bool:
    """Return whether the program wraps a model, or starts a process group."""
    return any(check.project.calls(check.module, name) for name in names.WRAPPERS) or check.project.distributed(
        check.module
    )


def _is_condition_agreed(check: CheckContext, node: ast.If, text: str) -> bool:
    """Return whether the ranks have agreed on the value of a condition."""
    loop = check.module.find_enclosing_node(node, (ast.For, ast.While))
    if loop is None or _AGREED.search(text) or re.search(r"grad\w*_norm|total_norm", text):
        return True  # the norm of averaged gradients is the same on all ranks
    before = [earlier for earlier in ast.walk(loop) if isinstance(earlier, ast.Call) and earlier.lineno <= node.lineno]
    return any(_AGREED.search(ast.unparse(earlier.func)) for earlier in before)


def check_swallowed_errors(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT033: failure of one rank is swallowed."""
    module = check.module
    if not module.nodes_of(ast.ExceptHandler) or not check.project.is_distributed_training(module):
        return
    for handler in module.nodes_of(ast.ExceptHandler):
        kind = ast.unparse(handler.type) if handler.type else "BaseException"
        if not re.search(r"\b(?:BaseException|Exception|RuntimeError)\b", kind):
            continue
        rest = [line for line in handler.body if not _says_only(line)]
        if _goes_on_alone(check, handler):
            yield check.problem(
                "DT033",
                handler,
                f"`except {kind}`: a rank whose process group fails continues alone, as if it were the only rank",
            )
            continue
        if not all(isinstance(line, ast.Pass | ast.Continue) for line in rest):
            continue
        try_statement = module.parents[handler]
        if isinstance(try_statement, ast.Try) and any(
            module.is_node_within(call, statement)
            for statement in try_statement.body
            for call in (
                *module.methods.get("backward", ()),
                *_find_named_optimizer_steps(check),
                *module.methods.get("train_step", ()),
            )
        ):
            yield check.problem(
                "DT033", handler, f"`except {kind}` continues after a step that failed on this rank alone"
            )


def _goes_on_alone(check: CheckContext, handler: ast.ExceptHandler) -> bool:
    """Return whether a handler hides that this rank could not join, while the program continues."""
    module = check.module
    around = module.parents[handler]
    joins = isinstance(around, ast.Try) and any(
        module.is_node_within(call, statement) for statement in around.body for call in module.calls_of(names.INIT)
    )
    ends = any(isinstance(part, ast.Raise) for part in ast.walk(handler)) or "exit" in ast.unparse(handler)
    retries = module.find_enclosing_node(handler, (ast.For, ast.While)) is not None
    again = any(module.is_node_within(call, handler) for call in module.calls_of(names.INIT))
    already = all(isinstance(line, ast.Pass) for line in handler.body) and "RuntimeError" in ast.unparse(
        handler.type or ast.Constant(value="")
    )  # torch raises this error if there is a group already
    return joins and not ends and not retries and not again and not already


def _find_named_optimizer_steps(check: CheckContext) -> list[ast.Call]:
    return [call for call in check.module.methods.get("step", ()) if "optim" in ast.unparse(call.func).lower()]


def _says_only(statement: ast.stmt) -> bool:
    """Return whether a statement only prints or logs."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return re.match(r"print|log|warn|traceback|tqdm|self\.log", ast.unparse(statement.value.func)) is not None


CHECKS = (check_left_alone, check_swallowed_errors)
