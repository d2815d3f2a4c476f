"""The rule about gradients that are exchanged more often than they are used: DT009."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.edits import ends_its_line, imported, indent
from dtctl.lint.model import Edit, Problem
from dtctl.lint.source_file import Function, key
from dtctl.lint.wraps import wrapped

_ACCUMULATES = re.compile(r"no_sync|requires_gradient_sync|require_backward_grad_sync|\.accumulate\(|is_gradient_accum")
_OPTIMIZER = re.compile(r"optim|scaler|opt\b")
_PURE = (
    ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Name, ast.Attribute, ast.Constant,
    ast.operator, ast.cmpop, ast.boolop, ast.unaryop, ast.expr_context,
)  # fmt: skip
_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Await)


def accumulation(check: Check) -> Iterator[Problem]:
    """DT009."""
    module = check.module
    if not module.methods.get("backward") or not module.methods.get("step"):
        return
    ddp = check.project.calls(module, names.DDP)
    if check.project.framework(module) or not (ddp or check.project.calls(module, names.FSDP)):
        return
    if check.project.says(module, _ACCUMULATES, elsewhere=True):
        return
    for call in module.methods.get("backward", ()):
        loop = module.enclosing(call, (ast.For, ast.While))
        if not isinstance(loop, ast.For | ast.While) or module.scope(loop) is not module.scope(call):
            continue
        choice = every_few(check, loop, call)
        if (choice is None and not _micro_batches(check, loop)) or _deferred_already(check, call):
            continue
        edits = _deferred(check, loop, call, choice) if choice is not None else ()
        yield check.problem(
            "DT009", call, "gradients are exchanged in every micro batch, and used in one of several",
            severity=None if ddp else "info", edits=edits,
        )  # fmt: skip


def _steps(check: Check) -> list[ast.Call]:
    """Steps of optimizers: by their name, or by what the name was set to."""
    calls = check.module.methods.get("step", ())
    return [call for call in calls if _OPTIMIZER.search(ast.unparse(call.func)) or _of_torch(check, call)]


def _of_torch(check: Check, step: ast.Call) -> bool:
    owner = step.func.value if isinstance(step.func, ast.Attribute) else None
    values = [binding.value for binding in check.module.lookup(owner)] if owner is not None else []
    return bool(values) and all(
        isinstance(binding, ast.Call)
        and re.match(r"torch\.optim\.\w+\Z", check.module.name(binding.func) or "") is not None
        for binding in values
    )


def every_few(check: Check, loop: ast.For | ast.While, backward: ast.Call) -> ast.If | None:
    """The `if (i + 1) % n == 0` under which the optimizer of a loop steps; None if it steps every time."""
    module = check.module
    for call in _steps(check):
        if not module.within(call, loop):
            continue
        for parent, child in module.chain(call):
            if parent is loop:
                break
            if isinstance(parent, ast.If) and child in parent.body and not module.within(backward, parent):
                compared = parent.test.values[0] if isinstance(parent.test, ast.BoolOp) else parent.test
                if isinstance(compared, ast.Compare) and any(
                    isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(compared)
                ):
                    return parent
    return None


def _micro_batches(check: Check, loop: ast.For | ast.While) -> bool:
    """Whether a loop is `for micro in range(n)` in a loop over steps, and the optimizer steps after it."""
    module = check.module
    over_range = isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and key(loop.iter.func) == "range"
    outer = module.enclosing(loop, (ast.For, ast.While))
    if not over_range or outer is None or module.scope(outer) is not module.scope(loop) or loop not in outer.body:  # type: ignore[attr-defined]
        return False
    if module.below(loop, "step") or module.below(loop, "zero_grad"):
        return False
    block = module.block(loop)
    after = block[next(at for at, statement in enumerate(block) if statement is loop) + 1 :]
    return any(
        module.within(call, statement) and module.enclosing(call, (ast.For, ast.While)) is outer
        for call in _steps(check)
        for statement in after
    )


def _deferred_already(check: Check, backward: ast.Call) -> bool:
    """Whether the function around a backward pass, or one that it calls here, defers the exchange in some way."""
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
    return any(
        isinstance(parent, ast.With)
        and not all("autocast" in ast.unparse(function.context_expr) for function in parent.items)
        for parent, _ in module.chain(backward)
    )


def _deferred(check: Check, loop: ast.For | ast.While, backward: ast.Call, choice: ast.If) -> tuple[Edit, ...]:
    """The edits that put forward and backward pass under no_sync(); none where the condition may differ there.

    Both stand in the loop's body, and so does the `if` with the optimizer's step, further down.
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
        blanks = indent(module, statement)
        if blanks is None or "\t" in blanks or not _settled(check, choice.test, loop.body[begin:decided], model):
            return ()
        block = loop.body[begin : end + 1]
        if any(isinstance(part, ast.Constant | ast.JoinedStr) and part.end_lineno != part.lineno
               for enclosing in block for part in ast.walk(enclosing)):  # fmt: skip
            return ()
        needed = imported(module, "contextlib")
        if needed is None:
            return ()
        head = f"with contextlib.nullcontext() if {ast.unparse(choice.test)} else {model}.no_sync():\n{blanks}    "
        start = (statement.lineno, statement.col_offset)
        rest = range(statement.lineno + 1, (last.end_lineno or last.lineno) + 1)
        moved = [Edit((number, 0), (number, 0), "    ") for number in rest if module.lines[number - 1].strip()]
        return (Edit(start, start, head), *moved, *needed)
    return ()


def _model_called(check: Check, statement: ast.stmt) -> str | None:
    """The DDP model that a statement surely calls; None if it calls none."""
    for part in ast.walk(statement):
        if isinstance(part, ast.Call):
            wrap = wrapped(check.module, part.func, part)
            if wrap is not None and wrap.kind == "ddp":
                return key(part.func)
    return None


def _settled(check: Check, test: ast.expr, before: Sequence[ast.stmt], model: str) -> bool:
    """Whether a condition has its value already before these statements: it calls nothing, they change nothing."""
    sized = [part for part in ast.walk(test) if isinstance(part, ast.Call)]
    if any(key(part.func) != "len" or len(part.args) != 1 or part.keywords or not key(part.args[0]) for part in sized):
        return False
    if not all(isinstance(part, _PURE) or part in sized for part in ast.walk(test)):
        return False
    names = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
    attributes = {part.attr for part in ast.walk(test) if isinstance(part, ast.Attribute)}
    owners = {
        part.value.id for part in ast.walk(test) if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
    }
    owners |= {key(part.args[0]) or "" for part in sized}
    if any(re.search(rf"\b(?:global|nonlocal)\b[^\n]*\b{name}\b", check.module.text) for name in names):
        return False
    parts = [part for statement in before for part in ast.walk(statement)]
    return not any(_changes(part, names, attributes, owners, model) for part in parts)


def _changes(part: ast.AST, names: set[str], attributes: set[str], owners: set[str], model: str) -> bool:
    """Whether a piece of code may give one of these names or attributes another value.

    Args:
        part: of the code.
        names: names.
        attributes: names of attributes, of whatever object.
        owners: names of objects that a method of theirs, or a function that gets them, may change.
        model: whose call is known to change none.
    """
    if isinstance(part, _DEFINES):
        return True
    if isinstance(part, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return part.name in names
    if isinstance(part, ast.Name):
        return part.id in names and not isinstance(part.ctx, ast.Load)
    if isinstance(part, ast.Attribute):
        return part.attr in attributes and not isinstance(part.ctx, ast.Load)
    if not isinstance(part, ast.Call) or key(part.func) == model:
        return False
    passed = [key(argument) for argument in (*part.args, *(argument.value for argument in part.keywords))]
    owner = key(part.func.value) if isinstance(part.func, ast.Attribute) else None
    return owner in owners or any(argument in owners for argument in passed)


CHECKS = (accumulation,)
