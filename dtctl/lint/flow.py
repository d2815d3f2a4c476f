"""Origin of a value: through assignments, helper functions, their arguments and attributes, over files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from dtctl.lint import names
from dtctl.lint.source_file import Binding, Definition, Function, SourceFile, constant, key

_DEPTH = 8
_MOST = 12
"""Places that are followed for one value; what comes from more is not known."""


@dataclass(frozen=True, slots=True)
class CallFrame:
    """Call on the way to a value, which determines the parameters of its function."""

    function: ast.AST
    call: ast.Call
    module: SourceFile
    above: CallFrame | None


@dataclass(frozen=True, slots=True)
class Value:
    """An expression, and over which calls it was reached."""

    module: SourceFile
    node: ast.expr
    frame: CallFrame | None = None
    item: int | None = None
    """Index of the item that is meant."""


def origins(module: SourceFile, node: ast.expr, frame: CallFrame | None = None) -> list[Value]:
    """Return the expressions that a value may come from; the node itself where nothing more is known.

    The number of a process that mp.spawn starts comes from the call of mp.spawn.
    """
    fact = ("origins", node, frame)
    cached = module.facts.get(fact)
    if cached is None:
        itself = Value(module, node, frame)
        module.facts[fact] = [itself]  # for a value that is needed to find itself
        cached = module.facts[fact] = list(_followed(itself, _DEPTH, set()))
    return cached  # type: ignore[return-value]  # facts of this kind are such lists


def callee(module: SourceFile, call: ast.Call, depth: int = 4) -> Definition | None:
    """Return the function or class of the project that a call calls; None for others, and where it is not known."""
    fact = ("callee", call)
    if fact not in module.facts:
        module.facts[fact] = None  # for a call that is needed to find itself
        found = _definition(module, call.func, depth)
        module.facts[fact] = found if found is not None and not isinstance(found.node, ast.expr) else None
    return module.facts[fact]  # type: ignore[return-value]  # facts of this kind are such


def function_of(module: SourceFile, call: ast.Call) -> Definition | None:
    """Return the function that runs when something is called; for a class its __init__."""
    found = callee(module, call)
    if found is not None and isinstance(found.node, ast.ClassDef):
        return method(found.module, found.node, "__init__")
    return found


def method(module: SourceFile, owner: ast.ClassDef, name: str, depth: int = 4) -> Definition | None:
    """Return a method of a class, or of those that it is derived from."""
    for member in owner.body:
        if isinstance(member, Function) and member.name == name:
            return Definition(module, member)
    for base in owner.bases if depth else ():
        above = _definition(module, base, 2)
        if above is not None and isinstance(above.node, ast.ClassDef) and above.node is not owner:
            found = method(above.module, above.node, name, depth - 1)
            if found is not None:
                return found
    return None


def argument(call: ast.Call, function: ast.AST, parameter: str, *, bound: bool) -> ast.expr | None:
    """Return the argument that a call passes to a parameter; None for its default, and if it cannot be determined.

    Args:
        call: of the function.
        function: with the parameter.
        parameter: its name.
        bound: whether the first parameter is the object of a method.
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
    """Return the names of the arguments of a call, those of `**settings` that are written out too; None for others."""
    given: set[str | None] = {passed.arg for passed in call.keywords if passed.arg is not None}
    for passed in call.keywords:
        if passed.arg is None:
            given |= _keys(module, passed.value)
    return given


def _keys(module: SourceFile, mapping: ast.expr) -> set[str | None]:
    """The keys of a dictionary wherever it is written out, and those that it is given later; None for unknown ones."""
    name, found = key(mapping), set[str | None]()
    updates = [
        call for call in module.methods.get("update", ())
        if isinstance(call.func, ast.Attribute) and key(call.func.value) == name
    ]  # fmt: skip
    tables = [value.node for value in origins(module, mapping)]
    tables += [argument for call in updates for value in call.args for argument in module.values(value)]
    for table in tables:
        if isinstance(table, ast.Dict):
            found |= {text if isinstance(text := constant(item), str) else None for item in table.keys}
        elif isinstance(table, ast.Call) and key(table.func) == "dict" and not table.args:
            found |= {one.arg for one in table.keywords}
        else:
            found.add(None)
    for node in module.nodes_of(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and key(target.value) == name:
                text = constant(target.slice)
                found.add(text if isinstance(text, str) else None)
    return found


def is_bound(module: SourceFile, function: ast.AST) -> bool:
    """Return whether a function is a method that gets its object first."""
    if not isinstance(function, Function) or not isinstance(module.parents.get(function), ast.ClassDef):
        return False
    return not any(key(decorator) == "staticmethod" for decorator in function.decorator_list)


def _followed(value: Value, depth: int, seen: set[tuple[int, int]]) -> Iterator[Value]:
    node, module = value.node, value.module
    here = (id(node), id(value.frame.call) if value.frame else 0)
    if here in seen or len(seen) > _MOST * 4:
        return
    seen.add(here)
    if not depth:
        yield value
    elif isinstance(node, ast.IfExp):
        for branch in (node.body, node.orelse):
            yield from _followed(Value(module, branch, value.frame), depth, seen)
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and not _is_condition(node):
        for branch in node.values:
            yield from _followed(Value(module, branch, value.frame), depth, seen)
    elif isinstance(node, ast.NamedExpr | ast.Await):
        yield from _followed(Value(module, node.value, value.frame), depth, seen)
    elif isinstance(node, ast.Call):
        yield from _returned(value, depth, seen)
    elif isinstance(node, ast.Name | ast.Attribute):
        yield from _named(value, depth, seen)
    elif isinstance(node, ast.Subscript) and type(constant(node.slice)) is int:
        yield from _item(Value(module, node.value, value.frame), int(str(constant(node.slice))), depth, seen, value)
    else:
        yield value


def _is_condition(node: ast.BoolOp) -> bool:
    """Return whether an `or` is one of conditions, not of alternatives."""
    return any(isinstance(part, ast.Compare | ast.UnaryOp | ast.Call) for part in node.values)


def _returned(value: Value, depth: int, seen: set[tuple[int, int]]) -> Iterator[Value]:
    """Yield what a call of a function of the project returns."""
    call, module = value.node, value.module
    if not isinstance(call, ast.Call):
        return
    target = callee(module, call)
    if target is None or isinstance(target.node, ast.ClassDef):
        yield value
        return
    results = target.module.returned.get(target.node, [])
    if not results or len(results) > _MOST:
        yield value
        return
    frame = CallFrame(target.node, call, module, value.frame)
    for result in results:
        yield from _followed(Value(target.module, result, frame), depth - 1, seen)


def _item(whole: Value, at: int, depth: int, seen: set[tuple[int, int]], itself: Value | None) -> Iterator[Value]:
    """Yield one item of a value."""
    for origin in _followed(whole, depth, seen):
        if isinstance(origin.node, ast.Tuple | ast.List) and -len(origin.node.elts) <= at < len(origin.node.elts):
            yield from _followed(Value(origin.module, origin.node.elts[at], origin.frame), depth - 1, seen)
        elif itself is not None:
            yield itself
        else:
            yield Value(origin.module, origin.node, origin.frame, at)


def _named(value: Value, depth: int, seen: set[tuple[int, int]]) -> Iterator[Value]:
    """Yield what a name or an attribute is set to."""
    node, module = value.node, value.module
    bindings = [binding for binding in _bound(module, node) if not module.within(node, binding.statement)]
    if not bindings:
        yield from _not_bound_here(value, depth, seen)
        return
    for binding in bindings[-6:]:
        if binding.value is not None:
            yield from _followed(Value(module, binding.value, _frame_at(value, binding.value)), depth - 1, seen)
        elif binding.whole is not None:
            inner = Value(module, binding.whole, _frame_at(value, binding.whole))
            yield from _item(inner, binding.item, depth - 1, seen, None)
        elif isinstance(binding.statement, ast.arg):
            yield from _given(value, binding, depth, seen)
        else:
            yield value


def _frame_at(value: Value, node: ast.expr) -> CallFrame | None:
    """Return the frame of a value, if a node is in its function too."""
    frame = value.frame
    return frame if frame is not None and value.module.within(node, frame.function) else None


def _bound(module: SourceFile, node: ast.expr) -> list[Binding]:
    """Return the assignments that a name may have its value from at its place."""
    name = key(node)
    if name is None:
        return []
    current = module.current(node, node)
    if current is not None and not module.within(node, current.statement):
        return [current]
    return module.lookup(node)


def _given(value: Value, binding: Binding, depth: int, seen: set[tuple[int, int]]) -> Iterator[Value]:
    """Yield what a parameter gets: from the call on the way, else from all calls."""
    module, function = value.module, value.module.parents.get(value.module.parents[binding.statement])
    name = binding.statement.arg if isinstance(binding.statement, ast.arg) else ""
    if not isinstance(function, Function) or name in ("self", "cls"):
        yield value
        return
    frame = value.frame
    if frame is not None and frame.function is function:
        calls = [(frame.module, frame.call)]
    else:
        calls = module.neighbours.callers(module, function) if module.neighbours is not None else []
        frame = None
    if not calls or len(calls) > _MOST:
        yield value
        return
    for caller, call in calls:
        above = frame.above if frame is not None else None
        passed = _passed(caller, call, module, function, name)
        if passed is None:
            passed = default_of(function, name)
            if passed is None:
                yield value
            else:
                yield from _followed(Value(module, passed), depth - 1, seen)
        elif passed is call:
            yield Value(caller, call, above)
        else:
            yield from _followed(Value(caller, passed, above), depth - 1, seen)


def _passed(
    caller: SourceFile, call: ast.Call, module: SourceFile, function: ast.AST, parameter: str
) -> ast.expr | None:
    """Return what a call gives a parameter; the call itself for the number of a process that it starts."""
    name = caller.name(call.func) or ""
    if name not in names.STARTS:
        return argument(call, function, parameter, bound=is_bound(module, function))
    parameters = [one.arg for one in function.args.args] if isinstance(function, Function) else []
    at = parameters.index(parameter) - is_bound(module, function) if parameter in parameters else -1
    if name in names.SPAWNS:
        if at == 0:
            return call
        at -= 1
    given = next((one.value for one in call.keywords if one.arg == "args"), None)
    if given is None and name in names.SPAWNS and len(call.args) > 1:
        given = call.args[1]
    return given.elts[at] if isinstance(given, ast.Tuple | ast.List) and 0 <= at < len(given.elts) else None


def default_of(function: ast.AST, parameter: str) -> ast.expr | None:
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


def _not_bound_here(value: Value, depth: int, seen: set[tuple[int, int]]) -> Iterator[Value]:
    """Yield a name of another file, an attribute of an object, or one that is set in another function."""
    node, module = value.node, value.module
    found = _definition(module, node, 3)
    if found is not None and isinstance(found.node, ast.expr):
        yield from _followed(Value(found.module, found.node), depth - 1, seen)
        return
    if found is not None and isinstance(found.node, Function) and _is_property(found.node):
        results = found.module.returned.get(found.node, [])
        for result in results:
            yield from _followed(Value(found.module, result), depth - 1, seen)
        if results:
            return
    if isinstance(node, ast.Attribute):
        elsewhere = list(_set_elsewhere(module, node))
        for owner, bound in elsewhere[:6]:
            yield from _followed(Value(owner, bound), depth - 1, seen)
        if elsewhere:
            return
    yield value


def _is_property(function: ast.AST) -> bool:
    return isinstance(function, Function) and any(
        (key(decorator) or "").rpartition(".")[2] in ("property", "cached_property")
        for decorator in function.decorator_list
    )


def _set_elsewhere(module: SourceFile, node: ast.Attribute) -> Iterator[tuple[SourceFile, ast.expr]]:
    """Yield what `args.rank` is set to by functions that got the object under the same name."""
    root = key(node.value)
    if root is None or root == "self" or module.neighbours is None:
        return
    for other in module.neighbours.having(module, f".{node.attr}"):
        for binding in other.attributes.get(node.attr, ()):
            target = binding.value
            if target is not None and not other.within(node, binding.statement):
                yield other, target


def _definition(module: SourceFile, node: ast.expr, depth: int) -> Definition | None:
    """Return what a name means in the project: a function, a class, or a value given to a name of a module."""
    if isinstance(node, ast.Name):
        return _by_name(module, node)
    if not isinstance(node, ast.Attribute) or not depth:
        return None
    dotted = key(node)
    if dotted is not None and not dotted.startswith("self."):
        root, _, rest = dotted.partition(".")
        qualified = module.aliases.get(root)
        if qualified is not None:
            return _elsewhere(module, f"{qualified}.{rest}")
    return _attribute(module, node, depth)


def _by_name(module: SourceFile, node: ast.Name) -> Definition | None:
    scope: ast.AST | None = module.scope(node)
    definitions = module.functions.get(node.id, [])
    while definitions and scope is not None:
        for function in definitions:
            if module.scope(function) is scope and not isinstance(module.parents[function], ast.ClassDef):
                return Definition(module, function)
        scope = module.enclosing(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module))
    if node.id in module.classes:
        return Definition(module, module.classes[node.id])
    qualified = module.aliases.get(node.id)
    if qualified is not None:
        return _elsewhere(module, qualified)
    for star in module.stars:
        found = _elsewhere(module, f"{star}.{node.id}")
        if found is not None:
            return found
    return None


def _elsewhere(module: SourceFile, qualified: str) -> Definition | None:
    if module.neighbours is None or qualified.startswith(("torch.", "numpy.")):
        return None
    return module.neighbours.definition(module, qualified)


def _attribute(module: SourceFile, node: ast.Attribute, depth: int) -> Definition | None:
    """Return a method, property or attribute of an object of a class of the project."""
    owner = node.value
    if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
        own_class = module.enclosing(node, (ast.ClassDef,))
        return _member(module, own_class, node.attr) if isinstance(own_class, ast.ClassDef) else None
    if isinstance(owner, ast.Call) and key(owner.func) == "super":
        own_class = module.enclosing(node, (ast.ClassDef,))
        for base in own_class.bases if isinstance(own_class, ast.ClassDef) else ():
            above = _definition(module, base, depth - 1)
            if above is not None and isinstance(above.node, ast.ClassDef):
                return _member(above.module, above.node, node.attr)
        return None
    if not isinstance(owner, ast.Name | ast.Attribute):
        return None
    for origin in origins(module, owner):
        if isinstance(origin.node, ast.Call) and origin.item is None:
            made = callee(origin.module, origin.node, depth - 1)
            if made is not None and isinstance(made.node, ast.ClassDef):
                return _member(made.module, made.node, node.attr)
    return None


def _member(module: SourceFile, owner: ast.ClassDef, name: str, depth: int = 3) -> Definition | None:
    found = method(module, owner, name)
    if found is not None:
        return found
    bound = module.bindings.get((owner, f"self.{name}"), [])
    values = [binding.value for binding in bound if binding.value is not None]
    if values:
        return Definition(module, values[-1])
    for base in owner.bases if depth else ():
        above = _definition(module, base, 2)
        if above is not None and isinstance(above.node, ast.ClassDef) and above.node is not owner:
            inherited = _member(above.module, above.node, name, depth - 1)
            if inherited is not None:
                return inherited
    return None
