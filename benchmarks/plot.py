"""Draws the figures of the newest results for the README and the documentation, for light and for dark pages.

    python benchmarks/plot.py          writes docs/pictures/NAME.light.svg and NAME.dark.svg

The same results give the same files, byte by byte; tests/unit/benchmarks holds the committed ones to that.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

if TYPE_CHECKING:
    from questions import Chart

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
IN_README = ("recovery", "step-tiny", "launch-16", "damage")
THEMES = {
    "light": {"text": "#1f2328", "ours": "#3f51b5", "others": "#b8bec8"},
    "dark": {"text": "#e6edf3", "ours": "#8c9eff", "others": "#5b6370"},
}
"""Text and bars of each; the ground is transparent."""


def drawn(chart: Chart, theme: str) -> str:
    """A chart as SVG."""
    mpl.use("svg")
    from matplotlib import pyplot as plt

    colours = THEMES[theme]
    bars = chart.sorted()
    with mpl.rc_context(
        {"svg.hashsalt": chart.name, "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    ):
        figure, axes = plt.subplots(figsize=(7.2, 0.75 + 0.34 * len(bars)))
        axes.barh(
            [bar.name for bar in bars],
            [bar.value for bar in bars],
            color=[colours["ours" if bar.ours else "others"] for bar in bars],
            height=0.62,
        )
        axes.invert_yaxis()
        axes.set_title(chart.title, loc="left", color=colours["text"], fontsize=11)
        axes.set_xlabel(chart.unit, color=colours["text"], loc="left", fontsize=9)
        axes.margins(x=0.32)
        for index, bar in enumerate(bars):
            figures = [f"{bar.value:,.{chart.digits}f}", *filter(None, [bar.remark])]
            told = {"va": "center", "color": colours["text"], "fontsize": 9}
            axes.annotate(" · ".join(figures), (bar.value, index), (5, 0), textcoords="offset points", **told)
        axes.tick_params(colors=colours["text"], length=0)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        figure.tight_layout()
        written = io.StringIO()
        figure.savefig(
            written, format="svg", transparent=True, metadata={"Date": None, "Creator": "benchmarks/plot.py"}
        )
        plt.close(figure)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def charts() -> list[Chart]:
    """Those of all questions."""
    from questions import answers

    return [chart for answer in answers() for chart in answer.charts]


def main() -> None:
    """Draw the README's."""
    PICTURES.mkdir(exist_ok=True)
    for chart in charts():
        if chart.name in IN_README:
            for theme in THEMES:
                (PICTURES / f"{chart.name}.{theme}.svg").write_text(drawn(chart, theme), encoding="utf-8")
    print(f"drawn in {PICTURES}")


if __name__ == "__main__":
    main()
