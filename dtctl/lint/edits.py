"""Positions of edits: whole lines, and imports."""

from __future__ import annotations

import ast

from dtctl.lint.model import Edit
from dtctl.lint.source_file import SourceFile, read_node_position


def find_statement_indent(module: SourceFile, statement: ast.stmt) -> str | None:
    """Return the blanks in front of a statement; None if other text precedes it on its line."""
    line = module.lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
    decorated = getattr(statement, "decorator_list", None)
    return None if line.strip(" \t") or decorated else line


def ends_its_line(module: SourceFile, statement: ast.stmt) -> bool:
    """Return whether only a comment follows a statement on its last line."""
    line = module.lines[(statement.end_lineno or statement.lineno) - 1].encode()
    rest = line[statement.end_col_offset :].decode().strip()
    return not rest or rest.startswith("#")


def build_import_edits(module: SourceFile, name: str) -> tuple[Edit, ...] | None:
    """Return edits after which a module can be used by its own name in a file; None if that is impossible."""
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
    first = min(top, key=read_node_position, default=None)
    if first is None or first.col_offset:
        return None
    return (Edit(read_node_position(first), read_node_position(first), f"import {name}\n"),)
