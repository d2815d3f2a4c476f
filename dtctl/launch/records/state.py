"""The state of a run, read from its folder for `runs`, `status`, `logs` and `watch`."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field

from dtctl import names, node_facts
from dtctl.launch.records.events import JobQueued, ResumeConfirmed, RunEnded, RunProgress, RunResumed
from dtctl.launch.records.ledger import LedgerFacts, read_ledger
from dtctl.launch.records.record import RunInfo, RunRecord

LEFT = ("abandoned", "unattended")
"""States in which a run has no launcher, so that its progress is not known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run from its events."""

    run: str
    status: str
    """Status: queued (by Slurm), starting, running, stopping, succeeded, failed, stopped, abandoned (the launcher ended
    without recording an end) or unattended (the same, but the run is detached and continues without a launcher)."""
    started: float
    """Start of the run in seconds since the epoch."""
    duration_s: float
    attempt: int
    nodes: dict[str, str] = field(default_factory=dict)
    """Last reported state of each node."""
    restarts: tuple[str, ...] = ()
    """First failure of each attempt except the last one."""
    heals: tuple[str, ...] = ()
    """Texts about replaced workers, with the seconds of each replacement."""
    resume: RunResumed | ResumeConfirmed | None = None
    """Newest event about a resume, with its verdict if there is one."""
    job: str = ""
    """Id of the run's Slurm job."""
    looked: float = 0.0
    """Time of the last known state, in seconds since the epoch: a job of Slurm continues without a follower."""
    waits: JobQueued | None = None
    """Event with the reason why the job waits and the expected start; None if it does not wait."""
    alerts: dict[str, str] = field(default_factory=dict)
    """Alerts of `metrics.alerts` that are firing, with their texts."""
    done: RunEnded | None = None
    """Event of the run's end; None before it."""
    ledger: LedgerFacts | None = None
    """Time by phase, as the launcher last wrote it."""

    @property
    def over(self) -> bool:
        """Return whether the run has ended or has no launcher."""
        return self.status in ("succeeded", "failed", "stopped", *LEFT)


def is_launcher_alive(info: RunInfo) -> bool:
    """Return whether the launcher of a run is alive; a later process with the same id does not count."""
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
    return ticks != 0 and (info.pid_started, info.boot) == (ticks, node_facts.read_boot_id())


def read_run_progress(record: RunRecord) -> RunProgress:
    """Return the run's progress from its events so far."""
    progress = RunProgress()
    for event in record.events():
        progress.apply(event)
    return progress


def _last_written(record: RunRecord) -> float:
    """Return when the launcher last wrote anything here, since a killed one may have had no event for hours."""
    newest = 0.0
    written = (record.folder / names.LEDGER_FILE, record.folder / names.METRICS_FILE)
    for path in (*(record.folder / names.LOGS_DIR).glob("*/*"), *written):
        with contextlib.suppress(OSError):  # The file was removed.
            newest = max(newest, path.lstat().st_mtime)
    return newest


def read_run_state(record: RunRecord) -> RunState:
    """Return the state of a run.

    Raises:
        LaunchError: the folder is not that of a run.
    """
    info = record.info()
    progress = read_run_progress(record)
    status, done = progress.status, progress.end
    last = info.started if progress.last is None else progress.last
    if done is None and not info.slurm and not is_launcher_alive(info) and not record.has_launcher():
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
        heals=tuple(healed.event_text for healed in progress.heals),
        resume=progress.resume,
        job=progress.job.job if progress.job is not None else "",
        waits=progress.waits,
        alerts={} if done is not None else {name: alert.text for name, alert in progress.alerts.items()},
        done=done,
        ledger=read_ledger(record.folder / names.LEDGER_FILE),
    )


def summarize_time_shares(ledger: LedgerFacts) -> str:
    """Return one line for the user: `useful 91% of 1:02:03 (stall 0.4%, lost 3%, start 2%)`, the larger shares."""
    wall_s = ledger.wall_s
    shares = {name: spent / wall_s for name, spent in ledger.phases_s.items() if wall_s > 0}
    useful = shares.pop("useful", 0.0)
    measured = ledger.goodput is not None
    largest = sorted(((share, name) for name, share in shares.items() if share >= 0.001), reverse=True)
    details = ", ".join(f"{name} {share:.1%}" for share, name in largest[:6])
    text = f"useful {useful:.1%}" if measured else "useful: not measured, the job reports no steps"
    return text + (f" ({details})" if details else "")
