"""The report in a real browser: it asks for nothing, complains of nothing, and draws every plot."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dtctl.report.page import render_report_page
from dtctl.report.run import collect_run_facts
from tests.unit.report.runs import BEGAN, make_run, row

playwright = pytest.importorskip("playwright.sync_api")

INK = """() => [...document.querySelectorAll('figure canvas')].map(canvas => {
  const seen = new Set(), all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  for (let at = 0; at < all.length; at += 4) if (all[at + 3] > 200) seen.add(all.slice(at, at + 3).join());
  return [...seen];
})"""
"""The colours of every plot."""
LIGHT = {"37,99,201", "194,65,12", "21,128,61"}
DARK = {"110,168,254", "255,148,87", "95,208,138"}
"""--c0 to --c2 of templates/report/page.css."""


@dataclass
class Seen:
    """A page as a browser shows it, and what it did to show it."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path, *, width: int = 1200, scheme: str = "light") -> None:
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.emulate_media(color_scheme=scheme)
        self.page.goto(path.as_uri())

    def ink(self) -> list[set[str]]:
        """The colours in each plot."""
        return [set(colours) for colours in self.page.evaluate(INK)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium; .ci/setup.sh installs it")
    with playwright.sync_playwright() as tool:
        running = tool.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def seen(browser: Any) -> Iterator[Seen]:
    context = browser.new_context()
    shown = Seen(context.new_page())
    shown.page.on("console", lambda message: shown.complaints.append(message.text))
    shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    shown.page.on("request", lambda request: shown.requests.append(request.url))
    yield shown
    context.close()


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The page of a run with 40 steps, and long series among its plots."""
    rows = [row(step, val_loss=2.0) if step % 1000 == 0 else row(step) for step in range(1, 5001)]
    path = tmp_path / "report.html"
    path.write_text(render_report_page([collect_run_facts(make_run(tmp_path, rows=rows))], now=BEGAN))
    return path


def test_every_plot_is_drawn_and_nothing_is_asked_for(seen: Seen, report: Path) -> None:
    seen.open(report)
    assert seen.complaints == []
    assert seen.requests == [report.as_uri()]
    titles = seen.page.locator("figcaption b").all_inner_texts()
    assert titles[0] == "Loss"
    assert {"Goodput", "Throughput", "Time of a step", "Memory", "Norm of the gradient"} <= set(titles)
    ink = seen.ink()
    assert len(ink) == len(titles) == int(seen.page.evaluate("document.documentElement.dataset.plots"))
    assert all(colours & LIGHT for colours in ink), "a plot without its curve"
    assert ink[0] >= {"37,99,201", "194,65,12"}, "training and evaluation"
    assert seen.page.locator(".lane .span.run").count() == 4


def test_a_reader_chooses_light_or_dark_and_the_plots_follow(seen: Seen, report: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    seen.open(report, scheme="dark")
    assert seen.page.evaluate(back) == "rgb(20, 23, 27)"
    assert all(colours & DARK and not colours & LIGHT for colours in seen.ink())
    seen.page.click("#theme")
    assert seen.page.evaluate(back) == "rgb(246, 247, 249)"
    assert all(colours & LIGHT and not colours & DARK for colours in seen.ink())
    assert seen.complaints == []


def test_a_phone_shows_it_without_scrolling_sideways(seen: Seen, report: Path) -> None:
    seen.open(report, width=390)
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 390
    tables = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth).length"
    seen.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert seen.page.evaluate(tables) == 0, "every table fits"
    widths = seen.page.evaluate("[...document.querySelectorAll('.uplot')].map(one => one.clientWidth)")
    assert max(widths) <= 390
    seen.page.set_viewport_size({"width": 1000, "height": 800})
    seen.page.wait_for_function("document.querySelector('.uplot').clientWidth > 800")


def test_the_log_button_draws_anew(seen: Seen, report: Path) -> None:
    seen.open(report)
    before = seen.page.evaluate("document.querySelector('figure canvas').toDataURL()")
    seen.page.click("figure:first-child .log")
    assert seen.page.evaluate("document.querySelector('figure canvas').toDataURL()") != before
    assert seen.complaints == []


def test_two_runs_lie_over_each_other(seen: Seen, tmp_path: Path) -> None:
    runs = [collect_run_facts(make_run(tmp_path, name)) for name in ("r1", "r2")]
    path = tmp_path / "both.html"
    path.write_text(render_report_page(runs, now=BEGAN))
    seen.open(path)
    assert seen.page.locator("h1").all_inner_texts() == ["r1 succeeded", "r2 succeeded"]
    assert "r2" in seen.page.locator("figure:first-child .u-legend").inner_text()
    assert seen.complaints == []


def test_a_run_without_metrics_has_a_page_too(seen: Seen, tmp_path: Path) -> None:
    path = tmp_path / "none.html"
    path.write_text(render_report_page([collect_run_facts(make_run(tmp_path, rows=[]))], now=BEGAN))
    seen.open(path)
    assert seen.complaints == []
    assert "This run has no metrics" in seen.page.inner_text("#plots")
    assert seen.page.locator("figure").count() == 0


def test_the_advisors_bars(seen: Seen, tmp_path: Path) -> None:
    argv = ["advise", "--params", "7B", "--gpus", "16", "--gpu", "A100", "--batch", "64", "--plot", "a.html"]
    subprocess.run([sys.executable, "-m", "dtctl", *argv], cwd=tmp_path, check=True, capture_output=True)
    seen.open(tmp_path / "a.html")
    assert seen.complaints == []
    assert seen.requests == [(tmp_path / "a.html").as_uri()]
    assert seen.ink()[0] >= LIGHT
    assert seen.page.locator("tr").count() >= 4
