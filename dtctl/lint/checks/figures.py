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
from dtctl.lint.source_file import (
    Function,
    SourceFile,
    find_callers,
    format_dotted_name,
    list_additions,
    list_calls_on,
    name_other_lines,
    read_constant_value,
    read_last_name,
    read_node_position,
)

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
    r"^(?:print|log)_|_(?:print|log)$|^_?(?:write|log|add)_(?:summary|scalars?|metrics?)$|^summarize$|^display$"
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
    found: dict[tuple[ast.AST, str], tuple[ast.Call, str, list[int]]] = {}
    for call in _list_showing_calls(module):
        shown = (module, call) if read_last_name(call.func) in _SHOWS else _shown_by(module, call)
        if shown is None:
            continue
        condition = resolve_rank_guard(module, call) or next(list_rank_guards(*shown), None)
        # Without other evidence for several ranks, a condition on the rank is required.
        alone = (known and "rank" not in ast.unparse(call).lower()) if condition is None else condition.at_zero
        figure = next(find_shown_figures(check, call), None) if alone else None
        leaves = figure is not None and any(one.early for one in list_rank_guards(module, call))
        if leaves and not module.find_calls_below(module.scope(call), "backward"):
            continue  # rank 0 alone computes what this function shows
        if figure is not None:
            whose = "rank 0" if condition is not None else "this rank"
            at = f" (line {figure.line})" if figure.line and figure.line != call.lineno else ""
            message = f"`{figure.text}`{at} is that of {whose} alone"
            found.setdefault((module.scope(call), figure.text), (call, message, []))[2].append(call.lineno)
    for call, message, lines in found.values():
        yield check.problem("DT018", call, message + name_other_lines(sorted(set(lines) - {call.lineno})))


def _list_showing_calls(module: SourceFile) -> list[ast.Call]:
    """Return the calls by which ranks print or log, in the order of the file."""
    showing = [name for name in module.methods if name in _SHOWS or _SHOWING.search(name)]
    calls = [call for name in showing for call in module.methods[name] if not _no_show(call)]
    calls = [call for call in calls if not is_launcher_code(module, call) and not _says_why_it_ends(module, call)]
    return sorted(calls, key=read_node_position)


def _shown_by(module: SourceFile, call: ast.Call) -> tuple[SourceFile, ast.Call] | None:
    """Return the call in a function of the project that prints its argument; None without one."""
    target = find_called_function(module, call)
    if target is None or not isinstance(target.node, Function):
        return None
    parameters = {one.arg for one in target.node.args.args}
    meters = read_last_name(call.func) == "display"
    for name in _SHOWS & set(target.module.methods):
        for inside in target.module.find_calls_below(target.node, name):
            if meters or any(isinstance(part, ast.Name) and part.id in parameters for part in ast.walk(inside)):
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


def find_shown_figures(check: CheckContext, call: ast.Call) -> Iterator[_RankFigure]:
    """Yield the figures of this rank that a call shows, in its arguments or in texts and tables made before."""
    module = check.module
    owner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "display" else None
    for value in find_value_origins(module, owner) if owner is not None else ():
        # `progress.display(i)` shows the meters that its object was made with.
        for meter in ast.walk(value.node) if isinstance(value.node, ast.Call) and value.module is module else ():
            if (
                isinstance(meter, ast.Name)
                and _FIGURE.search(meter.id)
                and not _is_meter_reduced(check, meter, meter.id)
            ):
                yield _RankFigure(meter.id, value.node.lineno)
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
        return _line_of_meter(check, node)
    if isinstance(node, ast.Subscript) and _FIGURE.search(str(read_constant_value(node.slice) or "")):
        return _line_of_item(check, node)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and _FIGURE.search(node.id):
        return _line_of_name(check, node, depth)
    return None


def _line_of_meter(check: CheckContext, node: ast.Attribute) -> int | None:
    """Return the line for `losses.avg`, the value of a meter."""
    name = format_dotted_name(node.value)
    if name is None or not _FIGURE.search(read_last_name(node.value)):
        return None
    return None if _is_meter_reduced(check, node.value, name) else node.lineno


def _is_meter_reduced(check: CheckContext, meter: ast.expr, name: str) -> bool:
    """Return whether the value of a meter is that of all ranks."""
    return _reduced_meter(check, meter) or _reduced_near(check, meter, name)


def _line_of_name(check: CheckContext, node: ast.Name, depth: int) -> int | None:
    """Return the line for `loss`, a name with its own values, or a parameter."""
    module = check.module
    above = module.parents.get(node)
    if isinstance(above, ast.Attribute) and above.attr in _METER:
        return None  # the value of a meter is what counts, not its name
    values = _list_figure_values(module, node)
    added = list_additions(module, node.id, module.scope(node))
    appended = list_calls_on(module, node.id, "append")
    if not values and not added and not appended:
        parameter = any(isinstance(binding.statement, ast.arg) for binding in module.lookup(node))
        return _line_at_callers(check, node, depth) if parameter and depth else None
    set_to = [*(value for _, value in values), *appended]
    meter = any(
        isinstance(value, ast.Call) and re.search("Meter|Logger", read_last_name(value.func)) for value in set_to
    )
    updates = [call for call in list_calls_on(module, node.id, "update") if module.scope(call) is module.scope(node)]
    if meter and (not updates or _reduced_meter(check, node)):
        return None
    if _REDUCES.search(" ".join(map(ast.unparse, set_to))) or _reduced_near(check, node, node.id):
        return None
    if not all(_is_computed_alone(module, part) for part in (*set_to, *(one.value for one in added))):
        return None
    lines = [*(line for line, _ in values), *(one.lineno for one in added)]
    return max((line for line in lines if line <= node.lineno), default=node.lineno)


def _list_figure_values(module: SourceFile, node: ast.Name) -> list[tuple[int, ast.expr]]:
    """Return the values of a name, each with its line: those before the node or in its loop, or else all."""
    values = [
        (binding.line, binding.origin_value) for binding in module.lookup(node) if binding.origin_value is not None
    ]
    values = [(line, value) for line, value in values if not _begins_empty(value)]
    loop = module.find_enclosing_node(node, (ast.For, ast.While))
    return [
        (line, value)
        for line, value in values
        if line <= node.lineno or (loop is not None and module.is_node_within(value, loop))
    ] or values


def _begins_empty(value: ast.expr) -> bool:
    """Return whether a value is only the start of a sum or a list."""
    return isinstance(value, ast.Constant) or (isinstance(value, ast.List) and not value.elts)


def _line_of_item(check: CheckContext, node: ast.Subscript) -> int | None:
    """Return the line for `metrics["loss"]`, an item of a dictionary that is written out here or in a function."""
    wanted, name = read_constant_value(node.slice), format_dotted_name(node.value)
    for one in check.module.nodes_of(ast.AugAssign):
        target = one.target
        if not isinstance(target, ast.Subscript) or format_dotted_name(target.value) != name:
            continue
        if read_constant_value(target.slice) == wanted:
            own = not _REDUCES.search(ast.unparse(one.value)) and _is_computed_alone(check.module, one.value)
            return one.lineno if own else None
    for value in find_value_origins(check.module, node.value):
        if not isinstance(value.node, ast.Dict) or value.item is not None:
            return None
        item = dict(zip(map(read_constant_value, value.node.keys), value.node.values, strict=True)).get(wanted)
        other = CheckContext(value.module, check.project, check.cluster)
        for part in ast.walk(item) if item is not None else ():
            line = _own_line(other, part, 0)
            if line is not None:
                return line if value.module is check.module else node.lineno
    return None


def _line_at_callers(check: CheckContext, node: ast.Name, depth: int) -> int | None:
    """Return the line for a parameter, if all callers pass a figure of their own rank."""
    module, function = check.module, check.module.scope(node)
    lines = []
    for caller, call in find_callers(module, function)[:6]:
        passed = find_call_argument(call, function, node.id, bound=is_bound_method(module, function))
        if passed is None or _REDUCES.search(ast.unparse(passed)):
            return None
        other = CheckContext(caller, check.project, check.cluster)
        found = (_own_line(other, part, depth - 1) for part in ast.walk(passed))
        line = next((line for line in found if line is not None), None)
        if line is None:
            return None
        lines.append(line if caller is module else node.lineno)
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
            bound = [one.origin_value for one in module.lookup(part)[-4:]]
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
    module = check.module
    for value in find_value_origins(module, meter):
        made = resolve_callee(value.module, value.node) if isinstance(value.node, ast.Call) else None
        if made is not None and re.search(r"all_reduce|all_gather|reduce\(", ast.unparse(made.node)):
            return True
    updates = list_calls_on(module, format_dotted_name(meter), "update")
    for call in updates:
        given = [*call.args[:1], *(one.value for one in call.keywords)]
        parts = [part for value in given for part in ast.walk(value) if isinstance(part, ast.Name)]
        bound = [binding.origin_value for part in parts for binding in module.lookup(part)]
        if any(_REDUCES.search(ast.unparse(one)) for one in (*given, *bound) if one is not None):
            return True
        if any(_reduced_near(check, call, part.id) for part in parts):
            return True
    return False


def _reduced_near(check: CheckContext, node: ast.AST, name: str) -> bool:
    """Return whether a figure, or its input, is passed to a reducing function within the same function."""
    module = check.module
    scope = module.scope(node)
    values = [binding.origin_value for binding in module.bindings.get((scope, name), ())]
    text = " ".join(ast.unparse(value) for value in values if value is not None)
    reducing = [method for method in module.methods if re.search(r"reduce|gather|sync|average", method)]
    for call in [call for method in reducing for call in module.methods[method] if module.scope(call) is scope]:
        owner = format_dotted_name(call.func.value) if isinstance(call.func, ast.Attribute) else None
        given = {part.id for argument in call.args for part in ast.walk(argument) if isinstance(part, ast.Name)}
        if owner == name or name in given or any(re.search(rf"\b{re.escape(one)}\b", text) for one in given):
            return True
    return False


CHECKS = (check_own_figure,)
