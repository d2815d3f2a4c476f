"""Three draws of the zoo, of which `make soak` makes 150: what is said of a resume is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.zoo.draws import draw

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("kind", "change", "verdict"),
    [
        ("schedule-free", None, "equal"),
        ("random batches", "data_workers", "equal"),
        ("optimizer of torch", "decay of the optimizer", "named"),
    ],
)
def test_what_is_said_of_a_killed_run_is_true(tmp_path: Path, kind: str, change: str | None, verdict: str) -> None:
    found = draw("1", tmp_path / "run", kinds=(kind,), change=change)
    assert found.good, found
    assert found.kills
    assert found.verdict == verdict, found
