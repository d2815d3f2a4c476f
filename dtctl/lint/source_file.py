"""One Python file as rules see it: calls by resolved name, values of names, enclosing nodes."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

from dtctl.lint import names

Kind = TypeVar("Kind", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_PLAIN = frozenset(
    "id ctx attr op ops arg kind type_comment name asname module level simple conversion is_async rest kwd_attrs "
    "type_ignores".split()
)
"""Fields that hold no nodes, or none that rules look at."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A name was given a value."""

    line: int
    value: ast.expr | None
    """None when it is not known: parameters, loops."""
    statement: ast.AST
    whole: ast.expr | None = None
    """Value that was unpacked, if it was: `model, loader = build()`."""
    item: int = 0
    """Index of the item."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A function, a class, or a value given to a name of a module, and the file that it stands in."""

    module: SourceFile
    node: Function | ast.ClassDef | ast.expr


class Neighbours(Protocol):
    """The other files of the project that a file belongs to."""

    def definition(self, module: SourceFile, name: str) -> Definition | None:
        """Return what a dotted name that a file imports is, in the local file that defines it."""

    def callers(self, module: SourceFile, function: Function) -> list[tuple[SourceFile, ast.Call]]:
        """Return the calls of a function, in its file and in those that import it."""

    def having(self, module: SourceFile, *words: str) -> tuple[SourceFile, ...]:
        """Return those of a module and its local imports whose text has one of some words."""


class SourceFile:
    """A parsed file and its index. Made once per file; rules only read it."""

    def __init__(self, path: Path, text: str, tree: ast.Module) -> None:
        self.path = path
        self.text = text
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {}
        self.aliases: dict[str, str] = {}
        self.trains = any(word in text for word in names.TRAINS)
        """True if this file takes part in distributed training."""
        self.imports: list[tuple[str, int]] = []
        """Dotted names of imported modules (`pkg.mod`, or with a from the name too) and the number of leading dots."""
        self.stars: list[str] = []
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        """Resolved name -> calls."""
        self.methods: dict[str, list[ast.Call]] = defaultdict(list)
        """Last part of the called name -> calls, whatever stands before it."""
        self.bindings: dict[tuple[ast.AST, str], list[Binding]] = defaultdict(list)
        self.nodes: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.neighbours: Neighbours | None = None
        """Set when the file is added to a project."""
        self.facts: dict[tuple[object, ...], object] = {}
        """Facts about nodes of this file, by kind of fact and node."""
        self._index()

    # -- building ---------------------------------------------------------------------------------------------------

    def _index(self) -> None:
        """Visit every node once, then read off imports, bindings and calls."""
        calls = self._visit()
        for nodes in self.nodes.values():
            nodes.sort(key=position)
        statements: list[ast.Import | ast.ImportFrom] = [*self.nodes_of(ast.Import), *self.nodes_of(ast.ImportFrom)]
        for statement in statements:
            self._imported(statement)
        functions: list[Function] = [*self.nodes_of(ast.FunctionDef), *self.nodes_of(ast.AsyncFunctionDef)]
        for function in functions:
            self.functions[function.name].append(function)
            for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
                self.bindings[(function, argument.arg)].append(Binding(function.lineno, None, argument))
        self._bind()
        for call in sorted(calls, key=position):
            name = self.name(call.func)
            if name is not None:
                self.calls[name].append(call)
            if isinstance(call.func, ast.Attribute):
                self.methods[call.func.attr].append(call)
            elif isinstance(call.func, ast.Name):
                self.methods[call.func.id].append(call)
            elif isinstance(call.func, ast.Subscript):
                self.methods["[]"].append(call)  # a function out of a table

    def _visit(self) -> list[ast.Call]:
        """Fill `parents` and `nodes`; all calls. Most of the linter's time is spent here."""
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

    def _imported(self, statement: ast.Import | ast.ImportFrom) -> None:
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

    def _bind(self) -> None:
        for assign in self.nodes_of(ast.Assign):
            for target in assign.targets:
                self._target(target, assign.value, assign)
        typed: list[ast.AnnAssign | ast.NamedExpr] = [*self.nodes_of(ast.AnnAssign), *self.nodes_of(ast.NamedExpr)]
        for node in typed:
            self._target(node.target, node.value, node)
        loops: list[ast.For | ast.AsyncFor] = [*self.nodes_of(ast.For), *self.nodes_of(ast.AsyncFor)]
        for loop in loops:
            self._target(loop.target, None, loop)
        for block in self.nodes_of(ast.With):
            for item in block.items:
                if item.optional_vars is not None:
                    self._target(item.optional_vars, item.context_expr, block)
        for bindings in self.bindings.values():
            bindings.sort(key=lambda binding: binding.line)

    def _target(self, target: ast.expr, value: ast.expr | None, statement: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                for part, part_value in zip(target.elts, value.elts, strict=True):
                    self._target(part, part_value, statement)
                return
            for item, part in enumerate(target.elts):
                name = key(part)
                if value is not None and name is not None:
                    home = (self._home(part, name), name)
                    self.bindings[home].append(Binding(part.lineno, None, statement, value, item))
                else:
                    self._target(part, None, statement)
            return
        name = key(target)
        if name is not None:
            line = target.lineno
            self.bindings[(self._home(target, name), name)].append(Binding(line, value, statement))

    def _home(self, node: ast.AST, name: str) -> ast.AST:
        """Return where a name lives: its function or the module; for `self.x` the class."""
        if name.startswith("self."):
            owner = self.enclosing(node, (ast.ClassDef,))
            if owner is not None:
                return owner
        return self.scope(node)

    @functools.cached_property
    def lines(self) -> list[str]:
        """The lines of the text, without their ends."""
        return self.text.split("\n")

    @functools.cached_property
    def _dead(self) -> list[tuple[int, int]]:
        """The first and the last lines of what stands under `if False:`."""
        blocks = [node.body if not constant(node.test) else node.orelse for node in self.nodes_of(ast.If)
                  if isinstance(node.test, ast.Constant)]  # fmt: skip
        return [(block[0].lineno, block[-1].end_lineno or block[-1].lineno) for block in blocks if block]

    def is_dead(self, line: int) -> bool:
        """Return whether a line is never run."""
        return any(first <= line <= last for first, last in self._dead)

    @functools.cached_property
    def started(self) -> dict[str, list[ast.Call]]:
        """Name of a function -> calls that start processes with it: mp.spawn(main), Process(target=main)."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls_of(*names.STARTS):
            target = call.args[0] if call.args else keyword(call, "fn") or keyword(call, "target")
            name = key(target) if target is not None else None
            if name is not None:
                found[name].append(call)
        return found

    @functools.cached_property
    def returned(self) -> dict[ast.AST, list[ast.expr]]:
        """Function -> what it returns."""
        found: dict[ast.AST, list[ast.expr]] = defaultdict(list)
        for statement in self.nodes_of(ast.Return):
            if statement.value is not None:
                found[self.scope(statement)].append(statement.value)
        return found

    @functools.cached_property
    def used(self) -> dict[str, set[str]]:
        """Imported name -> what is called of it: itself, or the last part of `name.part()`."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, calls in self.used_in.items():
            found[name] = {(key(call.func) or name).rpartition(".")[2] for call in calls}
        return found

    @functools.cached_property
    def used_in(self) -> dict[str, list[ast.Call]]:
        """Imported name -> calls of it, or of what it has."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for calls in self.methods.values():
            for call in calls:
                root = (key(call.func) or "").partition(".")[0]
                if root in self.aliases:
                    found[root].append(call)
        return found

    @functools.cached_property
    def tests(self) -> bool:
        """Return whether a file has tests of a program, and is none."""
        return any(name.partition(".")[0] in ("pytest", "unittest") for name, _ in self.imports) or bool(
            {"tests", "test", "testing"} & set(self.path.parts[-5:-1])
        )

    @functools.cached_property
    def attributes(self) -> dict[str, list[Binding]]:
        """Last part of `args.rank` -> what such attributes are set to, whatever they belong to but `self`."""
        found: dict[str, list[Binding]] = defaultdict(list)
        for (_, name), bindings in self.bindings.items():
            root, dot, last = name.rpartition(".")
            if dot and root != "self":
                found[last] += bindings
        return found

    @functools.cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the module by name."""
        return {node.name: node for node in self.nodes_of(ast.ClassDef)}

    # -- asking -----------------------------------------------------------------------------------------------------

    def name(self, node: ast.AST, depth: int = 3) -> str | None:
        """The dotted name that an expression means, imports and simple assignments followed; None for anything else."""
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
                if node.id in self.functions or (qualified and names.canonical(qualified) not in _STARRED):
                    return None
            return names.canonical(qualified) if qualified else None
        if isinstance(node, ast.Attribute):
            below = self.name(node.value, depth)
            return names.canonical(f"{below}.{node.attr}") if below else None
        return None

    def nodes_of(self, kind: type[Kind]) -> list[Kind]:
        """Return all nodes of a kind, in the order of the file. Kinds in `_WANTED` only."""
        return cast("list[Kind]", self.nodes.get(kind, []))

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Calls of any of these resolved names, in the order of the file."""
        calls = [call for name in names for call in self.calls.get(name, ())]
        return sorted(calls, key=position) if len(names) > 1 else calls

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function around a node, or the module."""
        return self.enclosing(node, _SCOPES) or self.tree

    def enclosing(self, node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> ast.AST | None:
        """Return the nearest node around this one that is of one of these kinds."""
        above = self.parents.get(node)
        while above is not None and not isinstance(above, kinds):
            above = self.parents.get(above)
        return above

    def chain(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """(parent, child) from a node up to its function or the module, that one included."""
        child = node
        while (above := self.parents.get(child)) is not None:
            yield above, child
            if isinstance(above, _SCOPES):
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
        for value in above.__dict__.values() if above is not None else ():
            if isinstance(value, list) and any(item is statement for item in value):
                return value
        return []

    def lookup(self, node: ast.expr) -> list[Binding]:
        """Return what a name or `self.x` is set to, in the nearest scope that sets it; in the order of the file."""
        name = key(node)
        if name is None:
            return []
        if name.startswith("self."):
            return self.bindings.get((self._home(node, name), name), [])
        scope: ast.AST | None = self.scope(node)
        while scope is not None:
            bindings = self.bindings.get((scope, name))
            if bindings:
                return bindings
            scope = self.enclosing(scope, _SCOPES)
        return []

    def values(self, node: ast.expr, depth: int = 4) -> list[ast.expr]:
        """Return what an expression may be, names replaced by what they were set to; itself when nothing is known."""
        if isinstance(node, ast.IfExp):
            return self.values(node.body, depth) + self.values(node.orelse, depth)
        if isinstance(node, ast.Name | ast.Attribute) and depth:
            bound = [binding.value for binding in self.lookup(node) if binding.value is not None]
            if bound:
                return [value for candidate in bound[-6:] for value in self.values(candidate, depth - 1)]
        return [node]

    def current(self, node: ast.expr, at: ast.AST) -> Binding | None:
        """Return the assignment that a name has its value from at a place, if that is certain.

        It is if it stands before, in the same function, and on every way to the place.
        """
        name = key(node)
        if name is None:
            return None
        scope = self.scope(at)
        earlier = [binding for binding in self.bindings.get((scope, name), ()) if binding.line < position(at)[0]]
        if not earlier or not self.dominates(earlier[-1].statement, at):
            return None
        return earlier[-1]

    def dominates(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether `second`, further down in the same function, is only reached over `first`."""
        if first not in self.parents or self.scope(first) is not self.scope(second):
            return False
        above = {id(parent): child for parent, child in self.chain(second)}
        for parent, child in self.chain(self.statement(first)):
            if isinstance(parent, ast.If | ast.For | ast.While | ast.Try | ast.ExceptHandler | ast.Match):
                other = above.get(id(parent))
                if other is None or _branch(parent, other) != _branch(parent, child):
                    return False
        return True

    def within(self, node: ast.AST, function: ast.AST) -> bool:
        """Return whether a node is below another one."""
        above: ast.AST | None = node
        while above is not None and above is not function:
            above = self.parents.get(above)
        return above is function

    def below(self, node: ast.AST, name: str, *, method: bool = True) -> list[ast.Call]:
        """Return the calls under a node with a name that ends in `name` (method) or resolves to it."""
        candidates = self.methods.get(name, []) if method else self.calls.get(name, [])
        return [call for call in candidates if self.within(call, node)]


def key(node: ast.AST) -> str | None:
    """`model`, `self.model`, `args.local_rank`: the text of a name; None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        below = key(node.value)
        return f"{below}.{node.attr}" if below else None
    return None


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument."""
    return next((argument.value for argument in call.keywords if argument.arg == name), None)


def constant(node: ast.AST | None) -> object:
    """Return the value of a literal; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int | float) else None
    return None


def position(node: ast.AST) -> tuple[int, int]:
    """(line from 1, column in bytes from 0)."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _branch(parent: ast.AST, child: ast.AST) -> str:
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


class _Below(dict[type[ast.AST], tuple[str, ...]]):
    """Kind of node -> fields that hold other nodes; filled as kinds are met."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        child_fields = self[kind] = _fields(kind)
        return child_fields


_BELOW = _Below()


def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """Return the fields of a kind of node that hold others."""
    if issubclass(kind, ast.Constant | ast.Global | ast.Nonlocal | ast.MatchSingleton):
        return ()
    return tuple(name for name in kind._fields if name not in _PLAIN)
