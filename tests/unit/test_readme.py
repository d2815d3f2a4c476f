"""What the README says is so."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_its_figures_are_those_of_the_newest_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))["filled"](text) == text, "run benchmarks/readme.py"
