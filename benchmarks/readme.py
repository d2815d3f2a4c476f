"""Puts the figures of the newest results into the README and into benchmarks/README.md: none of them is typed by hand.

    python benchmarks/readme.py

The plots that the README shows are drawn by benchmarks/plot.py, from the same questions.
"""

from __future__ import annotations

from pathlib import Path

from ages import find_age
from questions import Answer, Chart, answers

ROOT = Path(__file__).resolve().parent.parent
IN_README = {"recovery": "recovery", "step": "step-tiny", "launch": "launch-16", "damage": "damage"}
"""Question -> the one of its charts that the README shows."""
BEGIN, END = "<!-- figures: benchmarks/readme.py -->", "<!-- end of figures -->"


def figures() -> str:
    """The README's: two and two beside each other, each with its conditions."""
    by_slug = {answer.slug: answer for answer in answers()}
    cells = [_cell(by_slug[slug], chart) for slug, chart in IN_README.items()]
    rows = [f"<tr>\n{left}\n{right}\n</tr>" for left, right in zip(cells[::2], cells[1::2], strict=True)]
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _cell(answer: Answer, chart: str) -> str:
    pictures = {theme: f"docs/pictures/{chart}.{theme}.svg" for theme in ("dark", "light")}
    return (
        f'<td width="50%" valign="top"><b>{answer.question}</b><br>\n'
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{pictures["dark"]}">'
        f'<img src="{pictures["light"]}" alt="{_spoken(answer, chart)}"></picture><br>\n'
        f"<sub>{_plain(answer.conditions)} {find_age(answer).describe()}</sub></td>"
    )


def _spoken(answer: Answer, name: str) -> str:
    chart = next(chart for chart in answer.charts if chart.name == name)
    return f"{chart.title}: " + ", ".join(f"{bar.name} {bar.value:.{chart.digits}f}" for bar in chart.sorted())


def _plain(text: str) -> str:
    return text.replace("`", "").replace(" us ", " µs ")


def table(chart: Chart) -> str:
    """A chart as rows, the best first."""
    remarks = any(bar.remark for bar in chart.bars)
    lines = [f"| {chart.title} | {chart.unit} |" + (" |" if remarks else ""), "|---|--:|" + ("---|" if remarks else "")]
    lines += [
        f"| {bar.name} | {bar.value:,.{chart.digits}f} |" + (f" {bar.remark} |" if remarks else "")
        for bar in chart.sorted()
    ]
    return "\n".join(lines)


def section(answer: Answer, *, plots: str = "", level: int = 2) -> str:
    """A question with its answer, its tables, its conditions, and what was missed.

    Args:
        answer: The question.
        plots: What goes before the tables.
        level: Of its heading.
    """
    files = ", ".join(f"`{file}`" for file in answer.files)
    parts = [f"{'#' * level} {answer.question}", answer.answer, *filter(None, [plots])]
    parts += [table(chart) for chart in answer.charts]
    parts.append(f"**Conditions.** {answer.conditions}")
    if answer.missed:
        parts.append("**Missed, and not shown.**\n\n" + "\n".join(f"- {text}" for text in answer.missed))
    parts.append(f"Made anew by `{answer.command}`, on an idle machine; kept in {files}. {find_age(answer).describe()}")
    return "\n\n".join(parts) + "\n"


def filled(text: str) -> str:
    """The README with the figures between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{figures()}\n{END}{after}"


def page() -> str:
    """benchmarks/README.md."""
    return (
        "# Benchmarks\n\nOne question each, answered by the newest kept result in [results](results/). All programs of "
        "a table ran in turn on one otherwise idle machine; figures are medians. `python benchmarks/readme.py` writes "
        "this page.\n\n" + "\n".join(section(answer) for answer in answers())
    )


def main() -> None:
    """Rewrite both."""
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "benchmarks" / "README.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
