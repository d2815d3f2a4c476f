"""Step, loss and rate from what a program prints, for programs that write no metrics of dtctl.

Figures are searched in the forms that programs usually print: a word, at most a sign, a number (`loss 3.42`,
`'loss': 3.42`, `iter: 20`), or a bar of tqdm. They are marked as read from the output. `job.progress` is a regular
expression of the user's own in place of these forms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from dtctl import folders

TAIL_BYTES: Final = 256 << 10
"""Bytes of a log; a program that prints more without a loss is not understood."""
LINE_CHARACTERS: Final = 1000
"""Characters of a line that are searched at most, with blanks in a row as one: on longer ones patterns take minutes."""
_NUMBER: Final = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LOSS: Final = re.compile(
    r"(?i)(?P<which>[a-z]{0,20})[ _/-]?(?<![a-z])loss(?:[\"'*]|\s*\(?avg\)?)?\s*[:=|]?\s*(?:tensor\()?"
    rf"(?P<loss>{_NUMBER}|nan\b|inf\b)"
)
_STEP: Final = re.compile(
    r"(?i)(?<![a-z])(?:global[ _]?step|steps?|iter(?:ation)?s?|updates?|num_updates)[\"']?\s*(?:\(\w+\))?\s*[:=#]?"
    r"\s*\[?\s*(?P<step>\d[\d,]*)(?:\s*(?:/|of)\s*(?P<steps>\d[\d,]*))?"
)
_BAR: Final = re.compile(r"(?<![\d.])(?P<step>\d+)\s*/\s*(?P<steps>\d+)(?=[ \]\[(])")
"""A bar of tqdm (`120/1000 [00:10<01:00, 12.3it/s]`), or a counter in brackets (`[ 50/1251 (4%)]`)."""
_RATES: Final = (
    (re.compile(r"(?i)(?P<value>[\d.]+) ?(?:it|steps?)/s"), "per_s"),
    (re.compile(r"(?i)(?P<value>[\d.]+) ?s/(?:it|step)"), "step_s"),
    (re.compile(r"(?i)(?:time|iteration \(ms\)|step)\s*:?\s*(?P<value>[\d.]+) ?(?:ms\b|\|)"), "step_ms"),
)
_TOKENS: Final = re.compile(
    r"(?i)(?:tps|tok(?:en)?s?[/_]s(?:ec)?)\s*[:=]\s*(?P<before>[\d,.]+)|(?P<after>[\d,.]+) ?tok(?:en)?s?/s"
)
_OF_EVALUATIONS: Final = frozenset({"val", "valid", "validation", "eval", "test", "dev", "best"})


def find_figures(line: str) -> dict[str, float]:
    """Return the figures in a printed line: `loss`, `step`, `steps` (how many there are), `step_s`, `tokens_per_s`."""
    found: dict[str, float] = {}
    line = " ".join(line[:LINE_CHARACTERS].split())
    for match in _LOSS.finditer(line):
        if match["which"].lower() not in _OF_EVALUATIONS:
            found["loss"] = _to_float(match["loss"])
            break
    if (counted := _STEP.search(line) or _BAR.search(line)) is not None:
        found |= {key: _to_float(counted[key]) for key in ("step", "steps") if counted[key]}
    for pattern, unit in _RATES:
        if (rate := pattern.search(line)) is not None and (value := _to_float(rate["value"])) > 0:
            found["step_s"] = {"per_s": 1 / value, "step_s": value, "step_ms": value / 1e3}[unit]
            break
    if (tokens := _TOKENS.search(line)) is not None:
        found["tokens_per_s"] = _to_float(tokens["before"] or tokens["after"])
    return found


def _to_float(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # a point too many
        return 0.0


def list_figures(lines: Iterable[str], pattern: re.Pattern[str] | None = None) -> list[dict[str, float]]:
    """Return a row of figures for each line with a loss whose step is known, oldest first.

    A trainer may print its bar and its losses apart: then a loss has the step of the bar before it, and the newest row
    that of the newest bar. Bars without any loss mean nothing: downloads have them, too.

    Args:
        lines: oldest first.
        pattern: with groups `step`, `loss` or `steps`, in place of the usual forms.
    """
    rows: list[dict[str, float]] = []
    bar: dict[str, float] = {}
    is_apart = False
    for line in lines:
        if pattern is not None:
            match = pattern.search(line)
            groups = match.groupdict() if match is not None else {}
            if found := {key: _to_float(value) for key, value in groups.items() if value is not None}:
                rows.append({**(rows[-1] if rows else {}), **found})
            continue
        found = find_figures(line)
        if "loss" in found:
            is_apart = "step" not in found
            rows.append({**bar, **found})
        elif found.keys() >= {"step", "steps"}:
            bar = found
    if rows and is_apart:
        rows[-1] |= bar
    return [row for row in rows if "step" in row]


def read_figures(logs: Path, pattern: re.Pattern[str] | None = None) -> list[dict[str, Any]]:
    """Return the newest figures in the logs of a run, of the first rank that prints any, oldest first.

    Args:
        logs: folder of the logs, with a folder for each node.
        pattern: as in `list_figures`.
    """
    for path in sorted(logs.glob("*/*.log"), key=lambda path: (len(path.name), path.name)):
        try:
            with os.fdopen(folders.open_regular(str(path)), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            continue
        if rows := list_figures(re.split(r"[\r\n]+", text), pattern):
            return rows
    return []
