"""Messages count things in one form: `1 file`, `2 files`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import dtctl
from dtctl.printable import format_count

PACKAGE = Path(dtctl.__file__).parent
LENGTH = re.compile(r"len\(\w+(\.\w+)*\)\Z")
NOUN = re.compile(r" (nodes|files|processes|hosts|runs|tasks|scripts|folders|programs|checks)\b")
MANY = {"too many", "are more than", "fails with", "found", "nodes failed", " of the ", "machine alone", "these are"}
"""Words of messages that are printed about several things alone."""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((1, "file"), "1 file"), ((0, "file"), "0 files"), ((2000, "file"), "2,000 files"),
     ((1, "process", "processes"), "1 process"), ((2, "run is", "runs are"), "2 runs are")],
)  # fmt: skip
def test_a_count_has_the_form_of_its_number(arguments: tuple[int, str], text: str) -> None:
    assert format_count(*arguments) == text


def test_no_message_puts_a_plural_after_a_length() -> None:
    """A length may be 1."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if "runtime" in path.parts:  # stands alone in the workers
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr):
                continue
            whole = ast.unparse(node)
            for value, after in zip(node.values, node.values[1:], strict=False):
                if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                    continue
                is_length = LENGTH.match(ast.unparse(value.value))
                if is_length and NOUN.match(str(after.value)) and not any(words in whole for words in MANY):
                    found.append(f"{path.name}:{node.lineno} {whole}")
    assert not found, "use format_count: " + "; ".join(found)
