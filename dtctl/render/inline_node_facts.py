"""Programs for machines without dtctl: their text contains the parts of `dtctl.node_facts` that they import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from dtctl import node_facts


def build_standalone_program(program: Path) -> str:
    """Return the text of a Python program that imports nothing but the standard library.

    Args:
        program: its file; of dtctl it may import names of `dtctl.node_facts`.
    """
    text = program.read_text(encoding="utf-8")
    tree = ast.parse(text)
    (facts_import,) = (
        node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == node_facts.__name__
    )
    needed = dict.fromkeys(name for alias in facts_import.names for name in _find_needed_names(alias.name))
    facts, source = _parse_node_facts()
    imports = {
        ast.unparse(node) for node in (*tree.body, *(facts[name] for name in needed)) if isinstance(node, ast.Import)
    }
    rest = tree.body[tree.body.index(facts_import) + 1 :]
    definitions = (facts[name] for name in facts if name in needed and not isinstance(facts[name], ast.Import))
    parts = [
        text[: text.index('"""', 3) + 3],
        "from __future__ import annotations",  # Python 3.8 could not read the annotations without it
        "\n".join(sorted(imports)),
        *(ast.get_source_segment(source, definition) or "" for definition in definitions),
        "\n".join(text.splitlines()[rest[0].lineno - 1 :]).rstrip(),
    ]
    return "\n\n".join(parts)


@functools.cache
def _parse_node_facts() -> tuple[dict[str, ast.stmt], str]:
    """Return the definitions of `dtctl.node_facts` by name, and its text."""
    text = Path(node_facts.__file__).read_text(encoding="utf-8")
    definitions: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            definitions[node.targets[0].id] = node
        elif isinstance(node, ast.Import):
            definitions[node.names[0].name] = node
    return definitions, text


def _find_needed_names(name: str) -> Iterator[str]:
    """Yield a name and all names that its definition uses."""
    facts, _ = _parse_node_facts()
    yield name
    for node in ast.walk(facts[name]):
        if isinstance(node, ast.Name) and node.id in facts and node.id != name:
            yield from _find_needed_names(node.id)
