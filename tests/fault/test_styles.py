"""The cheap part of `python -m tests.fault.styles`: each program on 2 workers, calm and after a kill."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.fault.styles import measure

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize("name", measure.PROGRAMS)
def test_a_program_of_another_style(tmp_path: Path, name: str) -> None:
    """Two workers train what one process trains, or the product reports why not; a kill changes no bit."""
    program = measure.PROGRAMS[name]
    alone = measure.train(name, tmp_path / "one", 1)
    assert alone.code == 0, alone.output
    options = measure.list_options(name, "ddp")
    calm = measure.train(name, tmp_path / "two", 2, *options)
    assert calm.code == 0, calm.output
    weights = measure.load_weights(tmp_path / "two")
    difference = measure.measure_difference(measure.load_weights(tmp_path / "one"), weights)
    assert (difference <= measure.LIMIT) == program.is_equal
    assert re.search(program.note, calm.output)
    size = (tmp_path / "two" / "metrics.jsonl").stat().st_size
    killed = measure.kill_and_resume(name, tmp_path / "killed", options, weights, size, kills=1, seed=1)
    assert killed["same_bits"], killed
    assert killed["kills"] == 1
    assert set(killed["verdicts"]) <= {"exact"} or killed["verdicts"][0].startswith("not confirmed: step"), killed


def list_statements(code: str) -> list[str]:
    """Return the logical lines of code without blanks, comments and line breaks: a page is narrower than a program."""
    lines, line = [], ""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.NEWLINE:
            lines.append(re.sub(r",(?=[)\]}])", "", line))
            line = ""
        elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            line += token.string
    return lines


def test_the_page_has_the_decisive_code_of_each_program() -> None:
    """Each statement on the page is one of a program, so that the page changes with it."""
    page = (measure.ROOT / "docs/guides/styles.md").read_text()
    programs = [list_statements((measure.FOLDER / f"{name}.py").read_text()) for name in measure.PROGRAMS]
    shown = [line for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) for line in list_statements(block)]
    assert len(shown) > 40
    assert [line for line in shown if line not in {each for lines in programs for each in lines}] == []
