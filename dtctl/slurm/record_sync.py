"""Copies of the records of the launcher inside of a job (job_control.py): events, logs, metrics, ledger."""

from __future__ import annotations

import contextlib
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
    AttemptRestarting,
    AttemptRunning,
    AttemptStarting,
    Emit,
    Event,
    HangDetected,
    LauncherPaused,
    NodeChanged,
    NodeDropped,
    NodeReplaced,
    NodesAllocated,
    Note,
    OutputLine,
    RunEnded,
    RunProgress,
    RunStopping,
    SnapshotBegun,
    TimeLimitReached,
    WorkerExited,
    WorkersReplaced,
    parse_event,
)
from dtctl.launch.records.ledger import read_ledger, write_ledger
from dtctl.launch.records.logs import ATTEMPTS_FILE, BEGUN_FILE, LineSplitter
from dtctl.launch.records.record import RunRecord
from dtctl.slurm.job_control import CONTROL_FOLDER
from dtctl.supervisor.frames import parse_log_name

EVENTS_COPY: Final = "job-events.jsonl"
"""Copy of the job's own events in the run's folder here; the run's events are made from it."""
WHOLE: Final = (names.PLAN_FILE, names.LEDGER_FILE, BEGUN_FILE, ATTEMPTS_FILE)
"""Files that are replaced as a whole; the others grow, and may be written from the beginning again."""
TOLD: Final = (
    AttemptRunning, AttemptStarting, WorkersReplaced, HangDetected, LauncherPaused, NodeChanged, NodeDropped,
    NodeReplaced, NodesAllocated, Note, AttemptRestarting, SnapshotBegun, RunStopping, TimeLimitReached, WorkerExited,
)  # fmt: skip
"""Events that the launcher inside a job reports; its follower reports the others."""
_LOG: Final = re.compile(r"logs/[^/]+/(rank-\d+|agent)\.log\Z")
METRICS: Final = f"{CONTROL_FOLDER}/{names.METRICS_FILE}"


class RecordSync:
    """Copies of a job's records in the folder of one run."""

    def __init__(self, record: RunRecord, emit: Emit) -> None:
        """Continue from the copies that exist."""
        self._record, self._emit = record, emit
        self._lines: dict[str, LineSplitter] = {}
        self.progress = RunProgress()
        """Progress of the run by the job's events."""
        self.end: RunEnded | None = None
        """End of the newest start of the job."""
        self.requeue_reason = ""
        """Reason why Slurm has requeued the job; the event of the next start lacks it."""
        self.is_stop_told = False
        """True if the follower of the job has stopped it, and emitted the event `RunStopping` already."""
        self.has_begun = False
        """True if the job has or had a launcher inside of it."""
        for line in _read_copy_text(record.folder / EVENTS_COPY).splitlines():
            self._apply_mirrored_event(parse_event(line))

    def copy_arrived_files(self, arrived: Mapping[str, tuple[int, bytes]]) -> bool:
        """Copy new parts of files and emit their events; return whether to copy the metrics from their beginning.

        Args:
            arrived: file of the job -> offset, and the bytes from there on; only files of this launcher.
        """
        files = {name.removeprefix(f"{CONTROL_FOLDER}/"): part for name, part in arrived.items()}
        offset, data = files.pop(names.EVENTS_FILE, (0, b""))
        for name, (at, piece) in sorted(files.items()):
            self._write_copy_part(name, 0 if name in WHOLE else at, piece)
            if _LOG.match(name):  # output that was printed before an event arrives with the event, or earlier
                self._emit_output_lines(name, piece)
        again = False
        if data:
            self._write_copy_part(EVENTS_COPY, offset, data)
            for line in data.decode(errors="replace").splitlines():
                event = parse_event(line)
                self._apply_mirrored_event(event)
                if isinstance(event, TOLD) and not (self.is_stop_told and isinstance(event, RunStopping)):
                    self._emit(self._add_requeue_reason(event))
                again = again or isinstance(event, AttemptRestarting | WorkersReplaced)
        return again

    def _add_requeue_reason(self, event: Event) -> Event:
        """Return the event with the reason for which Slurm has requeued the job."""
        if not (isinstance(event, AttemptRestarting) and event.node is None and self.requeue_reason):
            return event
        reason, self.requeue_reason = self.requeue_reason, ""
        first = self.end.first_failure if self.end is not None else None
        lost = first.node if first is not None and first.exit_code is None else None
        return replace(event, reason=reason, node=lost)

    def _apply_mirrored_event(self, event: Event | None) -> None:
        self.has_begun = self.has_begun or event is not None
        if isinstance(event, RunEnded):
            self.end = event
        elif isinstance(event, TOLD):
            self.progress.apply(event)
            self.end = None if isinstance(event, AttemptStarting) else self.end

    def _emit_output_lines(self, name: str, data: bytes) -> None:
        node, rank = name.split("/")[1], parse_log_name(name.split("/")[2])
        for text in self._lines.setdefault(name, LineSplitter()).feed(data):
            self._emit(OutputLine(node=node, rank=rank, text=text))

    def _write_copy_part(self, name: str, offset: int, data: bytes) -> None:
        """Write data at an offset of a copy, and truncate the copy behind the data."""
        path = self._record.folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.seek(offset)
            file.write(data)
            file.truncate()

    def failure(self) -> Failure | None:
        """Return the newest attempt's first failure, which the launcher inside has found; None if there is none."""
        first = self.end.first_failure if self.end is not None else None
        if first is None or self.end is None:
            return None
        log, tail = "", tuple[str, ...]()
        if first.rank is not None and first.log:
            # The record names a file of the job; this is the path of its copy.
            path = self._record.log_path(first.node or "", first.rank)
            hung = sorted(self._record.folder.glob(f"{names.HANGS_DIR}/*/{first.node}/rank-{first.rank}.txt"))
            path = hung[-1] if f"/{names.HANGS_DIR}/" in first.log and hung else path
            log = str(path) if path.is_file() else ""
            tail = failures.take_last_lines(_read_copy_text(path))
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
        """Count the run's time up to `wall_s` seconds after its launch; return the goodput."""
        path = self._record.folder / names.LEDGER_FILE
        if (facts := read_ledger(path)) is None:
            return None
        # A launcher that was killed has not counted its last seconds, and no step of them is kept.
        facts = facts.extend("lost" if self.end is None else "stop", wall_s)
        with contextlib.suppress(LaunchError):  # a full disk does not change the result of the run
            write_ledger(path, facts)
        return facts.goodput


def _read_copy_text(path: Path) -> str:
    try:
        return folders.read_regular(str(path), 64 << 20).decode(errors="replace")
    except OSError:
        return ""
