"""State of a run, read from its folder as it grows; each byte once."""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from dtctl import folders, names
from dtctl.launch.records.events import (
    AttemptRestarting,
    AttemptRunning,
    AttemptStarting,
    Event,
    FirstFailure,
    HangDetected,
    RunEnded,
    RunPlanned,
    RunProgress,
    RunStopping,
    SnapshotBegun,
    WorkerExited,
    parse_event,
)
from dtctl.launch.records.ledger import LedgerFacts, read_ledger
from dtctl.launch.records.metrics_rows import parse_row
from dtctl.launch.records.record import RunRecord

READ_BYTES: Final = 4 << 20
"""Bytes that are read of one file at a time; the rest is read the next times."""
LINE_BYTES: Final = 1 << 20
"""Most bytes of a line that counts as an event or a row."""
LOG_BYTES: Final = 64 << 10
"""Bytes that are read at the end of a failed worker's log."""
_NOT_FINITE: Final = re.compile(rb"^error: (the gradients? of step.{1,500}? not finite.{0,500})", re.MULTILINE)
"""Message with which dtctl/runtime/guards/nonfinite.py ends a run."""
KEYS: Final = 100
"""Most keys of a logged step that are shown, since each key of a job becomes a time series."""
_KEY: Final = re.compile(r"[\w./ :-]{1,100}\Z", re.ASCII)
SHORT_STEPS: Final = 5
"""First logged steps of an attempt that do not count for its speed, since it compiles and fills caches."""
RECENT_ROWS: Final = 5
REFERENCE_ROWS: Final = 20


class FileTail:
    """Reader of the lines that were added to a file."""

    def __init__(self, path: Path) -> None:
        """Begin at the start of the file."""
        self._path = path
        self._offset = 0
        self._partial = b""
        self.is_behind = False
        """True if there was more to read the last time."""

    def lines(self) -> list[str]:
        """Return the complete new lines; all lines, if the file has been written again since the last time."""
        try:
            fd = folders.open_regular(str(self._path))
        except OSError:
            return []
        try:
            if os.fstat(fd).st_size < self._offset:
                self._offset, self._partial = 0, b""
            data = os.pread(fd, READ_BYTES, self._offset)
        except OSError:
            return []
        finally:
            os.close(fd)
        self._offset += len(data)
        self.is_behind = len(data) == READ_BYTES
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LINE_BYTES:
            self._partial = b""
        return [line.decode(errors="replace") for line in whole]


@dataclass(slots=True)
class TrainingSpeed:
    """Speed of steps by the log of rank 0: now, and at best."""

    best: float = 0.0
    """Highest median of `REFERENCE_ROWS` logged steps; 0 before there were as many."""
    _skip: int = SHORT_STEPS
    _rows: deque[float] = field(default_factory=lambda: deque(maxlen=REFERENCE_ROWS))

    def begin_attempt(self) -> None:
        """Ignore the next steps, which are slow after a start."""
        self._skip = SHORT_STEPS
        self._rows.clear()

    def add(self, value: float) -> None:
        """Add the speed of a logged step."""
        if self._skip:
            self._skip -= 1
            return
        self._rows.append(value)
        if len(self._rows) == REFERENCE_ROWS:
            self.best = max(self.best, sorted(self._rows)[REFERENCE_ROWS // 2])

    @property
    def recent_median(self) -> float | None:
        """Median of the last `RECENT_ROWS` logged steps; None before there were as many."""
        return sorted(list(self._rows)[-RECENT_ROWS:])[RECENT_ROWS // 2] if len(self._rows) >= RECENT_ROWS else None


@dataclass(slots=True)
class RunFigures:
    """State of a run at one moment."""

    run: str
    started: float
    """Seconds since the epoch."""
    progress: RunProgress = field(default_factory=RunProgress)
    plan: RunPlanned | None = None
    failures: Counter[str] = field(default_factory=Counter)
    """Node -> workers and agents there that have ended with an error of their own."""
    hangs: int = 0
    snapshots: int = 0
    snapshot_step: int | None = None
    """Step of the newest snapshot that was begun."""
    ledger: LedgerFacts = field(default_factory=LedgerFacts)
    row: Mapping[str, float | None] = field(default_factory=dict)
    """The newest logged step: name -> value, None where it was not finite."""
    spoilt: str = ""
    """Values that are not finite, of the newest logged step or failure; empty if all are."""
    speed: TrainingSpeed = field(default_factory=TrainingSpeed)
    step: int | None = None
    """Optimizer steps done; None while none is reported."""
    stepped: float | None = None
    """Time when a step was last seen to be done, in seconds since the epoch."""
    running_since: float | None = None
    """Time when the newest attempt had started on all nodes."""

    @property
    def ends(self) -> bool:
        """Return whether no more steps follow in this attempt, although its processes still run."""
        return self.ledger.phase == "stop"


class FigureCollector:
    """Keeps the figures of a run up to date."""

    def __init__(self, record: RunRecord, *, clock: Callable[[], float] = time.time) -> None:
        """Prepare to read the run's files from their beginning.

        Args:
            record: of the run.
            clock: seconds since the epoch.

        Raises:
            LaunchError: the folder is not that of a run.
        """
        self._record = record
        self.figures = RunFigures(run=record.run, started=record.info().started)
        self._events = FileTail(record.folder / names.EVENTS_FILE)
        self._rows = FileTail(record.folder / names.METRICS_FILE)
        self._ledger = record.folder / names.LEDGER_FILE
        self._ledger_seen: tuple[int, int] | None = None
        self._clock = clock
        self._told_steps: dict[str, int] = {}
        self._newest_row = -math.inf
        self._stopping = False
        """True if workers are being ended, because one has failed before."""

    @property
    def is_behind(self) -> bool:
        """Return whether more data can be read immediately."""
        return self._events.is_behind or self._rows.is_behind

    def collect_new_events(self) -> list[Event]:
        """Read new lines; return the events among them."""
        events = [event for event in map(parse_event, self._events.lines()) if event is not None]
        for event in events:
            self._apply_event(event)
        self._read_ledger()
        spoilt = [self._add_logged_step(row) for row in _parse_metric_rows(self._rows.lines())]
        if any(found is not None for found in spoilt):
            # One bad step among good ones is reported, too; its end is reported when the next rows are read.
            self.figures.spoilt = next((found for found in spoilt if found), "")
        return events

    def _apply_event(self, event: Event) -> None:
        figures = self.figures
        figures.progress.apply(event)
        match event:
            case RunPlanned():
                figures.plan = event
            case AttemptStarting():
                figures.speed.begin_attempt()
                figures.running_since = None
                self._stopping = False
                self._told_steps.clear()
            case AttemptRunning():
                figures.running_since = event.time
            case WorkerExited() if event.exit_code and not self._stopping:
                figures.failures[event.node] += 1
            case RunStopping():
                self._stopping = True
            case HangDetected():
                figures.hangs += 1
            case SnapshotBegun():
                figures.snapshots += 1
                figures.snapshot_step = event.step
            case AttemptRestarting():
                self._record_gradient_failure(event.node, event.rank)
            case RunEnded(first_failure=FirstFailure(node=node, rank=rank)):
                self._record_gradient_failure(node, rank)

    def _record_gradient_failure(self, node: str | None, rank: int | None) -> None:
        """Note a worker that failed because of a gradient that was not finite, by the log of dtctl.runtime."""
        if node is None or rank is None:
            return
        try:
            fd = folders.open_regular(str(self._record.log_path(node, rank)))
        except OSError:
            return
        with os.fdopen(fd, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
            found = _NOT_FINITE.findall(log.read(LOG_BYTES))
        if found:
            self.figures.spoilt = found[-1].decode(errors="replace")

    def _read_ledger(self) -> None:
        try:
            status = self._ledger.stat()
            if (seen := (status.st_mtime_ns, status.st_ino)) == self._ledger_seen:
                return
        except OSError:
            return
        if (ledger := read_ledger(self._ledger)) is None:
            return
        self._ledger_seen, self.figures.ledger = seen, ledger
        if ledger.steps is not None:
            self._note_step("ledger", ledger.steps)

    def _add_logged_step(self, row: dict[str, float | None]) -> str | None:
        """Count a logged step; return its values that are not finite, or None if the step was known."""
        # An attempt sends the rows of earlier ones again, which are not new.
        logged = row.get("time") or math.inf
        if logged <= self._newest_row:
            return None
        self._newest_row = logged if logged < math.inf else self._newest_row
        self.figures.row = row
        spoilt = [name for name in ("loss", "grad_norm") if name in row and row[name] is None]
        step = int(row["step"] or 0)
        speed = row.get("tokens_per_s") or row.get("samples_per_s")
        if speed:
            self.figures.speed.add(speed)
        self._note_step("row", step)
        return f"{' and '.join(spoilt)} of step {step} not finite" if spoilt else ""

    def _note_step(self, source: str, step: int) -> None:
        """Record a step number from one of the sources; it decreases when training returns to a snapshot."""
        before = self._told_steps.get(source)
        self._told_steps[source] = step
        self.figures.step = max(self._told_steps.values())
        # The first step that an attempt reports may be the one that it resumed at; a logged step was done.
        if step > before if before is not None else source == "row":
            self.figures.stepped = self._clock()


def _parse_metric_rows(lines: list[str]) -> Iterator[dict[str, float | None]]:
    """Yield rows of metrics.jsonl; other lines are left out."""
    for row in map(parse_row, lines):
        if row is not None:
            known = ((name, value) for name, value in row.items() if _KEY.match(name) and _is_figure(value))
            yield {name: _convert_to_finite(value) for name, value in islice(known, KEYS)}


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _convert_to_finite(value: float | None) -> float | None:
    """Return a number that can be shown, or None for one that is not finite."""
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None
