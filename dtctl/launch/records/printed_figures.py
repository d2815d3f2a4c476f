"""Step, loss and rate from a program's output, for programs that write no metrics of dtctl.

Figures are searched in the usual forms: a word, at most one sign and a number (`loss 3.42`, `'loss': 3.42`,
`iter: 20`), or a bar of tqdm. They are marked as read from the output. `job.progress` is a regular expression of the
user in place of these forms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from dtctl import folders

TAIL_BYTES: Final = 256 << 10
"""Bytes at the end of a log that are searched; they must contain a loss."""
WHOLE_BYTES: Final = 16 << 20
"""Bytes of a log that are searched for a plot: some 200,000 lines, which take seconds."""
LINE_CHARACTERS: Final = 1000
"""Most characters of a line that are searched, after merging blanks: on longer lines, patterns take minutes."""
_COLOR: Final = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
"""Codes for terminals, which some programs print into files, too."""
_NUMBER: Final = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LOSS: Final = re.compile(
    r"(?i)(?P<which>[a-z]{0,20})[ _/-]?(?<![a-z])loss(?:_step|\s+train)?(?:[\"'*]|\s*\(?avg\)?)?\s*[:=|]?\s*"
    rf"(?:tensor\(|[\"'])?(?P<loss>{_NUMBER}|nan\b|inf\b)"
)
_STEP: Final = re.compile(
    r"(?i)(?<![a-z])(?:global[ _]?step|steps?|iter(?:ation)?s?|updates?|num_updates)[\"']?\s*(?:\(\w+\))?\s*[:=#]?"
    r"\s*[\[\"']?\s*(?P<step>\d[\d,]*)(?![\d,]*(?:\.\d|\s?%))(?:\s*(?:/|of)\s*(?P<steps>\d[\d,]*))?"
)
_BAR: Final = re.compile(
    r"(?i)(?P<epochs>epoch\s*[:\[(]?\s*)?(?<![\d./])(?P<step>\d+)\s*/\s*(?P<steps>\d+)(?=[ \]\[(])(?! \d\d:\d\d:\d\d)"
)
"""A bar of tqdm (`120/1000 [00:10<01:00, 12.3it/s]`), or a counter in brackets (`[ 50/1251 (4%)]`), but not a date."""
_LABEL: Final = re.compile(r"^[^|]*?(?=:?\s*\d+%\|)")
"""Text before a bar of tqdm, which names the counted items."""
_RATES: Final = (
    (re.compile(r"(?i)(?P<value>[\d.]+) ?(?:it|steps?)/s"), "per_s"),
    (re.compile(r"(?i)(?P<value>[\d.]+) ?s/(?:it|step)"), "step_s"),
    (re.compile(r"(?i)(?:time|step)\s*:?\s*(?P<value>[\d.]+) ?ms\b"), "step_ms"),
    (re.compile(r"(?i)iteration \(ms\)\s*:?\s*(?P<value>[\d.]+)"), "step_ms"),
    (re.compile(r"(?i)(?P<value>[\d.]+) ?ms/(?:it|step)"), "step_ms"),
)
_TOKENS: Final = re.compile(
    r"(?i)(?:tps|tok(?:en)?s?[/_]s(?:ec)?)\s*[:=]\s*(?P<before>[\d,.]+)|(?P<after>[\d,.]+) ?tok(?:en)?s?/s"
)
_OF_EVALUATIONS: Final = frozenset({"val", "valid", "validation", "eval", "test", "dev", "best"})
_EVALUATION: Final = re.compile(
    r"(?i)(?<![\w/.-])(?:val|valid(?:ation|ating)?|eval(?:uat\w+)?|test(?:ing)?|predict\w*|sanity)(?![\w/.-])"
)
"""Word at the beginning of a line about an evaluation: its counter and its loss are not those of the training."""
_SUMMARY: Final = "train_runtime"
"""Key in the last line of Hugging Face's Trainer, whose loss is the mean of the run (`speed_metrics`)."""


def find_figures(line: str) -> dict[str, float]:
    """Return the figures in a printed line: `loss`, `step`, `steps` (their number), `step_s`, `tokens_per_s`."""
    found: dict[str, float] = {}
    line = _clean_line(line)
    losses, counted = [*_LOSS.finditer(line)], _find_counter(line)
    begins = [match.start() for match in (*losses[:1], counted) if match is not None]
    if _SUMMARY in line or (begins and _EVALUATION.search(line[: min(begins)])):
        return found
    for match in losses:
        if match["which"].lower() not in _OF_EVALUATIONS:
            found["loss"] = _to_float(match["loss"])
            break
    if counted is not None:
        found |= {key: _to_float(counted[key]) for key in ("step", "steps") if counted[key]}
    for pattern, unit in _RATES:
        if (rate := pattern.search(line)) is not None and (value := _to_float(rate["value"])) > 0:
            found["step_s"] = {"per_s": 1 / value, "step_s": value, "step_ms": value / 1e3}[unit]
            break
    if (tokens := _TOKENS.search(line)) is not None:
        found["tokens_per_s"] = _to_float(tokens["before"] or tokens["after"])
    return found


def _clean_line(line: str) -> str:
    return " ".join(_COLOR.sub("", line[:LINE_CHARACTERS]).split())


def _find_counter(line: str) -> re.Match[str] | None:
    """Return the match of the step in a line: after a word for it, or in a bar that does not count epochs."""
    if (named := _STEP.search(line)) is not None:
        return named
    return next((match for match in _BAR.finditer(line) if not match["epochs"]), None)


def _to_float(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # The text has several points.
        return 0.0


class _Bars:
    """Bars in the output, among which the bar that counts training steps is found if losses are printed separately.

    A program also prints bars while it loads, maps, evaluates and saves. The bar of the training is active when a loss
    is printed. Bars with the same label and length, such as those of several epochs, count as one.
    """

    def __init__(self) -> None:
        self._newest: dict[tuple[str, float], dict[str, float]] = {}
        """Figures of each bar, in the order of the last output."""
        self._since: set[tuple[str, float]] = set()
        """Bars that were printed since the last loss."""
        self._losses: dict[tuple[str, float], int] = {}
        """Number of losses that were printed while each bar was active."""
        self._moved: set[tuple[str, float]] = set()
        """Bars that have counted. What stays, such as `rank 0/2` or `file 1/8`, is no bar."""
        self.chosen: tuple[str, float] | None = None

    def note_bar(self, line: str, figures: dict[str, float]) -> None:
        """Record a line with a bar."""
        label = _LABEL.match(_clean_line(line))
        key = re.sub(r"\d+", "#", label[0]) if label is not None else "", figures["steps"]
        before = self._newest.pop(key, figures)
        if before["step"] != figures["step"] or _LABEL.match(_clean_line(line)) is not None:
            self._moved.add(key)
        self._newest[key] = figures
        self._since.add(key)

    def note_loss(self) -> dict[tuple[str, float], dict[str, float]]:
        """Record a loss without a step; return the current bars."""
        printed = [key for key in self._newest if key in self._since]
        under_way = [key for key in printed if self._newest[key]["step"] < key[1]]
        for key in (under_way or printed)[-1:]:
            self._losses[key] = self._losses.get(key, 0) + 1
        self._since.clear()
        return dict(self._newest)

    def choose_training_bar(self) -> dict[str, float]:
        """Return the figures of the bar with the most losses; of several, of the one that was printed last."""
        counted = [key for key in self._newest if key in self._losses and key in self._moved]
        if not counted:
            return {}
        self.chosen = max(reversed(counted), key=lambda key: self._losses[key])
        return self._newest[self.chosen]


def list_figures(lines: Iterable[str], pattern: re.Pattern[str] | None = None) -> list[dict[str, float]]:
    """Return a row of figures for each line with a loss whose step is known, oldest first.

    A trainer may print its bar and its losses separately: then a loss gets the step of the training's bar before it,
    and the newest row gets the step of the newest bar. Bars without a loss are ignored, since downloads have bars, too.

    Args:
        lines: printed lines, oldest first.
        pattern: expression with groups `step`, `loss` or `steps`, in place of the usual forms.
    """
    if pattern is not None:
        return _list_matches(lines, pattern)
    rows: list[dict[str, float]] = []
    apart: dict[int, dict[tuple[str, float], dict[str, float]]] = {}
    bars = _Bars()
    for line in lines:
        found = find_figures(line)
        if "loss" in found:
            if "step" not in found:
                apart[len(rows)] = bars.note_loss()
            rows.append(found)
        elif found.keys() >= {"step", "steps"}:
            bars.note_bar(line, found)
    whole = [row for index, row in enumerate(rows) if index not in apart]
    if len(whole) > 1 and len({row["step"] for row in whole}) == 1:  # `rank 0/2` beside each loss counts nothing
        for row in whole:
            del row["step"]
    newest = bars.choose_training_bar()
    for index, before in apart.items():
        bar = before.get(bars.chosen, {}) if bars.chosen is not None else {}
        rows[index] = {**bar, **rows[index]}
    if len(rows) - 1 in apart:
        rows[-1] |= newest
    return [row for row in rows if "step" in row]


def _list_matches(lines: Iterable[str], pattern: re.Pattern[str]) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for line in lines:
        match = pattern.search(line)
        groups = match.groupdict() if match is not None else {}
        if found := {key: _to_float(value) for key, value in groups.items() if value is not None}:
            rows.append({**(rows[-1] if rows else {}), **found})
    return [row for row in rows if "step" in row]


def read_figures(
    logs: Path, pattern: re.Pattern[str] | None = None, *, most_bytes: int = TAIL_BYTES
) -> list[dict[str, Any]]:
    """Return the newest figures of the first rank whose log has any, oldest first.

    Args:
        logs: folder of the logs, with a folder for each node.
        pattern: as in `list_figures`.
        most_bytes: bytes at the end of each log that are searched.
    """
    for path in sorted(logs.glob("*/*.log"), key=lambda path: (len(path.name), path.name)):
        try:
            with os.fdopen(folders.open_regular(str(path)), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - most_bytes))
                text = file.read().decode(errors="replace")
        except OSError:
            continue
        if rows := list_figures(re.split(r"[\r\n]+", text), pattern):
            return rows
    return []


def count_steps_on(rows: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the rows with continuous step numbers where a bar restarts from 0, as a bar of each epoch does.

    If a step appears again before the bar has reached its end, the step was repeated.
    """
    counted: list[dict[str, float]] = []
    before, last = 0.0, 0.0
    for row in rows:
        step, steps = row["step"], row.get("steps")
        if step < last and last == steps:
            before += last
        last = step
        counted.append({**{key: value for key, value in row.items() if key != "steps"}, "step": before + step})
    return counted
