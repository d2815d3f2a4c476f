"""Four of the programs that `python -m tests.fault.programs` scores: what is said of their resumes is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.programs.drawn import MISSES, draws, rate
from tests.fault.programs.judged import BROKEN, FALSE, Program, judge, programs

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cyclegan_image_pool", {None: "step 3 was not recorded"}),
        ("script_attribute", {None: "exact"}),
        ("memory_mapped_file", {None: "exact", "first": "sample 0", "all": "sample 0"}),
        ("clock_jitter", {None: "its value differs at each computation here"}),
    ],
)
def test_what_is_said_of_a_killed_program_is_true(tmp_path: Path, name: str, said: dict[str | None, str]) -> None:
    (program,) = (program for program in programs() if program.name == name)
    found = judge(program, tmp_path / "run")
    assert [row.change for row in found] == list(said)
    assert not [row for row in found if row.kind not in ("", "right")]
    for row in found:
        assert row.verdict.startswith("right") or (row.change and row.verdict == "needless not exact"), row
        assert said[row.change] in row.said, row


@pytest.mark.slow
@pytest.mark.parametrize("name", [program.name for program in programs()[::6]])
def test_nothing_false_is_said_of_a_program(tmp_path: Path, name: str) -> None:
    """A sixth of all programs, with their changes, of which `make soak` judges every one."""
    (program,) = (program for program in programs() if program.name == name)
    found = judge(program, tmp_path / "run")
    assert found
    for row in found:
        assert row.verdict != FALSE, row
        assert row.verdict.split(",")[0] not in BROKEN, row
        assert row.kind in ("", "right"), row


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", draws("slow", 40), ids=lambda program: f"{program.name}-{next(iter(program.changes))}"
)
def test_nothing_false_is_said_of_a_drawn_change(tmp_path: Path, program: Program) -> None:
    """40 draws, of which `make soak` makes 300."""
    [row] = judge(program, tmp_path / "run")
    assert rate(row) not in MISSES, row
