"""Programs that Python's parser does not take: each is a SyntaxError, and none ends this process."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

from dtctl.lint.engine import lint_text
from dtctl.lint.model import ClusterFacts
from dtctl.python_source import NestingTooDeepError, parse_python, run_on_large_stack

ROOT = Path(__file__).parents[2]
SUMS, SIGNS, CALLS = "x = 1" + " + 1" * 5000, "x = " + "-" * 5000 + "1", "x = f" + "()" * 5000
BRANCHES = "if a:\n    pass\n" + "elif b:\n    pass\n" * 5000


@pytest.mark.parametrize("text", [SUMS, SIGNS, CALLS, BRANCHES], ids=["sums", "signs", "calls", "branches"])
def test_what_is_deeper_than_usual_is_read(text: str) -> None:
    assert len(list(ast.walk(parse_python(text)))) > 5000
    assert lint_text(Path("a.py"), f"import torch\n{text}\n", cluster=ClusterFacts()) == []


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "not " * 100_000 + "1",
        "x = " + "lambda: " * 50_000 + "1",
        "x = " + "(" * 500 + ")" * 500,
        "if a:\n    pass\n" + "elif b:\n    pass\n" * 100_000,
        "x = 1\n\0",
        "x = '\ud800'",
        "x = ",
    ],
    ids=["not", "lambda", "brackets", "branches", "null", "surrogate", "half"],
)
def test_what_is_not_read_is_a_syntax_error(text: str) -> None:
    with pytest.raises(SyntaxError):
        parse_python(text)
    (problem,) = lint_text(Path("a.py"), text, cluster=ClusterFacts())
    assert problem.rule == "DT000"


@pytest.mark.parametrize("text", ["x = 1" + "+1" * 2_000_000, "x = f" + "()" * 2_000_000], ids=["sums", "calls"])
def test_millions_of_levels_are_read_or_refused(text: str) -> None:
    try:
        tree = parse_python(text)
    except NestingTooDeepError:
        return
    assert isinstance(tree, ast.Module)


def test_what_a_function_raises_on_the_large_stack_is_raised_here() -> None:
    def sink(depth: int) -> int:
        return sink(depth - 1) + 1 if depth else 0

    limit = sys.getrecursionlimit()
    assert run_on_large_stack(lambda: sink(20_000)) == 20_000
    with pytest.raises(NestingTooDeepError):
        run_on_large_stack(lambda: sink(1_000_000))
    with pytest.raises(ZeroDivisionError):
        run_on_large_stack(lambda: 1 / 0)
    assert sys.getrecursionlimit() == limit


def _imported(body: list[ast.stmt]) -> list[ast.ImportFrom]:
    """The imports at the top of a module that run under every version."""
    found: list[ast.ImportFrom] = []
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            found.append(statement)
        elif isinstance(statement, ast.With):
            found += _imported(statement.body)
    return found


def test_the_standard_library_of_this_python_has_what_is_imported() -> None:
    """In the oldest Python, too, for modules that need torch, which the tests at all lower bounds do without."""
    lost = [
        f"{path.relative_to(ROOT)}: {statement.module}.{alias.name}"
        for path in sorted((ROOT / "dtctl").rglob("*.py"))
        for statement in _imported(parse_python(path.read_text()).body)
        if (statement.module or "").partition(".")[0] in sys.stdlib_module_names
        for alias in statement.names
        if not hasattr(import_module(statement.module or ""), alias.name)
        and f"{statement.module}.{alias.name}" not in sys.modules
    ]
    assert lost == []
