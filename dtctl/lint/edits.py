"""Places for edits: whole lines, and imports."""

from __future__ import annotations

import ast

from dtctl.lint.model import Edit
from dtctl.lint.source_file import SourceFile, position


def indent(module: SourceFile, statement: ast.stmt) -> str | None:
    """Return the blanks before a statement; None if anything else stands before it on its line."""
    line = module.lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
    decorated = getattr(statement, "decorator_list", None)
    return None if line.strip(" \t") or decorated else line


def ends_its_line(module: SourceFile, statement: ast.stmt) -> bool:
    """Return whether nothing but a comment follows a statement on its last line."""
    line = module.lines[(statement.end_lineno or statement.lineno) - 1].encode()
    rest = line[statement.end_col_offset :].decode().strip()
    return not rest or rest.startswith("#")


def imported(module: SourceFile, name: str) -> tuple[Edit, ...] | None:
    """The edits after which a module can be used under its own name everywhere in a file; None if it cannot be done."""
    if any(bound == name for _, bound in module.bindings):
        return None
    plain = [
        statement
        for statement in module.nodes_of(ast.Import)
        if module.parents[statement] is module.tree
        and any(alias.name == name and not alias.asname for alias in statement.names)
    ]
    if plain:
        return ()
    if module.aliases.get(name, name) != name or name in module.functions:
        return None
    imports: list[ast.Import | ast.ImportFrom] = [*module.nodes_of(ast.Import), *module.nodes_of(ast.ImportFrom)]
    top = [
        statement
        for statement in imports
        if module.parents[statement] is module.tree and getattr(statement, "module", "") != "__future__"
    ]
    first = min(top, key=position, default=None)
    if first is None or first.col_offset:
        return None
    return (Edit(position(first), position(first), f"import {name}\n"),)
