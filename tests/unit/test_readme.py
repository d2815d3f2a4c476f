"""What the README says is so."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
COMMITTED = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md"))]
PAGES = [*COMMITTED, *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules that make its figures, which are imported as programs beside each other."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("questions", "plot", "readme")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name)


def test_its_figures_are_those_of_the_newest_results(benchmarks: dict[str, ModuleType]) -> None:
    text = README.read_text(encoding="utf-8")
    assert benchmarks["readme"].filled(text) == text, "run benchmarks/readme.py"
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert benchmarks["readme"].page() == page, "run benchmarks/readme.py"


def test_its_plots_are_those_of_the_newest_results(benchmarks: dict[str, ModuleType]) -> None:
    plot = benchmarks["plot"]
    charts = {chart.name: chart for chart in plot.charts()}
    for name in plot.IN_README:
        for theme in plot.THEMES:
            kept = (plot.PICTURES / f"{name}.{theme}.svg").read_text(encoding="utf-8")
            assert plot.drawn(charts[name], theme) == kept, "run benchmarks/plot.py"


def test_no_question_is_empty(benchmarks: dict[str, ModuleType]) -> None:
    for answer in benchmarks["questions"].answers():
        assert answer.charts, answer.slug
        for chart in answer.charts:
            assert len(chart.bars) > 1, f"{answer.slug}: {chart.title} compares nothing"
        assert all((ROOT / file).is_file() for file in answer.files), answer.slug


def test_the_example_of_experts_ends_as_its_readme_says(benchmarks: dict[str, ModuleType]) -> None:
    rows = benchmarks["questions"].newest("experts", "gain")["gain"]
    text = (ROOT / "examples" / "moe" / "README.md").read_text(encoding="utf-8")
    longer = benchmarks["questions"].newest("experts", "longer")["longer"]
    ends = [*rows["median"].values(), *longer["median"].values()]
    assert {f"{value:.3f}" for value in ends} <= set(re.findall(r"\d\.\d{3}", text))
    pairs = zip(rows["experts"], rows["dense"], strict=True)
    assert all(ours[-1]["val_loss"] < dense[-1]["val_loss"] for ours, dense in pairs), "ahead with each seed"


def test_it_fits() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.parametrize("page", COMMITTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_a_clone(page: Path) -> None:
    """Pages that mkdocs makes are not there in a clone; what is read there links to none of them."""
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
