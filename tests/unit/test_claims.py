"""Each function that the table of claims names exists."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from dtctl.launch.records.events import RunEnded

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/reference/claims.md").read_text()
NAMED = sorted(set(re.findall(r"`(dtctl(?:\.\w+)+(?::[\w.]+)?)`", TEXT)))


def defined(module: Path) -> set[str]:
    """Names of a module's functions, classes and variables, and `Class.name` of what its classes have."""
    found: set[str] = set()
    for statement in ast.parse(module.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(statement, ast.ClassDef):
            found |= {f"{statement.name}.{own.name}" for own in statement.body if isinstance(own, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("named", NAMED)
def test_what_is_named_exists(named: str) -> None:
    """Read, not imported: what is sent to nodes runs when it is imported."""
    module, _, function = named.partition(":")
    path = ROOT / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert path.exists(), module
    assert not function or function in defined(path)


def test_every_row_names_what_it_is_computed_from() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and not line.startswith(("| said", "|---"))]
    assert len(rows) > 50
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        assert "`dtctl." in cells[2], row


def test_what_users_read_in_json_is_in_the_table() -> None:
    """The keys of a launch's last event, of `stop` and of `doctor`."""
    keys = {each.name for each in fields(RunEnded)} - {"time", "run", "error"}
    keys |= {"not_examined", "newest_good"}
    assert not {key for key in keys if key not in TEXT}
