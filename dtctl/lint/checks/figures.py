"""Rule about figures that one rank has computed alone: DT018."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.collectives import collective_called
from dtctl.lint.flow import (
    find_call_argument,
    find_called_function,
    find_value_origins,
    is_bound_method,
    resolve_callee,
)
from dtctl.lint.model import Problem
from dtctl.lint.ranks import is_launcher_code, list_rank_guards, resolve_rank_guard
from dtctl.lint.source_file import Function, SourceFile, format_dotted_name, read_constant_value, read_node_position

_FIGURE = re.compile(
    r"(?:^|_)(?:loss(?:es|f)?|acc|accuracy|metrics?|correct|perplexity|ppl|m?iou|psnr|dice|top\d?|prec\d?|f1)(?:_|$|\d)",
    re.IGNORECASE,
)
_SHOWS = frozenset(
    (
        "print info log add_scalar log_metric write set_postfix set_description add_scalars log_metrics set_postfix_str"
    ).split()
)
_SHOWING = re.compile(
    r"^(?:print|log)_|_(?:print|log)$|^_?(?:write|log|add)_(?:summary|scalars?|metrics?)$|^summarize$"
)
"""Pattern of helpers that print or log."""
_REDUCES = re.compile(
    r"all_reduce|reduce|gather|average|sync(?!hronize\()|global_avg|avg_meter|mean_across|dist_(?:mean|avg|sum|max|min)\b|broadcast(?!_buffers)|metric_logger|compute\("
)
_METER = ("avg", "val", "average", "mean", "median")
_DEPTH = 2
"""Number of calls through which a figure is followed."""


@dataclass(frozen=True, slots=True)
class _RankFigure:
    """Figure of one rank at the place where it is shown, with the line that computes it."""

    text: str
    line: int


def check_own_figure(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT018: figure of rank 0 alone."""
    module = check.module
    if check.project.framework_has_loop(module):
        return
    distributed = check.project.distributed(module)
    known = distributed or (module.trains and check.project.calls(module, names.SAMPLER))
    if not known and not module.methods.get("backward"):
        return
    reported: set[tuple[ast.AST, str]] = set()
    calls = [
        call for name in module.methods if name in _SHOWS or _SHOWING.search(name) for call in module.methods[name]
    ]
    for call in sorted(calls, key=read_node_position):
        if _no_show(call) or is_launcher_code(module, call) or _says_why_it_ends(module, call):
            continue
        condition = resolve_rank_guard(module, call)
        if (format_dotted_name(call.func) or "").rpartition(".")[2] not in _SHOWS:
            shown = _shown_by(module, call)
            if shown is None:
                continue
            condition = condition or next(list_rank_guards(*shown), None)
        # Without other evidence for several ranks, a condition on the rank is required.
        if (condition is None and not known) or (condition is not None and not condition.at_zero):
            continue
        figure = next(_find_shown_figures(check, call), None)
        if figure is None or (condition is None and "rank" in ast.unparse(call).lower()):
            continue
        if (module.scope(call), figure.text) in reported:
            continue
        reported.add((module.scope(call), figure.text))
        whose = "rank 0" if condition is not None else "this rank"
        at = f" (line {figure.line})" if figure.line and figure.line != call.lineno else ""
        yield check.problem("DT018", call, f"`{figure.text}`{at} is that of {whose} alone")


def _shown_by(module: SourceFile, call: ast.Call) -> tuple[SourceFile, ast.Call] | None:
    """Return the call in a function of the project that prints its argument; None without one."""
    target = find_called_function(module, call)
    if target is None or not isinstance(target.node, Function):
        return None
    parameters = {one.arg for one in target.node.args.args}
    for name in _SHOWS & set(target.module.methods):
        for inside in target.module.find_calls_below(target.node, name):
            if any(isinstance(part, ast.Name) and part.id in parameters for part in ast.walk(inside)):
                return target.module, inside
    return None


def _no_show(call: ast.Call) -> bool:
    """Return whether a call is a mathematical function: math.log, torch.log."""
    name = format_dotted_name(call.func) or ""
    return name.rpartition(".")[2] == "log" and name.split(".")[0] in ("math", "torch", "np", "numpy", "F")


def _says_why_it_ends(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a figure is shown because it is not finite, so that the figure of this rank is meant."""
    return any(
        isinstance(parent, ast.If) and re.search(r"isfinite|isnan|isinf", ast.unparse(parent.test))
        for parent, _ in module.chain(call)
    )


def _find_shown_figures(check: CheckContext, call: ast.Call) -> Iterator[_RankFigure]:
    """Yield the figures of this rank that a call shows, in its arguments or in texts and tables made before."""
    module = check.module
    for part in ast.walk(call):
        if (line := _own_line(check, part)) is not None:
            yield _RankFigure(ast.unparse(part), line)
    for part in ast.walk(call):
        if not isinstance(part, ast.Name) or not isinstance(part.ctx, ast.Load):
            continue
        for binding in module.bindings.get((module.scope(part), part.id), ()):
            if binding.value is None or binding.line > call.lineno or not _is_text_or_table(binding.value):
                continue
            for inner in ast.walk(binding.value):
                if _own_line(check, inner) is not None:
                    yield _RankFigure(ast.unparse(inner), read_node_position(inner)[0])


def _is_text_or_table(value: ast.expr) -> bool:
    """Return whether a value is a text or a dictionary with other values."""
    if isinstance(value, ast.JoinedStr | ast.Dict):
        return True
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Mod | ast.Add) and (
            _is_text_or_table(value.left) or isinstance(read_constant_value(value.left), str)
        )
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "format"


def _own_line(check: CheckContext, node: ast.AST, depth: int = _DEPTH) -> int | None:
    """Return the line that computes a figure of this rank without a reduction; None for other figures."""
    if isinstance(node, ast.Attribute) and node.attr in _METER:
        name = format_dotted_name(node.value)
        own = name is not None and _FIGURE.search(name.rpartition(".")[2]) and not _reduced_meter(check, node.value)
        return node.lineno if own and name and not _reduced_near(check, node, name) else None
    if isinstance(node, ast.Subscript) and _FIGURE.search(str(read_constant_value(node.slice) or "")):
        return _line_of_item(check, node)
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or not _FIGURE.search(node.id):
        return None
    module, scope = check.module, check.module.scope(node)
    above = module.parents.get(node)
    if isinstance(above, ast.Attribute) and above.attr in _METER:
        return None  # the value of a meter is what counts, not its name
    bindings = module.lookup(node)
    given = [binding for binding in bindings if isinstance(binding.statement, ast.arg)]
    bound = [(binding.line, value) for binding in bindings if (value := binding.value or binding.whole) is not None]
    values = [(line, value) for line, value in bound if not _begins_empty(value)]
    around = module.find_enclosing_node(node, (ast.For, ast.While))
    values = [
        (line, value)
        for line, value in values
        if line <= node.lineno or (around is not None and module.is_node_within(value, around))
    ] or values
    added = [
        one
        for one in module.nodes_of(ast.AugAssign)
        if format_dotted_name(one.target) == node.id and module.scope(one) is scope
    ]
    sums = [one.lineno for one in added]
    appended = [
        call
        for call in module.methods.get("append", ())
        if isinstance(call.func, ast.Attribute) and format_dotted_name(call.func.value) == node.id
    ]
    if not values and not sums and not appended:
        return _line_at_callers(check, node, depth) if given and depth else None
    made = [value.func for _, value in values if isinstance(value, ast.Call)]
    if any(
        (format_dotted_name(made_by) or "").rpartition(".")[2].endswith("Meter") for made_by in made
    ) and _reduced_meter(check, node):
        return None
    texts = [ast.unparse(value) for _, value in values] + [ast.unparse(call) for call in appended]
    if _REDUCES.search(" ".join(texts)) or _reduced_near(check, node, node.id):
        return None
    parts = [*(value for _, value in values), *appended, *(one.value for one in added)]
    if not all(_is_computed_alone(module, part) for part in parts):
        return None
    before = [line for line in (*(line for line, _ in values), *sums) if line <= node.lineno]
    return max(before, default=node.lineno)


def _begins_empty(value: ast.expr) -> bool:
    """Return whether a value is only the start of a sum or a list."""
    return isinstance(value, ast.Constant) or (isinstance(value, ast.List) and not value.elts)


def _line_of_item(check: CheckContext, node: ast.Subscript) -> int | None:
    """Return the line for `metrics["loss"]`, an item of a dictionary that is written out here or in a function."""
    wanted, name = read_constant_value(node.slice), format_dotted_name(node.value)
    for one in check.module.nodes_of(ast.AugAssign):
        target = one.target
        if isinstance(target, ast.Subscript) and (
            format_dotted_name(target.value),
            read_constant_value(target.slice),
        ) == (name, wanted):
            return (
                None
                if _REDUCES.search(ast.unparse(one.value)) or not _is_computed_alone(check.module, one.value)
                else one.lineno
            )
    for value in find_value_origins(check.module, node.value):
        if not isinstance(value.node, ast.Dict) or value.item is not None:
            return None
        items = {
            read_constant_value(name): item
            for name, item in zip(value.node.keys, value.node.values, strict=True)
            if name
        }
        item = items.get(wanted)
        other = CheckContext(value.module, check.project, check.cluster)
        lines = [line for part in ast.walk(item) if (line := _own_line(other, part, 0))] if item is not None else []
        if lines:
            return read_node_position(node)[0] if value.module is not check.module else lines[0]
    return None


def _line_at_callers(check: CheckContext, node: ast.Name, depth: int) -> int | None:
    """Return the line for a parameter, if all callers pass a figure of their own rank."""
    module, function = check.module, check.module.scope(node)
    if not isinstance(function, Function) or module.neighbours is None:
        return None
    lines = []
    calls = module.neighbours.callers(module, function)
    for caller, call in calls[:6]:
        passed = find_call_argument(call, function, node.id, bound=is_bound_method(module, function))
        parts = list(ast.walk(passed)) if passed is not None else []
        if passed is None or _REDUCES.search(ast.unparse(passed)):
            return None
        other = CheckContext(caller, check.project, check.cluster)
        found = next((line for part in parts if (line := _own_line(other, part, depth - 1)) is not None), None)
        if found is None:
            return None
        lines.append(found if caller is module else node.lineno)
    return lines[0] if lines else None


def _is_computed_alone(module: SourceFile, value: ast.expr) -> bool:
    """Return whether this rank computes a value alone: no function of the project that it calls reduces anything."""
    for part in ast.walk(value):
        if isinstance(part, ast.Call):
            target = find_called_function(module, part)
            if target is not None and isinstance(target.node, Function):
                text = ast.unparse(target.node)
                if _REDUCES.search(text) or collective_called(module, part):
                    return False
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            bound = [one.value or one.whole for one in module.lookup(part)[-4:]]
            if any(one is not None and one is not value and _has_reduction(module, one) for one in bound):
                return False
    return not isinstance(value, ast.List | ast.Dict | ast.JoinedStr | ast.ListComp)


def _has_reduction(module: SourceFile, value: ast.expr) -> bool:
    """Return whether an expression reduces, by its words or those of the called function."""
    if _REDUCES.search(ast.unparse(value)):
        return True
    target = find_called_function(module, value) if isinstance(value, ast.Call) else None
    return target is not None and _REDUCES.search(ast.unparse(target.node)) is not None


def _reduced_meter(check: CheckContext, meter: ast.expr) -> bool:
    """Return whether a meter reduces over ranks itself, or gets reduced values."""
    module, name = check.module, format_dotted_name(meter)
    for value in find_value_origins(module, meter):
        made = resolve_callee(value.module, value.node) if isinstance(value.node, ast.Call) else None
        if made is not None and re.search(r"all_reduce|all_gather|reduce\(", ast.unparse(made.node)):
            return True
    for call in module.methods.get("update", ()):
        if not isinstance(call.func, ast.Attribute) or format_dotted_name(call.func.value) != name or not call.args:
            continue
        told = call.args[0]
        parts = [part for part in ast.walk(told) if isinstance(part, ast.Name)]
        bound = [one.value or one.whole for part in parts for one in module.lookup(part)]
        if any(_REDUCES.search(ast.unparse(one)) for one in (told, *bound) if one is not None):
            return True
        if any(_reduced_near(CheckContext(module, check.project, check.cluster), call, part.id) for part in parts):
            return True
    return False


def _reduced_near(check: CheckContext, node: ast.AST, name: str) -> bool:
    """Return whether a figure, or its input, is passed to a reducing function within the same function."""
    module = check.module
    scope = module.scope(node)
    text = " ".join(ast.unparse(one) for binding in module.bindings.get((scope, name), ())
                    if (one := binding.value or binding.whole) is not None)  # fmt: skip
    for reducing in module.methods:
        if not re.search(r"reduce|gather|sync|average", reducing):
            continue
        for call in module.methods[reducing]:
            if module.scope(call) is not scope:
                continue
            owner = format_dotted_name(call.func.value) if isinstance(call.func, ast.Attribute) else None
            given = {part.id for argument in call.args for part in ast.walk(argument) if isinstance(part, ast.Name)}
            if owner == name or name in given or any(re.search(rf"\b{re.escape(one)}\b", text) for one in given):
                return True
    return False


CHECKS = (check_own_figure,)
