"""Imports of a script: modules that a node imports once for all its workers, and signs of a loop of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from dtctl.python_source import parse_python

WORTH = ("torch", "numpy", "dtctl.runtime")
"""Slow to import, and safe to fork after: they start no threads and touch no GPU by being imported."""
WITH_TORCH = "torch._dynamo"
"""Imported by the first optimizer or DDP that is made; half as slow as torch itself."""
RUNTIME = "dtctl.runtime"
TRAINING = {"Trainer": f"{RUNTIME}.loop", "run": f"{RUNTIME}.main"}
"""Modules that importing a name from `dtctl.runtime` loads, each of them a hundred modules."""


def find_preload_modules(source: str) -> tuple[str, ...]:
    """Return the modules worth importing beforehand among those that a script imports at its top level.

    Empty for a script that is not Python, which its interpreter will report.
    """
    try:
        tree = parse_python(source)
    except SyntaxError:
        return ()
    names = dict.fromkeys(name for name in _list_imported_modules(tree.body) if _is_worth(name))
    if any(name.partition(".")[0] in ("torch", "dtctl") for name in names):
        names[WITH_TORCH] = None
    return tuple(names)


def imports_session(source: str) -> bool:
    """Return whether a script imports `dtctl.runtime.session` at its top level: its loop is its own."""
    try:
        tree = parse_python(source)
    except SyntaxError:
        return False
    imports = [statement for statement in tree.body if isinstance(statement, ast.ImportFrom)]
    return any(each.module == RUNTIME and any(name.name == "session" for name in each.names) for each in imports)


def _is_worth(name: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in WORTH)


def _list_imported_modules(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, level=0, names=names) if module == RUNTIME:
                yield from (TRAINING.get(alias.name, RUNTIME) for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from (f"{module}.{alias.name}" for alias in names if f"{module}.{alias.name}" in WORTH)
                yield module
            case ast.Try(body=inner) | ast.With(body=inner):
                yield from _list_imported_modules(inner)
