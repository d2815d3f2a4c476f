"""Which names of a function have no say in what it computes: `until` in `if step == until: raise SystemExit`.

They decide when something is printed, written, waited for, or broken off. That one of them is another number now than
when a run began does not make its resume inexact. Read from the source; what cannot be read is taken to have a say.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Iterator, Sequence
from typing import Final

from dtctl.python_source import parse_python

HARMLESS: Final = frozenset(
    {
        "print",
        "open",
        "exit",
        "quit",
        "os",
        "sys",
        "time",
        "signal",
        "logging",
        "logger",
        "log",
        "warnings",
        "subprocess",
    }
    | {"shutil", "faulthandler", "threading", "Path", "json", "pprint", "writer", "wandb", "tqdm", "trainer", "worker"}
)
"""Names whose calls leave nothing in a training."""


def idle_names(function: types.FunctionType) -> frozenset[str]:
    """Names that the function reads and that cannot change what it returns, or leaves in what it was given."""
    return _idle_names(function.__code__)


@functools.lru_cache(maxsize=4096)
def _idle_names(code: types.CodeType) -> frozenset[str]:
    node = _syntax_tree(code)
    if node is None:
        return frozenset()
    body: Sequence[ast.AST] = node.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else [node.body]
    live = set(_live(body))
    return frozenset({name.id for part in body for name in ast.walk(part) if isinstance(name, ast.Name)} - live)


def syntax_tree(function: types.FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    """Where it stands in its file; None if that cannot be said."""
    return _syntax_tree(function.__code__)


def _syntax_tree(code: types.CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    candidates = _functions(code.co_filename).get((code.co_firstlineno, code.co_name), [])
    return candidates[0] if len(candidates) == 1 else None


_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@functools.lru_cache(maxsize=256)
def _functions(path: str) -> dict[tuple[int, str], list[_Function]]:
    try:
        tree = parse_python("".join(linecache.getlines(path)))
    except SyntaxError:
        return {}
    functions: dict[tuple[int, str], list[_Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.setdefault((first, node.name), []).append(node)
        elif isinstance(node, ast.Lambda):
            functions.setdefault((node.lineno, "<lambda>"), []).append(node)
    return functions


def _live(body: Sequence[ast.AST]) -> Iterator[str]:
    """Names that have a say."""
    for part in body:
        if isinstance(part, ast.stmt) and leaves_nothing(part):
            continue
        if isinstance(part, ast.If | ast.While):
            yield from _names(part.test)
            yield from _live([*part.body, *part.orelse])
        elif isinstance(part, ast.For | ast.AsyncFor):
            yield from _names(part.target)
            yield from _names(part.iter)
            yield from _live([*part.body, *part.orelse])
        elif isinstance(part, ast.With | ast.AsyncWith):
            for item in part.items:
                yield from _names(item)
            yield from _live(part.body)
        elif isinstance(part, ast.Try):
            yield from _live([*part.body, *part.orelse, *part.finalbody])
            for handler in part.handlers:
                yield from _live(handler.body)
        else:
            yield from _names(part)


def leaves_nothing(part: ast.stmt) -> bool:
    """Whether a statement prints, writes or breaks off, and does nothing else."""
    if isinstance(part, ast.Pass | ast.Raise):
        return True
    if isinstance(part, ast.Expr):
        return isinstance(part.value, ast.Constant) or _is_harmless(part.value)
    if isinstance(part, ast.If | ast.While):
        return not _binds(part.test) and all(map(leaves_nothing, [*part.body, *part.orelse]))
    if isinstance(part, ast.With):
        return all(_is_harmless(item.context_expr) for item in part.items) and all(
            leaves_nothing(inner) or _writes_to(inner, part) for inner in part.body
        )
    return False


def _is_harmless(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call) or _binds(call):
        return False
    root: ast.expr = call.func
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
        root = root.func if isinstance(root, ast.Call) else root.value
    return isinstance(root, ast.Name) and root.id in HARMLESS


def _writes_to(part: ast.stmt, opened: ast.With) -> bool:
    """Whether a statement is a call of what `with open(...) as file` has named."""
    names = {item.optional_vars.id for item in opened.items if isinstance(item.optional_vars, ast.Name)}
    call = part.value if isinstance(part, ast.Expr) else None
    func = call.func if isinstance(call, ast.Call) else None
    return isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in names


def _binds(part: ast.AST) -> bool:
    return any(isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for node in ast.walk(part))


def _names(part: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(part) if isinstance(node, ast.Name))
