"""Origin of a value through assignments, helper functions, their arguments and attributes, across files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from dtctl.lint import names
from dtctl.lint.source_file import (
    Binding,
    Definition,
    Function,
    SourceFile,
    find_argument,
    find_callers,
    find_keyword_value,
    format_dotted_name,
    list_calls_on,
    read_constant_value,
    read_last_name,
)

_DEPTH = 8
_MOST = 12
"""Largest number of places that are followed for one value; a value with more places counts as unknown."""


@dataclass(frozen=True, slots=True)
class CallFrame:
    """Call on the way to a value, which determines the parameters of the called function."""

    function: ast.AST
    call: ast.Call
    module: SourceFile
    above: CallFrame | None


@dataclass(frozen=True, slots=True)
class TracedValue:
    """Expression, and the calls through which it was reached."""

    module: SourceFile
    node: ast.expr
    frame: CallFrame | None = None
    item: int | None = None
    """Index of the item that is meant; None for the whole value."""


def find_value_origins(module: SourceFile, node: ast.expr, frame: CallFrame | None = None) -> list[TracedValue]:
    """Return the expressions that a value may come from, or the node itself if nothing more is known.

    The origin of the process number in a function of mp.spawn is the call of mp.spawn.
    """
    fact = ("origins", node, frame)
    cached = module.facts.get(fact)
    if cached is None:
        itself = TracedValue(module, node, frame)
        module.facts[fact] = [itself]  # for a value that refers to itself
        cached = module.facts[fact] = list(_resolve_value(itself, _DEPTH, set()))
    return cached  # type: ignore[return-value]  # facts of this kind are lists of this type


def resolve_callee(module: SourceFile, call: ast.Call, depth: int = 4) -> Definition | None:
    """Return the project's function or class that a call calls; None if it is another one or not known."""
    fact = ("callee", call)
    if fact not in module.facts:
        module.facts[fact] = None  # for a call that refers to itself
        found = _resolve_definition(module, call.func, depth)
        module.facts[fact] = found if found is not None and not isinstance(found.node, ast.expr) else None
    return module.facts[fact]  # type: ignore[return-value]  # facts of this kind have this type


def find_called_function(module: SourceFile, call: ast.Call) -> Definition | None:
    """Return the function that a call runs; for a class its __init__."""
    found = resolve_callee(module, call)
    if found is not None and isinstance(found.node, ast.ClassDef):
        return find_class_method(found.module, found.node, "__init__")
    return found


def find_class_method(module: SourceFile, owner: ast.ClassDef, name: str, depth: int = 4) -> Definition | None:
    """Return a method of a class or its base classes."""
    for member in owner.body:
        if isinstance(member, Function) and member.name == name:
            return Definition(module, member)
    for base in owner.bases if depth else ():
        above = _resolve_definition(module, base, 2)
        if above is not None and isinstance(above.node, ast.ClassDef) and above.node is not owner:
            found = find_class_method(above.module, above.node, name, depth - 1)
            if found is not None:
                return found
    return None


def find_call_argument(call: ast.Call, function: ast.AST, parameter: str, *, bound: bool) -> ast.expr | None:
    """Return the argument that a call passes for a parameter; None for its default, or if it is not known.

    Args:
        call: call of the function.
        function: function with the parameter.
        parameter: name of the parameter.
        bound: whether the function is a method, whose first parameter is its object.
    """
    for passed in call.keywords:
        if passed.arg == parameter:
            return passed.value
    if not isinstance(function, Function):
        return None
    parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if parameter not in parameters:
        return None
    at = parameters.index(parameter) - bound
    if at < 0 or at >= len(call.args) or any(isinstance(one, ast.Starred) for one in call.args[: at + 1]):
        return None
    return call.args[at]


def names_given(module: SourceFile, call: ast.Call) -> set[str | None]:
    """Return the names of a call's arguments, with those in a written-out `**settings`; None for unknown ones."""
    given: set[str | None] = {passed.arg for passed in call.keywords if passed.arg is not None}
    for passed in call.keywords:
        if passed.arg is None:
            given |= _collect_mapping_keys(module, passed.value)
    return given


def _collect_mapping_keys(module: SourceFile, mapping: ast.expr) -> set[str | None]:
    """Return the keys of a dictionary that is written out, with keys that are added later; None for unknown ones."""
    name, found = format_dotted_name(mapping), set[str | None]()
    updates = list_calls_on(module, name, "update")
    tables = [value.node for value in find_value_origins(module, mapping)]
    tables += [argument for call in updates for value in call.args for argument in module.values(value)]
    for table in tables:
        items = list_mapping_items(table)
        found |= {key if isinstance(key, str) else None for key, _ in items} if items is not None else {None}
    for node in module.nodes_of(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and format_dotted_name(target.value) == name:
                text = read_constant_value(target.slice)
                found.add(text if isinstance(text, str) else None)
    return found


def list_mapping_items(node: ast.AST) -> list[tuple[object, ast.expr]] | None:
    """Return the keys and values of `{...}` or `dict(...)`, None for an unknown key; None for other expressions."""
    if isinstance(node, ast.Dict):
        return [(read_constant_value(key), value) for key, value in zip(node.keys, node.values, strict=True)]
    if isinstance(node, ast.Call) and format_dotted_name(node.func) == "dict" and not node.args:
        return [(one.arg, one.value) for one in node.keywords]
    return None


def is_bound_method(module: SourceFile, function: ast.AST) -> bool:
    """Return whether a function is a method whose first argument is its object."""
    if not isinstance(function, Function) or not isinstance(module.parents.get(function), ast.ClassDef):
        return False
    return not any(format_dotted_name(decorator) == "staticmethod" for decorator in function.decorator_list)


def _resolve_value(value: TracedValue, depth: int, seen: set[tuple[int, int]]) -> Iterator[TracedValue]:
    node, module = value.node, value.module
    here = (id(node), id(value.frame.call) if value.frame else 0)
    if here in seen or len(seen) > _MOST * 4:
        return
    seen.add(here)
    if not depth:
        yield value
    elif isinstance(node, ast.IfExp):
        for branch in _list_alternatives(node):
            yield from _resolve_value(TracedValue(module, branch, value.frame), depth, seen)
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and not _is_condition(node):
        for branch in node.values:
            yield from _resolve_value(TracedValue(module, branch, value.frame), depth, seen)
    elif isinstance(node, ast.NamedExpr | ast.Await):
        yield from _resolve_value(TracedValue(module, node.value, value.frame), depth, seen)
    elif isinstance(node, ast.Call):
        yield from _resolve_call_result(value, depth, seen)
    elif isinstance(node, ast.Name | ast.Attribute):
        yield from _resolve_named_value(value, depth, seen)
    elif isinstance(node, ast.Subscript) and type(read_constant_value(node.slice)) is int:
        yield from _resolve_item(
            TracedValue(module, node.value, value.frame), int(str(read_constant_value(node.slice))), depth, seen, value
        )
    else:
        yield value


def _list_alternatives(node: ast.IfExp) -> tuple[ast.expr, ...]:
    """Return the values of an `if` expression; for `m.module if isinstance(m, DDP) else m` only the bare model."""
    for bare, other in ((node.body, node.orelse), (node.orelse, node.body)):
        if isinstance(bare, ast.Attribute) and bare.attr == "module" and ast.dump(bare.value) == ast.dump(other):
            return (bare,)
    return node.body, node.orelse


def _is_condition(node: ast.BoolOp) -> bool:
    """Return whether an `or` combines conditions, and not alternative values."""
    return any(isinstance(part, ast.Compare | ast.UnaryOp | ast.Call) for part in node.values)


def _resolve_call_result(value: TracedValue, depth: int, seen: set[tuple[int, int]]) -> Iterator[TracedValue]:
    """Yield the results of a call of a project function."""
    call, module = value.node, value.module
    if not isinstance(call, ast.Call):
        return
    target = resolve_callee(module, call)
    if target is None or isinstance(target.node, ast.ClassDef):
        yield value
        return
    results = target.module.return_values.get(target.node, [])
    if not results or len(results) > _MOST:
        yield value
        return
    frame = CallFrame(target.node, call, module, value.frame)
    for result in results:
        yield from _resolve_value(TracedValue(target.module, result, frame), depth - 1, seen)


def _resolve_item(
    whole: TracedValue, at: int, depth: int, seen: set[tuple[int, int]], itself: TracedValue | None
) -> Iterator[TracedValue]:
    """Yield the origins of one item of a value."""
    for origin in _resolve_value(whole, depth, seen):
        if isinstance(origin.node, ast.Tuple | ast.List) and -len(origin.node.elts) <= at < len(origin.node.elts):
            yield from _resolve_value(TracedValue(origin.module, origin.node.elts[at], origin.frame), depth - 1, seen)
        elif itself is not None:
            yield itself
        else:
            yield TracedValue(origin.module, origin.node, origin.frame, at)


def _resolve_named_value(value: TracedValue, depth: int, seen: set[tuple[int, int]]) -> Iterator[TracedValue]:
    """Yield the values of a name or an attribute."""
    node, module = value.node, value.module
    bindings = [
        binding for binding in _find_name_bindings(module, node) if not module.is_node_within(node, binding.statement)
    ]
    if not bindings:
        yield from _not_bound_here(value, depth, seen)
        return
    for binding in bindings[-6:]:
        if binding.value is not None:
            yield from _resolve_value(
                TracedValue(module, binding.value, _frame_at(value, binding.value)), depth - 1, seen
            )
        elif binding.whole is not None:
            inner = TracedValue(module, binding.whole, _frame_at(value, binding.whole))
            yield from _resolve_item(inner, binding.item, depth - 1, seen, None)
        elif isinstance(binding.statement, ast.arg):
            yield from _resolve_parameter(value, binding, depth, seen)
        else:
            yield value


def _frame_at(value: TracedValue, node: ast.expr) -> CallFrame | None:
    """Return the frame of a value, if a node is in the frame's function; else None."""
    frame = value.frame
    return frame if frame is not None and value.module.is_node_within(node, frame.function) else None


def _find_name_bindings(module: SourceFile, node: ast.expr) -> list[Binding]:
    """Return the assignments that may determine the value of a name at its place."""
    name = format_dotted_name(node)
    if name is None:
        return []
    current = module.find_current_binding(node, node)
    if current is not None and not module.is_node_within(node, current.statement):
        return [current]
    return module.lookup(node)


def _resolve_parameter(
    value: TracedValue, binding: Binding, depth: int, seen: set[tuple[int, int]]
) -> Iterator[TracedValue]:
    """Yield the values of a parameter: from the call on the way, or else from all calls."""
    module, function = value.module, value.module.parents.get(value.module.parents[binding.statement])
    name = binding.statement.arg if isinstance(binding.statement, ast.arg) else ""
    if not isinstance(function, Function) or name in ("self", "cls"):
        yield value
        return
    frame = value.frame
    if frame is not None and frame.function is function:
        calls = [(frame.module, frame.call)]
    else:
        calls = find_callers(module, function)
        frame = None
    if not calls or len(calls) > _MOST:
        yield value
        return
    for caller, call in calls:
        above = frame.above if frame is not None else None
        passed = _find_passed_argument(caller, call, module, function, name)
        if passed is None:
            passed = find_parameter_default(function, name)
            if passed is None:
                yield value
            else:
                yield from _resolve_value(TracedValue(module, passed), depth - 1, seen)
        elif passed is call:
            yield TracedValue(caller, call, above)
        else:
            yield from _resolve_value(TracedValue(caller, passed, above), depth - 1, seen)


def _find_passed_argument(
    caller: SourceFile, call: ast.Call, module: SourceFile, function: ast.AST, parameter: str
) -> ast.expr | None:
    """Return the argument for a parameter; for the process number of a started process, the call itself."""
    name = caller.name(call.func) or ""
    if name not in names.STARTS:
        return find_call_argument(call, function, parameter, bound=is_bound_method(module, function))
    parameters = [one.arg for one in function.args.args] if isinstance(function, Function) else []
    at = parameters.index(parameter) - is_bound_method(module, function) if parameter in parameters else -1
    if name in names.SPAWNS:
        if at == 0:
            return call
        at -= 1
    given = find_argument(call, "args", 1) if name in names.SPAWNS else find_keyword_value(call, "args")
    return given.elts[at] if isinstance(given, ast.Tuple | ast.List) and 0 <= at < len(given.elts) else None


def find_parameter_default(function: ast.AST, parameter: str) -> ast.expr | None:
    """Return the default of a parameter; None if it has none."""
    if not isinstance(function, Function):
        return None
    positional = [*function.args.posonlyargs, *function.args.args]
    for one, default in zip(reversed(positional), reversed(function.args.defaults), strict=False):
        if one.arg == parameter:
            return default
    for one, default_or_none in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if one.arg == parameter:
            return default_or_none
    return None


def _not_bound_here(value: TracedValue, depth: int, seen: set[tuple[int, int]]) -> Iterator[TracedValue]:
    """Yield the value of a name from another file, of an attribute, or of a name that another function sets."""
    node, module = value.node, value.module
    found = _resolve_definition(module, node, 3)
    if found is not None and isinstance(found.node, ast.expr):
        yield from _resolve_value(TracedValue(found.module, found.node), depth - 1, seen)
        return
    if found is not None and isinstance(found.node, Function) and _is_property(found.node):
        results = found.module.return_values.get(found.node, [])
        for result in results:
            yield from _resolve_value(TracedValue(found.module, result), depth - 1, seen)
        if results:
            return
    if isinstance(node, ast.Attribute):
        elsewhere = list(_set_elsewhere(module, node))
        for owner, bound in elsewhere[:6]:
            yield from _resolve_value(TracedValue(owner, bound), depth - 1, seen)
        if elsewhere:
            return
    yield value


def _is_property(function: ast.AST) -> bool:
    return isinstance(function, Function) and any(
        read_last_name(decorator) in ("property", "cached_property") for decorator in function.decorator_list
    )


def _set_elsewhere(module: SourceFile, node: ast.Attribute) -> Iterator[tuple[SourceFile, ast.expr]]:
    """Yield values that other functions assign to the same attribute, such as `args.rank`."""
    root = format_dotted_name(node.value)
    if root is None or root == "self" or module.neighbours is None:
        return
    for other in module.neighbours.find_modules_with_words(module, f".{node.attr} =", f".{node.attr}="):
        for binding in other.attributes.get(node.attr, ()):
            target = binding.value
            if target is not None and not other.is_node_within(node, binding.statement):
                yield other, target


def _resolve_definition(module: SourceFile, node: ast.expr, depth: int) -> Definition | None:
    """Return the meaning of a name in the project: a function, a class, or the value of a module's name."""
    if isinstance(node, ast.Name):
        return _by_name(module, node)
    if not isinstance(node, ast.Attribute) or not depth:
        return None
    dotted = format_dotted_name(node)
    if dotted is not None and not dotted.startswith("self."):
        root, _, rest = dotted.partition(".")
        qualified = module.aliases.get(root)
        if qualified is not None:
            return _resolve_imported_name(module, f"{qualified}.{rest}")
    return _resolve_attribute(module, node, depth)


def _by_name(module: SourceFile, node: ast.Name) -> Definition | None:
    scope: ast.AST | None = module.scope(node)
    definitions = module.functions.get(node.id, [])
    while definitions and scope is not None:
        for function in definitions:
            if module.scope(function) is scope and not isinstance(module.parents[function], ast.ClassDef):
                return Definition(module, function)
        scope = module.find_enclosing_node(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module))
    if node.id in module.classes:
        return Definition(module, module.classes[node.id])
    qualified = module.aliases.get(node.id)
    if qualified is not None:
        return _resolve_imported_name(module, qualified)
    for star in module.stars:
        found = _resolve_imported_name(module, f"{star}.{node.id}")
        if found is not None:
            return found
    return None


def _resolve_imported_name(module: SourceFile, qualified: str) -> Definition | None:
    if module.neighbours is None or qualified.startswith(("torch.", "numpy.")):
        return None
    return module.neighbours.definition(module, qualified)


def _resolve_attribute(module: SourceFile, node: ast.Attribute, depth: int) -> Definition | None:
    """Return a method, property or attribute of an object whose class belongs to the project; None for others."""
    owner = node.value
    if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
        own_class = module.find_enclosing_node(node, (ast.ClassDef,))
        return _find_class_member(module, own_class, node.attr) if isinstance(own_class, ast.ClassDef) else None
    if isinstance(owner, ast.Call) and format_dotted_name(owner.func) == "super":
        own_class = module.find_enclosing_node(node, (ast.ClassDef,))
        for base in own_class.bases if isinstance(own_class, ast.ClassDef) else ():
            above = _resolve_definition(module, base, depth - 1)
            if above is not None and isinstance(above.node, ast.ClassDef):
                return _find_class_member(above.module, above.node, node.attr)
        return None
    if not isinstance(owner, ast.Name | ast.Attribute):
        return None
    for origin in find_value_origins(module, owner):
        if isinstance(origin.node, ast.Call) and origin.item is None:
            made = resolve_callee(origin.module, origin.node, depth - 1)
            if made is not None and isinstance(made.node, ast.ClassDef):
                return _find_class_member(made.module, made.node, node.attr)
    return None


def _find_class_member(module: SourceFile, owner: ast.ClassDef, name: str, depth: int = 3) -> Definition | None:
    found = find_class_method(module, owner, name)
    if found is not None:
        return found
    bound = module.bindings.get((owner, f"self.{name}"), [])
    values = [binding.value for binding in bound if binding.value is not None]
    if values:
        return Definition(module, values[-1])
    for base in owner.bases if depth else ():
        above = _resolve_definition(module, base, 2)
        if above is not None and isinstance(above.node, ast.ClassDef) and above.node is not owner:
            inherited = _find_class_member(above.module, above.node, name, depth - 1)
            if inherited is not None:
                return inherited
    return None
