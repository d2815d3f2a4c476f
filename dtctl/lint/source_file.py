"""Python file for rules: calls by resolved name, values of names, enclosing nodes."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

from dtctl.lint import names

Kind = TypeVar("Kind", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_PLAIN = frozenset(
    "id ctx attr op ops arg kind type_comment name asname module level simple conversion is_async rest kwd_attrs "
    "type_ignores".split()
)
"""Fields without nodes, or without nodes that rules use."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Assignment of a value to a name."""

    line: int
    value: ast.expr | None
    """Assigned value; None if it is not known, as for parameters and loops."""
    statement: ast.AST
    whole: ast.expr | None = None
    """Value that was unpacked, if there was one: `model, loader = build()`."""
    item: int = 0
    """Index of the item in the unpacked value."""

    @property
    def origin_value(self) -> ast.expr | None:
        """Return the assigned value, or the value that was unpacked."""
        return self.value or self.whole


@dataclass(frozen=True, slots=True)
class Definition:
    """Function, class, or value of a module's name, with its file."""

    module: SourceFile
    node: Function | ast.ClassDef | ast.expr


class ProjectFiles(Protocol):
    """Other files of the project that a file belongs to."""

    def definition(self, module: SourceFile, name: str) -> Definition | None:
        """Return the definition of an imported dotted name in its local file; None for other names."""

    def callers(self, module: SourceFile, function: Function) -> list[tuple[SourceFile, ast.Call]]:
        """Return the calls of a function, in its file and in files that import it."""

    def find_modules_with_words(self, module: SourceFile, *words: str) -> tuple[SourceFile, ...]:
        """Return the modules with one of these words, among a module and its local imports."""


class SourceFile:
    """Parsed file with its index. It is created once per file, and rules only read it."""

    def __init__(self, path: Path, text: str, tree: ast.Module) -> None:
        self.path = path
        self.text = text
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {}
        self.aliases: dict[str, str] = {}
        self.trains = any(word in text for word in names.TRAINS)
        """True if this file takes part in distributed training."""
        self.imports: list[tuple[str, int]] = []
        """Dotted names of imported modules (`pkg.mod`; for a from-import with the name) and the number of leading
        dots."""
        self.stars: list[str] = []
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        """Resolved name -> calls."""
        self.methods: dict[str, list[ast.Call]] = defaultdict(list)
        """Last part of the called name -> calls with any prefix."""
        self.bindings: dict[tuple[ast.AST, str], list[Binding]] = defaultdict(list)
        self.nodes: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.neighbours: ProjectFiles | None = None
        """Project of the file; set when the file is added to a project."""
        self.facts: dict[tuple[object, ...], object] = {}
        """Facts about nodes of this file, by kind of fact and node."""
        self._build_index()

    # -- building ---------------------------------------------------------------------------------------------------

    def _build_index(self) -> None:
        """Visit every node once, then collect imports, bindings and calls."""
        calls = self._visit_nodes()
        for nodes in self.nodes.values():
            nodes.sort(key=read_node_position)
        statements: list[ast.Import | ast.ImportFrom] = [*self.nodes_of(ast.Import), *self.nodes_of(ast.ImportFrom)]
        for statement in statements:
            self._register_import(statement)
        functions: list[Function] = [*self.nodes_of(ast.FunctionDef), *self.nodes_of(ast.AsyncFunctionDef)]
        for function in functions:
            self.functions[function.name].append(function)
            for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
                self.bindings[(function, argument.arg)].append(Binding(function.lineno, None, argument))
        self._collect_bindings()
        for call in sorted(calls, key=read_node_position):
            name = self.name(call.func)
            if name is not None:
                self.calls[name].append(call)
            if isinstance(call.func, ast.Attribute):
                self.methods[call.func.attr].append(call)
            elif isinstance(call.func, ast.Name):
                self.methods[call.func.id].append(call)
            elif isinstance(call.func, ast.Subscript):
                self.methods["[]"].append(call)  # a function from a table

    def _visit_nodes(self) -> list[ast.Call]:
        """Fill `parents` and `nodes`, and return all calls. The linter spends most of its time here."""
        by_kind, parents, calls, below = self.nodes, self.parents, [], _BELOW
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            kind = type(node)
            if kind is ast.Call:
                calls.append(cast("ast.Call", node))
            elif kind in _WANTED:
                by_kind[kind].append(node)
            for name in below[kind]:
                value = getattr(node, name)
                if type(value) is list:
                    for item in value:
                        if item is not None:
                            parents[item] = node
                            stack.append(item)
                elif value is not None:
                    parents[value] = node
                    stack.append(value)
        return calls

    def _register_import(self, statement: ast.Import | ast.ImportFrom) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                self.imports.append((alias.name, 0))
                if alias.asname:
                    self.aliases[alias.asname] = alias.name
                else:
                    root = alias.name.partition(".")[0]
                    self.aliases.setdefault(root, root)
        else:
            base = statement.module or ""
            self.imports.append((base, statement.level))
            for alias in statement.names:
                qualified = f"{base}.{alias.name}" if base else alias.name
                if alias.name == "*":
                    self.stars.append(base)
                    continue
                self.imports.append((qualified, statement.level))
                self.aliases[alias.asname or alias.name] = "." * statement.level + qualified

    def _collect_bindings(self) -> None:
        for assign in self.nodes_of(ast.Assign):
            for target in assign.targets:
                self._register_binding(target, assign.value, assign)
        typed: list[ast.AnnAssign | ast.NamedExpr] = [*self.nodes_of(ast.AnnAssign), *self.nodes_of(ast.NamedExpr)]
        for node in typed:
            self._register_binding(node.target, node.value, node)
        loops: list[ast.For | ast.AsyncFor] = [*self.nodes_of(ast.For), *self.nodes_of(ast.AsyncFor)]
        for loop in loops:
            self._register_binding(loop.target, None, loop)
        for block in self.nodes_of(ast.With):
            for item in block.items:
                if item.optional_vars is not None:
                    self._register_binding(item.optional_vars, item.context_expr, block)
        for bindings in self.bindings.values():
            bindings.sort(key=lambda binding: binding.line)

    def _register_binding(self, target: ast.expr, value: ast.expr | None, statement: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                for part, part_value in zip(target.elts, value.elts, strict=True):
                    self._register_binding(part, part_value, statement)
                return
            for item, part in enumerate(target.elts):
                name = format_dotted_name(part)
                if value is not None and name is not None:
                    home = (self._find_binding_scope(part, name), name)
                    self.bindings[home].append(Binding(part.lineno, None, statement, value, item))
                else:
                    self._register_binding(part, None, statement)
            return
        name = format_dotted_name(target)
        if name is not None:
            line = target.lineno
            self.bindings[(self._find_binding_scope(target, name), name)].append(Binding(line, value, statement))

    def _find_binding_scope(self, node: ast.AST, name: str) -> ast.AST:
        """Return the scope of a name: its function or the module; for `self.x` the class."""
        if name.startswith("self."):
            owner = self.find_enclosing_node(node, (ast.ClassDef,))
            if owner is not None:
                return owner
        return self.scope(node)

    @functools.cached_property
    def lines(self) -> list[str]:
        """Return the lines of the text without their ends."""
        return self.text.split("\n")

    @functools.cached_property
    def _dead_line_ranges(self) -> list[tuple[int, int]]:
        """Return the first and last lines of the code under each `if False:`."""
        blocks = [node.body if not read_constant_value(node.test) else node.orelse for node in self.nodes_of(ast.If)
                  if isinstance(node.test, ast.Constant)]  # fmt: skip
        return [(block[0].lineno, block[-1].end_lineno or block[-1].lineno) for block in blocks if block]

    def is_dead(self, line: int) -> bool:
        """Return whether a line is never run."""
        return any(first <= line <= last for first, last in self._dead_line_ranges)

    @functools.cached_property
    def started(self) -> dict[str, list[ast.Call]]:
        """Return name of a function -> calls that start processes with it: mp.spawn(main), Process(target=main)."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls_of(*names.STARTS):
            target = call.args[0] if call.args else find_keyword_value(call, "fn") or find_keyword_value(call, "target")
            name = format_dotted_name(target) if target is not None else None
            if name is not None:
                found[name].append(call)
        return found

    @functools.cached_property
    def return_values(self) -> dict[ast.AST, list[ast.expr]]:
        """Return function -> values that it returns."""
        found: dict[ast.AST, list[ast.expr]] = defaultdict(list)
        for statement in self.nodes_of(ast.Return):
            if statement.value is not None:
                found[self.scope(statement)].append(statement.value)
        return found

    @functools.cached_property
    def used(self) -> dict[str, set[str]]:
        """Return imported name -> parts of it that are called: itself, or the last part of `name.part()`."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, calls in self.calls_by_import.items():
            found[name] = {(format_dotted_name(call.func) or name).rpartition(".")[2] for call in calls}
        return found

    @functools.cached_property
    def calls_by_import(self) -> dict[str, list[ast.Call]]:
        """Return imported name -> calls of it or of its attributes."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for calls in self.methods.values():
            for call in calls:
                root = (format_dotted_name(call.func) or "").partition(".")[0]
                if root in self.aliases:
                    found[root].append(call)
        return found

    @functools.cached_property
    def is_test_file(self) -> bool:
        """Return whether a file contains tests and is not a program itself."""
        return any(name.partition(".")[0] in ("pytest", "unittest") for name, _ in self.imports) or bool(
            {"tests", "test", "testing"} & set(self.path.parts[-5:-1])
        )

    @functools.cached_property
    def attributes(self) -> dict[str, list[Binding]]:
        """Return last part of `args.rank` -> values of such attributes of any object but `self`."""
        found: dict[str, list[Binding]] = defaultdict(list)
        for (_, name), bindings in self.bindings.items():
            root, dot, last = name.rpartition(".")
            if dot and root != "self":
                found[last] += bindings
        return found

    @functools.cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Return the classes of the module by name."""
        return {node.name: node for node in self.nodes_of(ast.ClassDef)}

    # -- asking -----------------------------------------------------------------------------------------------------

    def name(self, node: ast.AST, depth: int = 3) -> str | None:
        """Return the dotted name that an expression means, through imports and simple assignments; None for others."""
        if isinstance(node, ast.Name):
            qualified = self.aliases.get(node.id)
            if (
                qualified is None
                and depth
                and (bindings := self.bindings.get((self.tree, node.id)))
                and len(bindings) == 1
            ):
                value = bindings[0].value
                qualified = self.name(value, depth - 1) if isinstance(value, ast.Name | ast.Attribute) else None
            if qualified is None:
                qualified = next((f"{star}.{node.id}" for star in self.stars if star.startswith("torch")), None)
                if node.id in self.functions or (qualified and names.resolve_canonical_name(qualified) not in _STARRED):
                    return None
            return names.resolve_canonical_name(qualified) if qualified else None
        if isinstance(node, ast.Attribute):
            below = self.name(node.value, depth)
            return names.resolve_canonical_name(f"{below}.{node.attr}") if below else None
        return None

    def nodes_of(self, kind: type[Kind]) -> list[Kind]:
        """Return all nodes of a kind in `_WANTED`, in the order of the file."""
        return cast("list[Kind]", self.nodes.get(kind, []))

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Return calls of any of these resolved names, in the order of the file."""
        calls = [call for name in names for call in self.calls.get(name, ())]
        return sorted(calls, key=read_node_position) if len(names) > 1 else calls

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function around a node, or the module."""
        return self.find_enclosing_node(node, SCOPES) or self.tree

    def find_enclosing_node(self, node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> ast.AST | None:
        """Return the nearest node of one of these kinds around a node; None without one."""
        above = self.parents.get(node)
        while above is not None and not isinstance(above, kinds):
            above = self.parents.get(above)
        return above

    def chain(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (parent, child) from a node up to its function or the module, which is included."""
        child = node
        while (above := self.parents.get(child)) is not None:
            yield above, child
            if isinstance(above, SCOPES):
                return
            child = above

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block(self, statement: ast.AST) -> list[ast.stmt]:
        """Return the list of statements that contains a statement."""
        above = self.parents.get(statement)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            value = getattr(above, name, None)
            if isinstance(value, list) and statement in value:  # nodes are equal only to themselves
                return value
        return []

    def lookup(self, node: ast.expr) -> list[Binding]:
        """Return the assignments to a name or `self.x`, in the nearest scope with one, in the order of the file."""
        name = format_dotted_name(node)
        if name is None:
            return []
        if name.startswith("self."):
            return self.bindings.get((self._find_binding_scope(node, name), name), [])
        scope: ast.AST | None = self.scope(node)
        while scope is not None:
            bindings = self.bindings.get((scope, name))
            if bindings:
                return bindings
            scope = self.find_enclosing_node(scope, SCOPES)
        return []

    def values(self, node: ast.expr, depth: int = 4) -> list[ast.expr]:
        """Return the values of an expression through assignments, or the expression itself if none are known."""
        if isinstance(node, ast.IfExp):
            return self.values(node.body, depth) + self.values(node.orelse, depth)
        if isinstance(node, ast.Name | ast.Attribute) and depth:
            bound = [binding.value for binding in self.lookup(node) if binding.value is not None]
            if bound:
                return [value for candidate in bound[-6:] for value in self.values(candidate, depth - 1)]
        return [node]

    def find_current_binding(self, node: ast.expr, at: ast.AST) -> Binding | None:
        """Return the assignment that determines a name's value at a place; None if that is not certain.

        An assignment is certain if it is earlier in the same function and on every path to the place.
        """
        name = format_dotted_name(node)
        if name is None:
            return None
        scope = self.scope(at)
        earlier = [
            binding for binding in self.bindings.get((scope, name), ()) if binding.line < read_node_position(at)[0]
        ]
        if not earlier or not self.dominates(earlier[-1].statement, at):
            return None
        return earlier[-1]

    def dominates(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether `second`, later in the same function, is only reached through `first`."""
        if first not in self.parents or self.scope(first) is not self.scope(second):
            return False
        above = {id(parent): child for parent, child in self.chain(second)}
        for parent, child in self.chain(self.statement(first)):
            if isinstance(parent, ast.If | ast.For | ast.While | ast.Try | ast.ExceptHandler | ast.Match):
                other = above.get(id(parent))
                if other is None or _find_child_field(parent, other) != _find_child_field(parent, child):
                    return False
        return True

    def is_node_within(self, node: ast.AST, function: ast.AST) -> bool:
        """Return whether a node is below another one."""
        above: ast.AST | None = node
        while above is not None and above is not function:
            above = self.parents.get(above)
        return above is function

    def find_calls_below(self, node: ast.AST, name: str, *, method: bool = True) -> list[ast.Call]:
        """Return calls below a node with a name that ends in `name` (method) or resolves to it."""
        candidates = self.methods.get(name, []) if method else self.calls.get(name, [])
        return [call for call in candidates if self.is_node_within(call, node)]


def format_dotted_name(node: ast.AST) -> str | None:
    """Return the text of a name such as `model`, `self.model`, `args.local_rank`; None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        below = format_dotted_name(node.value)
        return f"{below}.{node.attr}" if below else None
    return None


def unparse_node(module: SourceFile, node: ast.AST) -> str:
    """Return the text of a node from `ast.unparse`; the result is cached."""
    fact = ("text", node)
    if fact not in module.facts:
        module.facts[fact] = ast.unparse(node)
    return str(module.facts[fact])


def find_keyword_value(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument; None without one."""
    return next((argument.value for argument in call.keywords if argument.arg == name), None)


def find_argument(call: ast.Call, name: str, index: int) -> ast.expr | None:
    """Return the value of an argument that may be passed by its name or at an index; None without one."""
    value = find_keyword_value(call, name)
    return call.args[index] if value is None and len(call.args) > index else value


def read_last_name(node: ast.AST) -> str:
    """Return the last part of a name, such as `local_rank` for `args.local_rank`; empty for other expressions."""
    return (format_dotted_name(node) or "").rpartition(".")[2]


def read_assigned_name(module: SourceFile, node: ast.AST) -> str | None:
    """Return the name to which the statement of a node assigns its value; None without one."""
    statement = module.statement(node)
    return format_dotted_name(statement.targets[0]) if isinstance(statement, ast.Assign) else None


def find_callers(module: SourceFile, function: ast.AST) -> list[tuple[SourceFile, ast.Call]]:
    """Return the calls of a function in the project; none for other nodes."""
    if not isinstance(function, Function) or module.neighbours is None:
        return []
    return module.neighbours.callers(module, function)


def list_contexts(module: SourceFile, node: ast.AST) -> list[ast.expr]:
    """Return the expressions of the `with` statements around a node, within its function."""
    blocks = [parent for parent, _ in module.chain(node) if isinstance(parent, ast.With)]
    return [item.context_expr for block in blocks for item in block.items]


def list_calls_on(module: SourceFile, owner: str | None, method: str) -> list[ast.Call]:
    """Return the calls `owner.method(...)` of a file."""
    return [
        call
        for call in module.methods.get(method, ())
        if isinstance(call.func, ast.Attribute) and format_dotted_name(call.func.value) == owner
    ]


def name_other_lines(lines: Iterable[int]) -> str:
    """Return text that names the other lines of a problem; empty without any."""
    numbers = ", ".join(f"line {line}" for line in lines)
    return f" (also {numbers})" if numbers else ""


def list_additions(module: SourceFile, name: str | None, scope: ast.AST) -> list[ast.AugAssign]:
    """Return the statements `name += value`, with any operator, in a function or outside of functions."""
    changes = module.nodes_of(ast.AugAssign)
    return [one for one in changes if format_dotted_name(one.target) == name and module.scope(one) is scope]


def read_constant_value(node: ast.AST | None) -> object:
    """Return the value of a literal; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int | float) else None
    return None


def read_node_position(node: ast.AST) -> tuple[int, int]:
    """Return (line from 1, column in bytes from 0)."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _find_child_field(parent: ast.AST, child: ast.AST) -> str:
    for name, value in parent.__dict__.items():
        if value is child or (isinstance(value, list) and any(item is child for item in value)):
            return name
    return ""


_WANTED = frozenset(
    [
        ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign,
        ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.While, ast.With, ast.If, ast.Try, ast.ExceptHandler,
        ast.Attribute, ast.Subscript, ast.BinOp, ast.Return, ast.Continue, ast.Break, ast.Dict,
    ]
)  # fmt: skip
_STARRED = names.COLLECTIVES | names.WRAPPERS | {names.INIT, names.SAMPLER, names.LOADER, "torch.distributed.get_rank"}


class _ChildFields(dict[type[ast.AST], tuple[str, ...]]):
    """Kind of node -> fields with other nodes; an entry is added when a kind is first used."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        child_fields = self[kind] = _list_child_fields(kind)
        return child_fields


_BELOW = _ChildFields()


def _list_child_fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """Return the fields of a kind of node that contain other nodes."""
    if issubclass(kind, ast.Constant | ast.Global | ast.Nonlocal | ast.MatchSingleton):
        return ()
    return tuple(name for name in kind._fields if name not in _PLAIN)
