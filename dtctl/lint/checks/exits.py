"""Rules about ranks that diverge from the others: DT013, DT033, DT034."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.flow import function_of
from dtctl.lint.model import Problem
from dtctl.lint.ranks import RankGuard, for_one_process, guard, guards, leaves
from dtctl.lint.source_file import SourceFile, constant, key, keyword

_NOT_FINITE = re.compile(r"\b(?:isnan|isinf|isfinite)\b")
_TRAIN_NAMES = re.compile(r"train|fit|epoch|step|run|update|optimi|learn", re.IGNORECASE)
_PATIENCE = re.compile(
    r"patien|(?:approx|target)_?kl|early_?stop|not_improved|no_improve|stop_count|should_stop|stopper|bad_epochs",
    re.IGNORECASE,
)
_SIZES = re.compile(r"batch_?size|epoch|step|iter|_idx\b|index", re.IGNORECASE)
"""Values that are the same on all ranks, or meant to be."""
_READS = re.compile(r"loader|batch|dataset|\bdata\b|\bdl\b|stream|reader|iterator", re.IGNORECASE)
"""Iterables of a loop over samples."""
_TRAINS = re.compile(r"train|backward|optimizer\.step|fit\b")
_AGREED = re.compile(r"all_reduce|all_gather|reduce_dict|broadcast|reduce_tensor|reduce_loss|gather_for_metrics")
_FETCHES = frozenset(
    "load_dataset snapshot_download hf_hub_download from_pretrained urlretrieve download download_and_prepare "
    "download_url download_data prepare_data preprocess tokenize build_dataset load_from_hub map".split()
)


def left_alone(check: Check) -> Iterator[Problem]:
    """DT013."""
    module = check.module
    if not module.trains:
        return
    reported: set[ast.stmt] = set()
    for node in module.nodes_of(ast.If):
        if not leaves(node.body) or node.orelse:
            continue
        condition = guard(module, node.test)
        if condition is not None:
            alone = (
                condition.sure and condition.sure_not and not _meets(check, node) and not for_one_process(module, node)
            )
            collective = _collective_after(check, node) if alone else None
            if collective is not None:
                message = f"some ranks leave here, and {collective} further down waits for them"
                reported.add(node.body[-1])
                yield check.problem("DT013", node.body[-1], message)
            continue
        text = ast.unparse(node.test)
        own_batch = (_NOT_FINITE.search(text) or _of_its_batch(check, node)) and not isinstance(
            node.body[-1], ast.Return
        )
        if own_batch and _waited_for(check, node) and not _agreed(check, node, text):
            yield check.problem(
                "DT013",
                node.body[-1],
                f"a rank whose `{text}` holds leaves here alone, and the others wait for its gradients",
                severity="warning",
            )
    yield from _out_of_memory(check)
    yield from _stopped_early(check)
    yield from (problem for statement, problem in _left_loop(check) if statement not in reported)


def _of_its_batch(check: Check, node: ast.If) -> bool:
    """Return whether a condition skips a batch for what is in it: every rank has another one."""
    module = check.module
    loop = module.enclosing(node, (ast.For, ast.While))
    if not isinstance(node.body[-1], ast.Continue) or not isinstance(loop, ast.For) or _joined(check, node):
        return False
    if not any(_comes_after(check, node, call, loop) for call in backward_passes(module, loop)):
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
        if isinstance(statement, ast.Assign) and _names(statement.value) & own:
            own |= {name for target in statement.targets for name in _names(target)}
    return bool(_names(node.test) & own) and _SIZES.search(ast.unparse(node.test)) is None


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _meets(check: Check, node: ast.If) -> bool:
    """Return whether the ranks that leave call a collective before they do: the others may mean that one."""
    calls = check.module.calls
    return any(check.module.within(call, statement) for name in names.COLLECTIVES for call in calls.get(name, ())
               for statement in node.body)  # fmt: skip


def _left_loop(check: Check) -> Iterator[tuple[ast.stmt, Problem]]:
    """Yield each `break` and `continue` that depends on the rank, in a loop whose backward pass needs all ranks."""
    module = check.module
    leaving: list[ast.stmt] = [
        *module.nodes_of(ast.Break), *module.nodes_of(ast.Continue), *module.nodes_of(ast.Return),
        *(module.statement(call) for call in _ends_without_error(module)),
    ]  # fmt: skip
    decided = [(leave, condition) for leave in leaving if (condition := _decided_by_rank(check, leave)) is not None]
    for leave, condition in decided:
        loop = module.enclosing(leave, (ast.For, ast.While))
        if loop is None or not _waited_for(check, leave) or _joined(check, leave):
            continue
        if module.scope(loop) is not module.scope(leave):
            continue
        if any(
            type(other) is type(leave)
            and other_condition.at_zero != condition.at_zero
            and module.enclosing(other, (ast.For, ast.While)) is loop
            for other, other_condition in decided
        ):
            continue
        passes = [
            call
            for call in backward_passes(module, loop)
            if all(condition_before.early for condition_before in guards(module, call))
        ]
        if isinstance(leave, ast.Continue):
            passes = [call for call in passes if _comes_after(check, leave, call, loop)]
        if passes:
            yield leave, check.problem(
                "DT013", leave, "some ranks leave here, and the others wait for their gradients",
                # The others may return there too; a launcher may see that a process has ended.
                severity="warning" if isinstance(leave, ast.Return | ast.Expr) else None,
            )  # fmt: skip


def _ends_without_error(module: SourceFile) -> list[ast.Call]:
    """Return the calls that end the process with exit code 0: no launcher ends the others then."""
    calls = [*module.methods.get("exit", ()), *module.methods.get("quit", ()), *module.methods.get("_exit", ())]
    return [
        call
        for call in calls
        if key(call.func) in ("exit", "quit", "sys.exit", "os._exit")
        and (not call.args or constant(call.args[0]) == 0)
        and isinstance(module.parents.get(call), ast.Expr)
    ]


def backward_passes(module: SourceFile, loop: ast.AST) -> list[ast.Call]:
    """Return the calls below a loop that make a backward pass, themselves or in a function of the project."""
    fact = ("backward", loop)
    cached = module.facts.get(fact)
    if cached is None:
        found = list(module.below(loop, "backward"))
        for name in module.methods:
            if not _TRAIN_NAMES.search(name):
                continue
            for call in module.below(loop, name):
                target = function_of(module, call)
                if target is not None and target.module.below(target.node, "backward"):
                    found.append(call)
        cached = module.facts[fact] = found
    return cached  # type: ignore[return-value]  # facts of this kind are such lists


def _stopped_early(check: Check) -> Iterator[Problem]:
    """Loops over epochs that each rank leaves by its own figures: early stopping without an agreement."""
    module = check.module
    if not check.project.distributed(module) or check.project.framework(module):
        return
    for leave in [*module.nodes_of(ast.Break), *module.nodes_of(ast.Return)]:
        loop = module.enclosing(leave, (ast.For, ast.While))
        if loop is None or module.scope(loop) is not module.scope(leave) or not backward_passes(module, loop):
            continue
        test = next((parent.test for parent, child in module.chain(leave)
                     if isinstance(parent, ast.If) and child is not parent.test and module.within(parent, loop)
                     and _PATIENCE.search(ast.unparse(parent.test))), None)  # fmt: skip
        if test is None or _agreed_on(module, loop, test) or any(True for _ in guards(module, leave)):
            continue
        called = [function_of(module, call) for call in ast.walk(loop) if isinstance(call, ast.Call)]
        if any(target is not None and _AGREED.search(ast.unparse(target.node)) for target in called):
            continue
        yield check.problem(
            "DT013", leave,
            f"each rank decides on `{ast.unparse(test)}` by its own figures, and the others wait for its gradients",
            severity="warning",
        )  # fmt: skip


def _agreed_on(module: SourceFile, loop: ast.AST, test: ast.expr) -> bool:
    """Return whether the ranks exchange something in the loop of a condition; gradients alone do not count."""
    about = _names(test) | {name for part in ast.walk(test) if isinstance(part, ast.Name | ast.Attribute)
                            for binding in module.lookup(part) if binding.value is not None
                            for name in _names(binding.value)}  # fmt: skip
    for call in (part for part in ast.walk(loop) if isinstance(part, ast.Call)):
        if not _AGREED.search(ast.unparse(call.func)):
            continue
        gradients = call.args and re.search(r"grad", ast.unparse(call.args[0]))
        if not gradients or _names(call) & about:
            return True
    return False


def _decided_by_rank(check: Check, leave: ast.stmt) -> RankGuard | None:
    """Return the condition on the rank inside of a loop under which a statement leaves it."""
    module = check.module
    loop = module.enclosing(leave, (ast.For, ast.While))
    for condition in guards(module, leave):
        inside = loop is not None and condition.test is not loop and module.within(condition.test, loop)
        if inside and condition.sure and not condition.early and condition.test is not getattr(loop, "test", None):
            return condition
    return None


def _comes_after(check: Check, leave: ast.stmt, call: ast.Call, loop: ast.AST) -> bool:
    """Return whether a call is in a statement after this one, in its block or one around it, up to a loop."""
    module = check.module
    for parent, child in module.chain(leave):
        block = module.block(child) if isinstance(child, ast.stmt) else []
        at = next((index for index, statement in enumerate(block) if statement is child), len(block))
        if any(module.within(call, later) for later in block[at + 1 :]):
            return True
        if parent is loop:
            return False
    return False


def _joined(check: Check, node: ast.AST) -> bool:
    """Return whether `with model.join()` is around a node: ranks may stop one by one there."""
    return any(
        isinstance(parent, ast.With) and any(".join(" in ast.unparse(item.context_expr) + "(" for item in parent.items)
        for parent, _ in check.module.chain(node)
    )


def _out_of_memory(check: Check) -> Iterator[Problem]:
    module = check.module
    for handler in module.nodes_of(ast.ExceptHandler):
        try_statement = module.parents[handler]
        text = ast.unparse(handler).lower()
        if ("out of memory" not in text and "outofmemoryerror" not in text) or not isinstance(try_statement, ast.Try):
            continue
        exits = [
            statement
            for statement in (
                *module.nodes_of(ast.Continue),
                *module.nodes_of(ast.Break),
                *(one for one in module.nodes_of(ast.Return) if not module.enclosing(handler, (ast.For, ast.While))),
            )
            if module.within(statement, handler)
        ]
        body = "\n".join(ast.unparse(statement) for statement in try_statement.body)
        if for_one_process(module, handler):
            continue
        ends = any(isinstance(part, ast.Raise) for part in ast.walk(handler)) or re.search(r"exit\(|abort", text)
        if (exits or not ends) and _TRAINS.search(body) and _trained_together(check) and not _AGREED.search(text):
            yield check.problem(
                "DT013",
                handler,
                "a rank that runs out of memory leaves here alone, and the others wait for its gradients",
                severity="warning",
            )


def _collective_after(check: Check, node: ast.If) -> str | None:
    """A collective that the remaining ranks reach: in what follows the `if`, up to the end of its function or loop."""
    module = check.module
    inside = not isinstance(node.body[-1], ast.Return)
    last: ast.AST = node
    for parent, child in module.chain(node):
        if inside and isinstance(parent, ast.For | ast.While):
            last = parent
            break
        last = child
    for name in names.COLLECTIVES:
        for call in module.calls.get(name, ()):
            below = module.within(call, last) if inside else module.scope(call) is module.scope(node)
            if call.lineno <= (node.end_lineno or 0) or not below or keyword(call, "group") is not None:
                continue
            conditions = [condition for condition in guards(module, call) if condition.test is not node.test]
            if not conditions and _follows(check, node, call):
                return name.rpartition(".")[2]
    return None


def _follows(check: Check, node: ast.If, call: ast.Call) -> bool:
    """Return whether a call is in a statement that comes after `node` in its block or in a block around it."""
    module = check.module
    for parent, child in module.chain(node):
        if isinstance(child, ast.stmt):
            block = module.block(child)
            at = next((index for index, statement in enumerate(block) if statement is child), len(block))
            if any(module.within(call, later) for later in block[at + 1 :]):
                return True
        if isinstance(parent, ast.For | ast.While) and not isinstance(node.body[-1], ast.Return):
            return False
    return False


def _waited_for(check: Check, node: ast.stmt) -> bool:
    """Return whether a loop around it trains a model that is wrapped somewhere."""
    loop = check.module.enclosing(node, (ast.For, ast.While))
    if loop is None or not backward_passes(check.module, loop):
        return False
    return _trained_together(check)


def _trained_together(check: Check) -> bool:
    """Return whether the program wraps a model somewhere, or starts a process group."""
    return any(check.project.calls(check.module, name) for name in names.WRAPPERS) or check.project.distributed(
        check.module
    )


def _agreed(check: Check, node: ast.If, text: str) -> bool:
    """Return whether the ranks have agreed on what is tested."""
    loop = check.module.enclosing(node, (ast.For, ast.While))
    if loop is None or _AGREED.search(text):
        return True
    before = [earlier for earlier in ast.walk(loop) if isinstance(earlier, ast.Call) and earlier.lineno <= node.lineno]
    return any(_AGREED.search(ast.unparse(earlier.func)) for earlier in before)


def swallowed(check: Check) -> Iterator[Problem]:
    """DT033."""
    module = check.module
    if not module.nodes_of(ast.ExceptHandler) or not check.project.trains(module):
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
                f"`except {kind}`: a rank whose process group fails goes on alone, as if it were the only one",
            )
            continue
        if not all(isinstance(line, ast.Pass | ast.Continue) for line in rest):
            continue
        try_statement = module.parents[handler]
        if isinstance(try_statement, ast.Try) and any(
            module.within(call, statement)
            for statement in try_statement.body
            for call in (*module.methods.get("backward", ()), *_steps(check), *module.methods.get("train_step", ()))
        ):
            yield check.problem(
                "DT033", handler, f"`except {kind}` continues after a step that failed on this rank alone"
            )


def _goes_on_alone(check: Check, handler: ast.ExceptHandler) -> bool:
    """Return whether a handler hides that this rank could not join, and the program continues."""
    module = check.module
    around = module.parents[handler]
    joins = isinstance(around, ast.Try) and any(
        module.within(call, statement) for statement in around.body for call in module.calls_of(names.INIT)
    )
    ends = any(isinstance(part, ast.Raise) for part in ast.walk(handler)) or "exit" in ast.unparse(handler)
    retries = module.enclosing(handler, (ast.For, ast.While)) is not None
    again = any(module.within(call, handler) for call in module.calls_of(names.INIT))
    already = all(isinstance(line, ast.Pass) for line in handler.body) and "RuntimeError" in ast.unparse(
        handler.type or ast.Constant(value="")
    )  # raised where there is a group already
    return joins and not ends and not retries and not again and not already


def _steps(check: Check) -> list[ast.Call]:
    return [call for call in check.module.methods.get("step", ()) if "optim" in ast.unparse(call.func).lower()]


def _says_only(statement: ast.stmt) -> bool:
    """Return whether a statement only prints or logs."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return re.match(r"print|log|warn|traceback|tqdm|self\.log", ast.unparse(statement.value.func)) is not None


def long_before_barrier(check: Check) -> Iterator[Problem]:
    """DT034."""
    module = check.module
    barriers = module.calls.get("torch.distributed.barrier", [])
    if not barriers or not module.trains:
        return
    for source in check.project.having(module, "init_process_group"):
        if any(keyword(call, "timeout") is not None for call in source.calls_of(names.INIT)):
            return
    for name in _FETCHES & set(module.methods):
        for call in module.methods[name]:
            condition = next(guards(module, call), None)
            if condition is None or condition.early or not condition.at_zero:
                continue
            scope = module.scope(call)
            if any(module.scope(source) is scope and source.lineno > call.lineno for source in barriers):
                yield check.problem("DT034", call, f"the other ranks wait in a barrier while one does `{name}`")


CHECKS = (left_alone, swallowed, long_before_barrier)
