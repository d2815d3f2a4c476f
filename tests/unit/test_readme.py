"""What the README says is so."""

from __future__ import annotations

import importlib
import os
import posixpath
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
PAGES = sorted(name for name in TRACKED if name.endswith(".md"))


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules that make its figures, which are imported as programs beside each other."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("ages", "questions", "plot", "readme")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name)


def test_its_figures_are_those_of_the_newest_results(benchmarks: dict[str, ModuleType]) -> None:
    text, mask = README.read_text(encoding="utf-8"), benchmarks["ages"].mask_lines
    assert mask(benchmarks["readme"].filled(text)) == mask(text), "run benchmarks/readme.py"
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert mask(benchmarks["readme"].page()) == mask(page), "run benchmarks/readme.py"


def test_each_figure_tells_its_age(benchmarks: dict[str, ModuleType]) -> None:
    for answer in benchmarks["questions"].answers():
        assert all((ROOT / path).exists() for path in answer.measures), answer.slug
        age = benchmarks["ages"].find_age(answer)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", age.date), answer.slug
        assert age.describe() in benchmarks["readme"].section(answer)


def test_a_figure_of_files_that_have_changed_much_is_too_old(
    benchmarks: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages, file = benchmarks["ages"], "benchmarks/results/launch-20261127-0900.json"
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")

    def commit() -> str:
        for words in (("add", "."), (*identity, "commit", "-qm", "a")):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)
        return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("".join(f"line {i}\n" for i in range(400)))
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("{}")
    first = commit()
    answer = SimpleNamespace(question="How fast?", files=(file,), measures=("code",), command="make bench")
    assert ages.find_age(answer) == ages.Age(file, "2026-11-27", first, 0)
    (tmp_path / "code" / "a.py").write_text("".join(f"other {i}\n" for i in range(400)))
    commit()
    ages._find_age_of.cache_clear()
    assert ages.find_age(answer).changed_lines == 800
    (line,) = ages.find_too_old([answer])
    assert "800 lines of the files that it measures changed since. Measure again: make bench" in line
    assert ages.find_too_old([answer], limit=800) == []
    (tmp_path / file).write_text('{"commit": "0123456789abcdef0123456789abcdef01234567"}')
    ages._find_age_of.cache_clear()
    assert ages.find_age(answer).changed_lines is None, "a commit that is not here"
    assert ages.find_too_old([answer]), "of unknown age"


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


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_of_a_clone(name: str) -> None:
    """Pages that mkdocs makes are not there in a clone; what is read there links to none of them."""
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    local = {target for target in targets if "://" not in target}
    paths = {target: posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) for target in local}
    folders = {posixpath.dirname(path) for path in TRACKED}
    assert [target for target, path in paths.items() if path not in TRACKED and path not in folders] == []


def test_pages_that_mkdocs_makes_are_linked_in_what_it_makes() -> None:
    """A clone names them by their titles."""
    pytest.importorskip("mkdocs")
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)["nav"]
    config = SimpleNamespace(nav=navigation, docs_dir=str(ROOT / "docs"))
    linked = runpy.run_path(str(ROOT / "docs" / "generate.py"))["on_page_markdown"]
    named = 0
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        titles = re.findall(r"the page \*([^*]+)\*\s+\(`mkdocs serve`\)", text)
        page = SimpleNamespace(file=SimpleNamespace(src_uri=os.path.relpath(ROOT / name, ROOT / "docs")))
        made = linked(text, page=page, config=config, files=None)
        assert [title for title in titles if f"[{title}](../reference/" not in made] == []
        named += len(titles)
    assert named == 3


@pytest.mark.parametrize("key", ["script", "module", "command"])
def test_each_way_to_name_a_program_stands_in_a_guide(key: str) -> None:
    guides = [ROOT / name for name in PAGES if name.startswith("docs/guides/")]
    assert any(re.search(rf"\b(job\.)?{key}: \S", path.read_text()) for path in guides)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_code_to_copy_fits_the_column_of_a_page(page: Path) -> None:
    """At 1,280 pixels a line has 85 columns; a longer one breaks in the middle of a statement."""
    blocks = re.findall(r"^```(?:python|yaml)[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 85] == []
