"""The state of a run, read from its folder: for `runs`, `status`, `logs` and `watch`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from dtctl import folders, names, node_facts
from dtctl.launch.records.events import Confirmed, Event, JobQueued, Resumed, RunEnded, RunProgress
from dtctl.launch.records.ledger import LedgerFacts
from dtctl.launch.records.record import RUN_BYTES, RunInfo, RunRecord

LEFT = ("abandoned", "unattended")
"""States in which a run has no launcher, and its progress is not known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run from its events."""

    run: str
    status: str
    """queued (Slurm has it), starting, running, stopping, succeeded, failed, stopped; abandoned: its launcher exited
    without recording an end; unattended: the same of a detached run, which continues without a launcher"""
    started: float
    """Seconds since the epoch."""
    duration_s: float
    attempt: int
    nodes: dict[str, str] = field(default_factory=dict)
    """Node -> its last reported state."""
    restarts: tuple[str, ...] = ()
    """Reason why each attempt but the last one has ended: its first failure."""
    heals: tuple[str, ...] = ()
    """Workers that were replaced while the others stayed, with the seconds that it took."""
    resume: Resumed | Confirmed | None = None
    """Newest resume: whether that attempt repeats the steps of before, as far as it is known."""
    job: str = ""
    """Id of the Slurm job that the run is."""
    looked: float = 0.0
    """Time of the last known state, in seconds since the epoch: a job of Slurm continues without a follower."""
    waits: JobQueued | None = None
    """Reason why it waits, and when Slurm expects to start it, while it waits."""
    alerts: dict[str, str] = field(default_factory=dict)
    """Alerts of `metrics.alerts` that are firing, with their texts."""
    done: RunEnded | None = None
    """The last event, when there was one."""
    ledger: LedgerFacts | None = None
    """Time by phase, as the launcher last wrote it."""

    @property
    def over(self) -> bool:
        """Return whether nothing more will happen."""
        return self.status in ("succeeded", "failed", "stopped", *LEFT)


def alive(info: RunInfo) -> bool:
    """Return whether the launcher of a run still lives; another process that has its id by now is not it."""
    if info.pid <= 0:
        return False
    ticks = node_facts.start_ticks(info.pid)
    if ticks == -1:
        try:
            os.kill(info.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True
    return ticks != 0 and (info.pid_started, info.boot) == (ticks, node_facts.boot_id())


def progress_of(record: RunRecord) -> RunProgress:
    """Return the run's progress from its events so far."""
    progress = RunProgress()
    for event in record.events():
        progress.apply(event)
    return progress


def _last_written(record: RunRecord) -> float:
    """Return when output of the run last came here: a launcher that was killed may have had no event for hours."""
    newest = 0.0
    for path in (record.folder / names.LOGS_DIR).glob("*/*"):
        with contextlib.suppress(OSError):  # it went away
            newest = max(newest, path.lstat().st_mtime)
    return newest


def state_of(record: RunRecord) -> RunState:
    """Return the state of a run.

    Raises:
        LaunchError: the folder is not that of a run.
    """
    info = record.info()
    progress = progress_of(record)
    status, done = progress.status, progress.end
    last = info.started if progress.last is None else progress.last
    if done is None and not info.slurm and not alive(info) and not record.has_launcher():
        status = "unattended" if info.detached else "abandoned"
        progress.nodes = dict.fromkeys(progress.nodes, "unknown")
        last = max(last, _last_written(record))
    end = last if done is not None or status in LEFT else time.time()
    unwatched = info.slurm and done is None and not record.has_launcher()
    duration_s = end - info.started if done is None or done.duration_s is None else done.duration_s
    return RunState(
        run=record.run,
        status=status,
        started=info.started,
        duration_s=max(0.0, duration_s),
        looked=last if unwatched or done is not None else time.time(),
        attempt=max(0, progress.attempt),
        nodes=progress.nodes,
        restarts=tuple(restart.cause for restart in progress.restarts),
        heals=tuple(healed.told for healed in progress.heals),
        resume=progress.resume,
        job=progress.job.job if progress.job is not None else "",
        waits=progress.waits,
        alerts={} if done is not None else {name: alert.text for name, alert in progress.alerts.items()},
        done=done,
        ledger=_ledger(record),
    )


def _ledger(record: RunRecord) -> LedgerFacts | None:
    try:
        return LedgerFacts.parse(json.loads(folders.read_regular(str(record.folder / names.LEDGER_FILE), RUN_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None


def where_the_time_went(ledger: LedgerFacts) -> str:
    """Return one line for the user: `useful 91% of 1:02:03 (stall 0.4%, lost 3%, start 2%)`, the larger shares."""
    wall_s = ledger.wall_s
    shares = {name: spent / wall_s for name, spent in ledger.phases_s.items() if wall_s > 0}
    useful = shares.pop("useful", 0.0)
    measured = ledger.goodput is not None
    largest = sorted(((share, name) for name, share in shares.items() if share >= 0.001), reverse=True)
    details = ", ".join(f"{name} {share:.1%}" for share, name in largest[:6])
    text = f"useful {useful:.1%}" if measured else "useful: not measured, the job reports no steps"
    return text + (f" ({details})" if details else "")


def follow(record: RunRecord, *, interval_s: float = 0.1) -> Iterator[Event]:
    """Events as they are appended, from the first on, until the run is over."""
    yielded = 0
    while True:
        events = list(record.events())
        yield from events[yielded:]
        yielded = len(events)
        if state_of(record).over and len(list(record.events())) == yielded:
            return
        time.sleep(interval_s)
