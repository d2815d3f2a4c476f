"""What import-linter has no contract for: that no modules import each other in a circle."""

from __future__ import annotations

import grimp

from dtctl.cli import app


def test_no_module_is_part_of_a_circle_of_imports() -> None:
    """Imports in functions and for types count, too: who reads a file has to read what it names."""
    graph = grimp.build_graph("dtctl", cache_dir=None)
    for name in (*app.COMMANDS, *app.HIDDEN, *app.GROUPS):  # imported by name
        graph.add_import(importer="dtctl.cli.app", imported=f"dtctl.cli.{name.replace('-', '_')}")
    circles = {
        frozenset({module, *graph.find_upstream_modules(module) & graph.find_downstream_modules(module)})
        for module in graph.modules
    }
    assert [sorted(circle) for circle in circles if len(circle) > 1] == []
