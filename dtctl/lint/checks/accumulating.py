"""Rules about gradients that several micro batches accumulate: DT009, DT077, DT078."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.edits import build_import_edits, ends_its_line, find_statement_indent
from dtctl.lint.flow import find_call_argument, find_called_function, find_value_origins, is_bound_method
from dtctl.lint.model import Edit, Problem
from dtctl.lint.source_file import (
    Function,
    SourceFile,
    find_callers,
    format_dotted_name,
    list_calls_on,
    list_contexts,
    read_last_name,
)
from dtctl.lint.wraps import find_model_wrap

_ACCUMULATES = re.compile(
    r"no_sync|requires_gradient_sync|require_backward_grad_sync|\.accumulate\([^)]|is_gradient_accum"
)
_WRAPS = (names.DDP, "accelerate.Accelerator", names.FSDP, "deepspeed.initialize")
_OPTIMIZER = re.compile(r"optim|scaler|opt\b")
_PURE = (
    ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Name, ast.Attribute, ast.Constant,
    ast.operator, ast.cmpop, ast.boolop, ast.unaryop, ast.expr_context,
)  # fmt: skip
_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Await)


def check_accumulation(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT009: accumulation without no_sync."""
    module = check.module
    if not module.methods.get("backward") or not module.methods.get("step"):
        return
    elsewhere = check.project.importers(module) if re.search("accum|micro", module.text) else ()
    programs = (module, *elsewhere)
    wraps = {name for name in _WRAPS for program in programs if check.project.calls(program, name)}
    # An engine counts micro batches itself.
    if check.project.framework_has_loop(module) or not wraps or "deepspeed.initialize" in wraps:
        return
    ddp = wraps != {names.FSDP}
    if check.project.has_text(module, _ACCUMULATES, elsewhere=True):
        return
    for call in module.methods.get("backward", ()):
        loop = module.find_enclosing_node(call, (ast.For, ast.While))
        if not isinstance(loop, ast.For | ast.While) or module.scope(loop) is not module.scope(call):
            if _some_calls_step(check, call) and not _deferred_already(check, call) and not _in_a_window(module, call):
                yield check.problem(
                    "DT009", call, "gradients are exchanged in every micro batch, and used in one of several",
                    severity=None if ddp else "info",
                )  # fmt: skip
            continue
        choice = every_few(check, loop, call)
        few = choice is not None or _micro_batches(check, loop) or _skips_the_step(check, loop, call)
        few = few and not _steps_beside(check, loop, call) and not _in_a_window(module, call)
        if not few or _deferred_already(check, call):
            continue
        edits = _build_no_sync_edits(check, loop, call, choice) if choice is not None else ()
        yield check.problem(
            "DT009", call, "gradients are exchanged in every micro batch, and used in one of several",
            severity=None if ddp else "info", edits=edits,
        )  # fmt: skip


def _some_calls_step(check: CheckContext, backward: ast.Call) -> bool:
    """Return whether the optimizer steps in only some of the calls of a backward pass's function."""
    module = check.module
    function = module.scope(backward)
    for call in _find_optimizer_steps(check):
        if module.scope(call) is not function:
            continue
        for parent, child in module.chain(call):
            if not isinstance(parent, ast.If) or child not in parent.body or module.is_node_within(backward, parent):
                continue
            if _counts_micro_batches(parent.test):
                return True
            if isinstance(parent.test, ast.Name):
                for caller, calling in find_callers(module, function)[:8]:
                    given = find_call_argument(
                        calling, function, parent.test.id, bound=is_bound_method(module, function)
                    )
                    bound = [binding.value for binding in caller.lookup(given)] if given is not None else []
                    tests = [one.test for one in bound if isinstance(one, ast.IfExp)]
                    tests += caller.values(given) if given is not None else []
                    if any(_counts_micro_batches(test) for test in tests):
                        return True
    return False


def _counts_micro_batches(test: ast.expr) -> bool:
    """Return whether a condition has the form `step % n == 0`."""
    return isinstance(test, ast.Compare) and any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(test)
    )


def _find_optimizer_steps(check: CheckContext) -> list[ast.Call]:
    """Return the calls of optimizers' step(), which are found by the name or by its origin."""
    calls = check.module.methods.get("step", ())
    return [call for call in calls if _OPTIMIZER.search(ast.unparse(call.func)) or _of_torch(check, call)]


def _of_torch(check: CheckContext, step: ast.Call) -> bool:
    owner = step.func.value if isinstance(step.func, ast.Attribute) else None
    values = [binding.value for binding in check.module.lookup(owner)] if owner is not None else []
    return bool(values) and all(
        isinstance(binding, ast.Call)
        and re.match(r"torch\.optim\.\w+\Z", check.module.name(binding.func) or "") is not None
        for binding in values
    )


def _of_another(check: CheckContext, step: ast.Call) -> bool:
    """Return whether an optimizer is known to come from outside of torch; its step may then do more."""
    owner = step.func.value if isinstance(step.func, ast.Attribute) else None
    values = find_value_origins(check.module, owner) if owner is not None else []
    made = [value.module.name(value.node.func) or format_dotted_name(value.node.func) for value in values
            if isinstance(value.node, ast.Call)]  # fmt: skip
    return any(name is None or not name.startswith("torch.optim.") for name in made)


def every_few(check: CheckContext, loop: ast.For | ast.While, backward: ast.Call) -> ast.If | None:
    """Return the `if (i + 1) % n == 0` around the optimizer's step in a loop; None if it always steps."""
    module = check.module
    for call in _find_optimizer_steps(check):
        if not module.is_node_within(call, loop):
            continue
        for parent, child in module.chain(call):
            if parent is loop:
                break
            if isinstance(parent, ast.If) and child in parent.body and not module.is_node_within(backward, parent):
                compared = parent.test.values[0] if isinstance(parent.test, ast.BoolOp) else parent.test
                if isinstance(compared, ast.Compare) and any(
                    isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(compared)
                ):
                    return parent
    return None


def _skips_the_step(check: CheckContext, loop: ast.For | ast.While, backward: ast.Call) -> bool:
    """Return whether a loop skips the step for most micro batches: `if i % n != 0: continue`."""
    module = check.module
    for statement in loop.body:
        if not isinstance(statement, ast.If) or statement.lineno < backward.lineno:
            continue
        if isinstance(statement.body[-1], ast.Continue) and _counts_micro_batches(statement.test):
            return any(
                module.is_node_within(call, loop) and call.lineno > statement.lineno
                for call in _find_optimizer_steps(check)
            )
    return False


def _in_a_window(module: SourceFile, backward: ast.Call) -> bool:
    """Return whether a helper of the project or a library handles accumulation: `with trainer.step():`."""
    calls = [context for context in list_contexts(module, backward) if isinstance(context, ast.Call)]
    return any(read_last_name(call.func) in ("step", "accumulate", "no_sync", "ddp_sync") for call in calls)


def _steps_beside(check: CheckContext, loop: ast.AST, backward: ast.Call) -> bool:
    """Return whether the optimizer steps after every backward pass, in the same block."""
    module = check.module
    block = module.block(module.statement(backward))
    later = [one.lineno for one in module.methods.get("backward", ()) if module.statement(one) in block]
    end = min((line for line in later if line > backward.lineno), default=float("inf"))
    return any(
        backward.lineno < call.lineno < end and module.statement(call) in block and module.is_node_within(call, loop)
        for call in _find_optimizer_steps(check)
        if not re.search(r"sched", ast.unparse(call.func))
    )


def _micro_batches(check: CheckContext, loop: ast.For | ast.While) -> bool:
    """Return whether a loop is `for micro in range(n)` in a loop over steps that ends with the optimizer's step."""
    module = check.module
    over_range = (
        isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and format_dotted_name(loop.iter.func) == "range"
    )
    outer = module.find_enclosing_node(loop, (ast.For, ast.While))
    if not over_range or outer is None or module.scope(outer) is not module.scope(loop) or loop not in outer.body:  # type: ignore[attr-defined]
        return False
    if module.find_calls_below(loop, "step") or module.find_calls_below(loop, "zero_grad"):
        return False
    block = module.block(loop)
    after = block[next(at for at, statement in enumerate(block) if statement is loop) + 1 :]
    return any(
        module.is_node_within(call, statement) and module.find_enclosing_node(call, (ast.For, ast.While)) is outer
        for call in _find_optimizer_steps(check)
        for statement in after
    )


def check_unscaled_too_often(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT077: unscaled in every micro batch."""
    module = check.module
    for call in module.methods.get("unscale_", ()):
        scaler = format_dotted_name(call.func.value) if isinstance(call.func, ast.Attribute) else None
        function = module.scope(call)
        later = [step for step in list_calls_on(module, scaler, "step") if step.lineno > call.lineno]
        steps = [step for step in later if module.scope(step) is function]
        if scaler is None or not steps or _find_accumulation_condition(module, call) is not None:
            continue
        choice = _find_accumulation_condition(module, steps[0])
        if choice is None or module.is_node_within(call, choice) or not _updated_within(module, scaler, choice):
            continue
        if any(child in parent.orelse for parent, child in module.chain(call) if isinstance(parent, ast.If)):
            continue
        yield check.problem(
            "DT077", call,
            f"unscale_() in every micro batch, and `{scaler}` steps in some (line {steps[0].lineno}): the next raises",
        )  # fmt: skip


def _find_accumulation_condition(module: SourceFile, call: ast.Call) -> ast.If | None:
    """Return the `if (i + 1) % n == 0` around a call within its function; None without one."""
    for parent, child in module.chain(call):
        if isinstance(parent, ast.If) and child in parent.body and _counts_micro_batches(parent.test):
            return parent
    return None


def _updated_within(module: SourceFile, scaler: str, choice: ast.If) -> bool:
    """Return whether a scaler is updated under a condition, and not elsewhere in its function."""
    function = module.scope(choice)
    updates = [call for call in list_calls_on(module, scaler, "update") if module.scope(call) is function]
    inside = [call for call in updates if module.is_node_within(call, choice)]
    others = [call for call in updates if call not in inside]
    return bool(inside) and not any(_same_way(module, choice, other) for other in others)


def _same_way(module: SourceFile, choice: ast.If, call: ast.Call) -> bool:
    """Return whether one iteration may reach both a condition and a call, which thus are not in different branches."""
    above = {id(parent): child for parent, child in module.chain(choice)}
    return not any(
        isinstance(parent, ast.If) and id(parent) in above
        and (child in parent.body) != (above[id(parent)] in parent.body)
        for parent, child in module.chain(call)
    )  # fmt: skip


def check_never_zeroed(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT078: gradients never zeroed."""
    module = check.module
    if check.project.framework_has_loop(module) or not check.project.distributed(module):
        return
    for backward in module.methods.get("backward", ()):
        function, loop = module.scope(backward), module.find_enclosing_node(backward, (ast.For, ast.While))
        if loop is None or module.scope(loop) is not function:
            continue
        steps = any(
            module.is_node_within(call, loop)
            and not call.args
            and re.search(r"optim|\bopt\b", ast.unparse(call.func))
            and not _of_another(check, call)
            for call in _find_optimizer_steps(check)
        )
        if not steps or "engine" in ast.unparse(backward.func) or _has_zeroed_gradients(module, function):
            continue
        yield check.problem("DT078", backward, "gradients are added to those of all steps before: nothing zeroes them")
        return


_ZEROES = re.compile(r"zero_grad|\.grad\s*=\s*None|grad\w*\.(?:zero_|fill_|detach_)|zero_\(\)")


def _has_zeroed_gradients(module: SourceFile, function: ast.AST) -> bool:
    """Return whether the code of a function, of its class or of a called function zeroes gradients, by its words."""
    owner = module.find_enclosing_node(function, (ast.ClassDef,))
    if _ZEROES.search(ast.unparse(owner or function)):
        return True
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        target = find_called_function(module, call)
        if target is not None and _ZEROES.search(ast.unparse(target.node)):
            return True
    return False


def _deferred_already(check: CheckContext, backward: ast.Call) -> bool:
    """Return whether the function around a backward pass, or a function that it calls, already defers the exchange."""
    module = check.module
    if not _ACCUMULATES.search(module.text):
        return False
    outer: ast.AST = module.scope(backward)
    while isinstance(module.scope(outer), Function):
        outer = module.scope(outer)
    if not isinstance(outer, Function):
        functions = {id(function) for group in module.functions.values() for function in group}
        text = "\n".join(ast.unparse(function) for function in module.tree.body if id(function) not in functions)
    else:
        text = ast.unparse(outer)
    if _ACCUMULATES.search(text):
        return True
    for name in set(re.findall(r"\b(\w+)\(", text)) & set(module.functions):
        if any(_ACCUMULATES.search(ast.unparse(function)) for function in module.functions[name]):
            return True
    return any("autocast" not in ast.unparse(context) for context in list_contexts(module, backward))


def _build_no_sync_edits(
    check: CheckContext, loop: ast.For | ast.While, backward: ast.Call, choice: ast.If
) -> tuple[Edit, ...]:
    """Return edits that put forward and backward pass under no_sync(); empty if the condition may differ there.

    Both are statements of the loop's body, followed by the `if` with the optimizer's step.
    """
    module = check.module
    last = module.statement(backward)
    if last not in loop.body or choice not in loop.body or not ends_its_line(module, last):
        return ()
    end, decided = loop.body.index(last), loop.body.index(choice)
    for begin, statement in enumerate(loop.body[: end + 1]):
        model = _model_called(check, statement)
        if model is None:
            continue
        blanks = find_statement_indent(module, statement)
        if (
            blanks is None
            or "\t" in blanks
            or not _is_condition_unchanged(check, choice.test, loop.body[begin:decided], model)
        ):
            return ()
        block = loop.body[begin : end + 1]
        if any(isinstance(part, ast.Constant | ast.JoinedStr) and part.end_lineno != part.lineno
               for enclosing in block for part in ast.walk(enclosing)):  # fmt: skip
            return ()
        needed = build_import_edits(module, "contextlib")
        if needed is None:
            return ()
        head = f"with contextlib.nullcontext() if {ast.unparse(choice.test)} else {model}.no_sync():\n{blanks}    "
        start = (statement.lineno, statement.col_offset)
        rest = range(statement.lineno + 1, (last.end_lineno or last.lineno) + 1)
        moved = [Edit((number, 0), (number, 0), "    ") for number in rest if module.lines[number - 1].strip()]
        return (Edit(start, start, head), *moved, *needed)
    return ()


def _model_called(check: CheckContext, statement: ast.stmt) -> str | None:
    """Return the name of the DDP model that a statement certainly calls; None if there is none."""
    for part in ast.walk(statement):
        if isinstance(part, ast.Call):
            wrap = find_model_wrap(check.module, part.func, part)
            if wrap is not None and wrap.kind == "ddp":
                return format_dotted_name(part.func)
    return None


def _is_condition_unchanged(check: CheckContext, test: ast.expr, before: Sequence[ast.stmt], model: str) -> bool:
    """Return whether a condition has the same value before some statements, since these change no part of it."""
    sized = [part for part in ast.walk(test) if isinstance(part, ast.Call)]
    if any(
        format_dotted_name(part.func) != "len"
        or len(part.args) != 1
        or part.keywords
        or not format_dotted_name(part.args[0])
        for part in sized
    ):
        return False
    if not all(isinstance(part, _PURE) or part in sized for part in ast.walk(test)):
        return False
    names = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
    attributes = {part.attr for part in ast.walk(test) if isinstance(part, ast.Attribute)}
    owners = {
        part.value.id for part in ast.walk(test) if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
    }
    owners |= {format_dotted_name(part.args[0]) or "" for part in sized}
    if any(re.search(rf"\b(?:global|nonlocal)\b[^\n]*\b{name}\b", check.module.text) for name in names):
        return False
    parts = [part for statement in before for part in ast.walk(statement)]
    return not any(_can_change_names(part, names, attributes, owners, model) for part in parts)


def _can_change_names(part: ast.AST, names: set[str], attributes: set[str], owners: set[str], model: str) -> bool:
    """Return whether a node may change the value of one of these names or attributes.

    Args:
        part: node of the syntax tree.
        names: names of variables.
        attributes: names of attributes, of any object.
        owners: names of objects, which may change if a method is called on them or a function gets them.
        model: name of the model; a call of the model changes none of these.
    """
    if isinstance(part, _DEFINES):
        return True
    if isinstance(part, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return part.name in names
    if isinstance(part, ast.Name):
        return part.id in names and not isinstance(part.ctx, ast.Load)
    if isinstance(part, ast.Attribute):
        return part.attr in attributes and not isinstance(part.ctx, ast.Load)
    if not isinstance(part, ast.Call) or format_dotted_name(part.func) == model:
        return False
    passed = [
        format_dotted_name(argument) for argument in (*part.args, *(argument.value for argument in part.keywords))
    ]
    owner = format_dotted_name(part.func.value) if isinstance(part.func, ast.Attribute) else None
    return owner in owners or any(argument in owners for argument in passed)


CHECKS = (check_accumulation, check_unscaled_too_often, check_never_zeroed)
