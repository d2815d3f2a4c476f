"""metrics.jsonl as columns, thinned to what a plot can show; a million lines in two seconds.

A short file is read line by line. Of a long one only a line in so many is read in full; the values where a single line
matters (`WATCHED`) are taken from every line by one regular expression, as are lines with more keys than usual (an
evaluation). Therefore minimum and maximum of these keys are exact; the page marks values that are samples.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from dtctl import folders
from dtctl.errors import LaunchError
from dtctl.launch.records.metrics_rows import parse_row
from dtctl.launch.records.printed_figures import WHOLE_BYTES, count_steps_on, read_figures

POINTS = 1500
"""Buckets of a curve, more than a screen has pixels for it."""
MAX_BYTES = 8 << 30
SHORT_BYTES = 24 << 20
"""A file up to this size is read line by line."""
WATCHED = ("loss", "grad_norm", "step_s")
"""Keys that are taken from every line of a long file: one line in a thousand can be the one that explains a run."""
PROCESSES = min(4, os.cpu_count() or 1)
"""Processes that read a long file."""
_LOOK_AT = 200


@dataclass(slots=True)
class MetricColumn:
    """The values of one key, with the step of each; NaN where a line has null."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCurve:
    """Curve of a column: the mean of each bucket, and its minimum and maximum if it has several values."""

    steps: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsTable:
    """Columns of metrics.jsonl, thinned."""

    curves: Mapping[str, MetricCurve]
    """Curves by key, in the order in which keys first appear; all but `step`."""
    rows: int
    damaged: int
    """Number of incomplete lines."""
    stride: int = 1
    """Number N, if one line in N was read in full."""
    is_printed: bool = False
    """True if the figures were read from what the program has printed."""
    step_s: tuple[float, ...] = ()
    """Seconds per step of at most 100,000 lines, ascending, for percentiles."""

    @property
    def last_step(self) -> int:
        """The last logged step; 0 if there is none."""
        return max((int(curve.steps[-1]) for curve in self.curves.values() if curve.steps), default=0)


def read_metrics_table(path: Path) -> MetricsTable | None:
    """Return the metrics of a run; None when there are none.

    Raises:
        LaunchError: the file is there and cannot be read.
    """
    try:
        os.close(folders.open_regular(str(path)))  # opening a pipe would wait for a writer
        size = path.stat().st_size
        if size == 0:
            return None
        if size > MAX_BYTES:
            raise LaunchError(f"the metrics are larger than {MAX_BYTES >> 30} GiB", where=str(path))
        return _read_all_rows(path) if size <= SHORT_BYTES else _read_sampled_rows(path)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise LaunchError(f"the metrics cannot be read: {exc.strerror}", where=str(path)) from exc


def read_printed_table(logs: Path, pattern: str | None) -> MetricsTable | None:
    """Return the figures that a program has printed; None when there are none.

    Args:
        logs: folder of the run's logs.
        pattern: `job.progress` of its spec.
    """
    found = read_figures(logs, re.compile(pattern) if pattern else None, most_bytes=WHOLE_BYTES)
    rows = count_steps_on(found)
    if not rows:
        return None
    columns: dict[str, MetricColumn] = {}
    for row in rows:
        _add_row_values(columns, row)
    return _build_table(columns, rows=len(rows), damaged=0, is_printed=True)


def _read_all_rows(path: Path) -> MetricsTable:
    """Return every line in full."""
    columns: dict[str, MetricColumn] = {}
    rows = damaged = 0
    with path.open("rb") as file:
        for line in file:
            row = parse_row(line)
            if row is None:
                damaged += 1
            else:
                rows += 1
                _add_row_values(columns, row)
    return _build_table(columns, rows=rows, damaged=damaged)


def _build_table(
    columns: Mapping[str, MetricColumn], *, rows: int, damaged: int, is_printed: bool = False
) -> MetricsTable:
    """Return the curves of columns that were read in full."""
    for column in columns.values():
        _keep_newest_values(column)
    curves = {name: downsample_curve(column.steps, column.values) for name, column in columns.items()}
    times = columns.get("step_s", MetricColumn()).values
    return MetricsTable(
        curves=curves, rows=rows, damaged=damaged, is_printed=is_printed, step_s=_sort_sampled_values(times)
    )


def _add_row_values(columns: dict[str, MetricColumn], row: Mapping[str, Any], *, without: Collection[str] = ()) -> None:
    step = row["step"]
    for name, value in row.items():
        if name == "step" or name in without or isinstance(value, str | bool | list | dict):
            continue
        column = columns.setdefault(name, MetricColumn())
        column.steps.append(step)
        column.values.append(_convert_to_float(value))


def _convert_to_float(value: float | None) -> float:
    """Return a value for a curve: NaN for null, infinity if it is too large for a float."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.inf


def _keep_newest_values(column: MetricColumn) -> None:
    """Keep the newest value of each step, since a run that returned to a snapshot repeats steps."""
    steps = column.steps
    if all(map(float.__lt__, steps, islice(steps, 1, None))):
        return
    newest = dict(zip(steps, column.values, strict=True))
    column.steps = array("d", sorted(newest))
    column.values = array("d", (newest[step] for step in column.steps))


# -- long files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LineFormat:
    """Usual form of a line."""

    keys: frozenset[str]
    watched: tuple[str, ...]
    usual: re.Pattern[str]
    """Pattern of the watched values of a line."""
    suffix: re.Pattern[str]
    """Pattern of lines that continue after the usual last key."""


def _detect_line_form(lines: Sequence[bytes]) -> _LineFormat | None:
    """Return the form of most lines; None if they do not begin with the watched keys, as dtctl.runtime writes them."""
    shapes = Counter(tuple(row) for row in map(parse_row, lines) if row)
    keys = shapes.most_common(1)[0][0] if shapes else ()
    watched = tuple(key for key in keys if key in WATCHED)
    if len(watched) < 2 or keys[0] != "step":
        return None
    last = keys.index(watched[-1])
    parts = [f'"{re.escape(key)}": {"([^,}]+)" if key in watched else "[^,}]+"}' for key in keys[: last + 1]]
    suffix = f'"{re.escape(keys[-1])}": [^,}}]+, "'
    return _LineFormat(frozenset(keys), watched, re.compile(r"\{" + ", ".join(parts) + "[,}]"), re.compile(suffix))


class _ValueBucket(NamedTuple):
    """Neighbouring values of a column, as one point of a plot."""

    step: float
    """Step of the first line."""
    mean: float
    low: float
    high: float


@dataclass(slots=True)
class _FilePart:
    """Contents of a part of a long file."""

    buckets: dict[str, list[_ValueBucket]]
    columns: dict[str, MetricColumn] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    rows: int = 0
    damaged: int = 0


def _read_sampled_rows(path: Path) -> MetricsTable:
    """Watched values of every line, and all values of the first line of each block."""
    with path.open("rb") as file:
        form = _detect_line_form(list(islice(file, _LOOK_AT)))
    if form is None:
        return _read_all_rows(path)
    size = path.stat().st_size
    block = size // POINTS + 1
    edges = [size * part // PROCESSES for part in range(PROCESSES + 1)]
    # The work needs only the processor, and the parts are independent.
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        parts = pool.starmap(_read_file_part, [(path, form, begin, end, block) for begin, end in pairwise(edges)])
    curves = {}
    for name in form.watched:
        buckets = [bucket for part in parts for bucket in part.buckets[name]]
        if buckets:
            curves[name] = _build_bucket_curve(buckets)
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        column = MetricColumn()
        for part in parts:
            existing = part.columns.get(name, MetricColumn())
            column.steps.extend(existing.steps)
            column.values.extend(existing.values)
        _keep_newest_values(column)
        curves[name] = downsample_curve(column.steps, column.values)
    rows = sum(part.rows for part in parts)
    return MetricsTable(
        curves=curves,
        rows=rows,
        damaged=sum(part.damaged for part in parts),
        stride=round(rows / POINTS),
        step_s=_sort_sampled_values([seconds for part in parts for seconds in part.times]),
    )


def _read_file_part(path: Path, form: _LineFormat, begin: int, end: int, size: int) -> _FilePart:
    """Return the lines that begin between two offsets of the file, in blocks of about `size` bytes."""
    part = _FilePart({name: [] for name in form.watched})
    for block in _read_line_blocks(path, begin, end, size):
        count = block.count("\n")
        values = _parse_watched_values(block, count, form)
        part.rows += len(values[0])
        part.damaged += count - len(values[0])
        first = next(filter(None, map(parse_row, block.splitlines()[:_LOOK_AT])), None)
        if first is None:
            continue
        _add_row_values(part.columns, {name: first.get(name) for name in form.keys}, without=form.watched)
        for name, numbers in zip(form.watched, values, strict=True):
            part.buckets[name].append(_summarize_bucket(first["step"], numbers))
            if name == "step_s":
                part.times += numbers[::10]
        for match in form.suffix.finditer(block):
            row = parse_row(block[block.rfind("\n", 0, match.start()) + 1 : block.find("\n", match.end())])
            _add_row_values(part.columns, row or {}, without=form.keys)
    return part


def _read_line_blocks(path: Path, begin: int, end: int, size: int) -> Iterator[str]:
    """Yield the lines that begin from `begin` on and before `end`, some at a time."""
    with path.open("rb") as file:
        if begin:
            file.seek(begin - 1)
            file.readline()  # the end of a line that begins in the previous part
        while (place := file.tell()) < end:
            block = file.read(min(size, end - place))
            block += b"" if block.endswith(b"\n") else file.readline()
            yield block.decode("utf-8", "replace") + ("" if block.endswith(b"\n") else "\n")


def _parse_watched_values(block: str, count: int, form: _LineFormat) -> list[list[float]]:
    """Return the watched values of all complete lines."""
    matches = form.usual.findall(block)
    if len(matches) == count:
        try:
            return [list(map(float, texts)) for texts in zip(*matches, strict=True)]
        except ValueError:  # null
            pass
    rows = [row for row in map(parse_row, block.splitlines()) if row is not None]
    read_values = [[row.get(name) for row in rows] for name in form.watched]
    return [
        [_convert_to_float(value) if isinstance(value, int | float) else math.nan for value in values]
        for values in read_values
    ]


# -- thinning ------------------------------------------------------------------------------------------------------


def downsample_curve(steps: Sequence[float], values: Sequence[float], points: int = POINTS) -> MetricCurve:
    """A curve of at most `points` buckets of equal size; up to `2 * points` values stay unchanged."""
    count = len(values)
    if count <= 2 * points:
        return MetricCurve(steps=tuple(steps), values=tuple(values))
    edges = [index * count // points for index in range(points + 1)]
    return _build_bucket_curve([_summarize_bucket(steps[begin], values[begin:end]) for begin, end in pairwise(edges)])


def _summarize_bucket(step: float, values: Sequence[float]) -> _ValueBucket:
    total = sum(values)
    if math.isfinite(total):
        return _ValueBucket(step, total / len(values), min(values), max(values))
    # A loss that is not a number appears as a gap, also if all its neighbours are numbers.
    finite = [value for value in values if math.isfinite(value)]
    return _ValueBucket(step, math.nan, min(finite, default=math.nan), max(finite, default=math.nan))


def _build_bucket_curve(buckets: Sequence[_ValueBucket]) -> MetricCurve:
    steps, means, low, high = zip(*sorted(buckets), strict=True)
    return MetricCurve(steps=steps, values=means, low=low, high=high)


def _sort_sampled_values(values: Sequence[float], most: int = 100_000) -> tuple[float, ...]:
    stride = max(1, math.ceil(len(values) / most))
    return tuple(sorted(value for value in values[::stride] if math.isfinite(value)))


def compute_percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value that `share` of them do not exceed (nearest rank); NaN of nothing."""
    if not ascending:
        return math.nan
    return ascending[min(len(ascending) - 1, max(0, math.ceil(share * len(ascending)) - 1))]
