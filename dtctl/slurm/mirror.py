"""The records of the launcher inside of a job (job_control.py), copied as they grow: events, logs, metrics, ledger."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from dtctl import folders, names
from dtctl.errors import LaunchError
from dtctl.launch.control import failure as failures
from dtctl.launch.control.failure import Failure
from dtctl.launch.records.events import (
    AttemptRunning,
    AttemptStarting,
    Emit,
    Event,
    Healed,
    Hung,
    LauncherAway,
    NodeChanged,
    NodeLeftOut,
    NodeReplaced,
    NodesAllocated,
    Note,
    OutputLine,
    Restarting,
    RunEnded,
    RunProgress,
    SnapshotBegun,
    Stopping,
    TimeIsUp,
    WorkerExited,
    parse,
)
from dtctl.launch.records.ledger import LedgerFacts
from dtctl.launch.records.logs import BEGUN_FILE, Lines, rank_of
from dtctl.launch.records.record import RUN_BYTES, RunRecord
from dtctl.launch.records.run_writer import write_private
from dtctl.slurm.job_control import CONTROL_FOLDER

EVENTS_COPY: Final = "job-events.jsonl"
"""Copy of the job's own events in the run's folder here; the run's events are made from it."""
WHOLE: Final = (names.PLAN_FILE, names.LEDGER_FILE, BEGUN_FILE)
"""Files that are replaced; the others grow, and may start again from the beginning."""
TOLD: Final = (
    AttemptRunning, AttemptStarting, Healed, Hung, LauncherAway, NodeChanged, NodeLeftOut, NodeReplaced, NodesAllocated,
    Note, Restarting, SnapshotBegun, Stopping, TimeIsUp, WorkerExited,
)  # fmt: skip
"""Events that a job may report of its run; its follower reports the others."""
_LOG: Final = re.compile(r"logs/[^/]+/(rank-\d+|agent)\.log\Z")
METRICS: Final = f"{CONTROL_FOLDER}/{names.METRICS_FILE}"


class Mirror:
    """The copy in one run's folder."""

    def __init__(self, record: RunRecord, emit: Emit) -> None:
        """Go on from what was copied before."""
        self._record, self._emit = record, emit
        self._lines: dict[str, Lines] = {}
        self.progress = RunProgress()
        """Progress by the job's events."""
        self.end: RunEnded | None = None
        """End of the newest start of the job."""
        self.requeue_reason = ""
        """Reason why Slurm has taken the job back, for the event of the next start, which lacks it."""
        self.is_stop_told = False
        """True if the follower of the job has stopped it, and emitted this event already."""
        self.has_begun = False
        """True if there is a launcher inside of the job, or was one."""
        for line in _text(record.folder / EVENTS_COPY).splitlines():
            self._apply(parse(line))

    def take(self, arrived: Mapping[str, tuple[int, bytes]]) -> bool:
        """Copy new parts of files and emit their events; return whether to copy the metrics from their beginning.

        Args:
            arrived: file of the job -> offset, and the bytes there; only those of this launcher.
        """
        files = {name.removeprefix(f"{CONTROL_FOLDER}/"): part for name, part in arrived.items()}
        offset, data = files.pop(names.EVENTS_FILE, (0, b""))
        for name, (at, piece) in sorted(files.items()):
            self._copy(name, 0 if name in WHOLE else at, piece)
            if _LOG.match(name):  # what was printed before an event has come with it, or before
                self._print(name, piece)
        again = False
        if data:
            self._copy(EVENTS_COPY, offset, data)
            for line in data.decode(errors="replace").splitlines():
                event = parse(line)
                self._apply(event)
                if isinstance(event, TOLD) and not (self.is_stop_told and isinstance(event, Stopping)):
                    self._emit(self._explained(event))
                again = again or isinstance(event, Restarting | Healed)
        return again

    def _explained(self, event: Event) -> Event:
        """Return the event, with the reason for which Slurm has started the job again."""
        if not (isinstance(event, Restarting) and event.node is None and self.requeue_reason):
            return event
        reason, self.requeue_reason = self.requeue_reason, ""
        first = self.end.first_failure if self.end is not None else None
        lost = first.node if first is not None and first.exit_code is None else None
        return replace(event, reason=reason, node=lost)

    def _apply(self, event: Event | None) -> None:
        self.has_begun = self.has_begun or event is not None
        if isinstance(event, RunEnded):
            self.end = event
        elif isinstance(event, TOLD):
            self.progress.apply(event)
            self.end = None if isinstance(event, AttemptStarting) else self.end

    def _print(self, name: str, data: bytes) -> None:
        node, rank = name.split("/")[1], rank_of(Path(name))
        for text in self._lines.setdefault(name, Lines()).feed(data):
            self._emit(OutputLine(node=node, rank=rank, text=text))

    def _copy(self, name: str, offset: int, data: bytes) -> None:
        """Have a copy end with what stands at an offset of its file."""
        path = self._record.folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.seek(offset)
            file.write(data)
            file.truncate()

    def failure(self) -> Failure | None:
        """Return what the newest attempt has failed of, as the launcher inside has found; None when it has not."""
        first = self.end.first_failure if self.end is not None else None
        if first is None or self.end is None:
            return None
        log, tail = "", tuple[str, ...]()
        if first.rank is not None and first.log:
            # The same file, here.
            path = self._record.log_path(first.node or "", first.rank)
            hung = sorted(self._record.folder.glob(f"{names.HANGS_DIR}/*/{first.node}/rank-{first.rank}.txt"))
            path = hung[-1] if f"/{names.HANGS_DIR}/" in first.log and hung else path
            log = str(path) if path.is_file() else ""
            tail = failures.last_lines(_text(path))
        return Failure(
            node=first.node or "",
            rank=first.rank,
            exit_code=first.exit_code,
            signal=first.signal,
            time=self.end.time,
            log=log,
            summary=first.summary or "",
            tail=tail,
            hang=bool(first.hang),
        )

    def close_ledger(self, wall_s: float) -> float | None:
        """Return the goodput of a run that took so long, and record what has passed since the job's own ledger."""
        path = self._record.folder / names.LEDGER_FILE
        try:
            facts = LedgerFacts.parse(json.loads(folders.read_regular(str(path), RUN_BYTES)))
        except (OSError, ValueError, RecursionError):
            return None
        # A launcher that was killed has counted nothing of its last seconds, and no step of them is kept.
        facts = facts.extend("lost" if self.end is None else "stop", wall_s)
        with contextlib.suppress(LaunchError):  # a full disk changes nothing about how the run ended
            write_private(path, json.dumps(vars(facts)) + "\n")
        return facts.goodput


def _text(path: Path) -> str:
    try:
        return folders.read_regular(str(path), 64 << 20).decode(errors="replace")
    except OSError:
        return ""
