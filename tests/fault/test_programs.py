"""Four of the programs that `python -m tests.fault.programs` scores: what is said of their resumes is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.programs.judged import judge, programs

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cyclegan_image_pool", {None: "step 3 was not recorded"}),
        ("script_attribute", {None: "exact"}),
        ("memory_mapped_file", {None: "exact", "first": "sample 0", "all": "sample 0"}),
        ("clock_jitter", {None: "it is another each time it is computed here"}),
    ],
)
def test_what_is_said_of_a_killed_program_is_true(tmp_path: Path, name: str, said: dict[str | None, str]) -> None:
    (program,) = (program for program in programs() if program.name == name)
    found = judge(program, tmp_path / "run")
    assert [row.change for row in found] == list(said)
    for row in found:
        assert row.verdict.startswith("right") or (row.change and row.verdict == "needless not exact"), row
        assert said[row.change] in row.said, row
