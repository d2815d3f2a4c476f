"""The steps behind `dtctl launch` and related commands for a Slurm job: submit, follow, poll, cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dtctl.cli import output
from dtctl.cli.common.launch_view import LaunchView, show_left_out
from dtctl.cli.common.launcher import caught_signals, create_run, emitter, finish, note_end, take_up
from dtctl.errors import ConnectError, DtctlError, Interrupted, LaunchError
from dtctl.launch.records.events import Emit, JobSubmitted, Note, RunEnded, RunPlanned, Stopping

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord
    from dtctl.slurm.follow import Follower, JobRef
    from dtctl.slurm.site import Site
    from dtctl.spec.model import Spec

POLL_S, POLL_AWAY_S = 0.5, 2.0
"""Between two polls of a running job: here, and on a login node."""
QUEUE_POLL_S = 8.0
"""Between two polls of a waiting job, after a while."""
FIRST_POLL_S = 0.2
AGAIN_S = 5.0
"""Until a lost login node is called again."""
CANCEL_LIMIT_S = 120.0
"""Slurm gives workers KillWait (30 s unless configured) between SIGTERM and SIGKILL."""


def launch_job(spec: Spec, run: str, *, spec_name: str, detach: bool, json_lines: bool) -> int:
    """Submit the job, follow it to its end unless it is detached, and report; the exit code."""
    from dtctl.launch.assemble import CodePush
    from dtctl.launch.cluster import cluster_of
    from dtctl.launch.first_plan import first_plan
    from dtctl.slurm.site import site_of
    from dtctl.slurm.submit import submit

    code = CodePush(spec) if spec.pushes else None
    plan = first_plan(spec, cluster_of(spec, start=False), run=run)
    if code is not None:
        show_left_out(code.tree)
    with closing(site_of(spec)) as site:
        record = create_run(spec, run, spec_name=spec_name, detached=detach, slurm=True)
        record.write_plan(plan)
        emit = emitter(record, LaunchView(json_lines=json_lines), json_lines=json_lines)
        emit(RunPlanned(run=run, kind=plan.kind, world_size=plan.world_size))
        output.err(f"run {run}: {len(plan.nodes)} nodes, {plan.world_size} workers ({plan.kind} over slurm)", "bold")
        with record.launcher_lock(), caught_signals() as signals:
            try:
                ref = submit(spec, site, run, code, followed=True)
            except DtctlError as exc:
                # Where the link was lost, Slurm may have the job all the same.
                left = None if isinstance(exc, ConnectError) else 0
                emit(RunEnded(run=run, status="failed", exit_code=exc.exit_code, left_behind=left, error=str(exc)))
                raise
            emit(JobSubmitted(site=site.name, **asdict(ref)))
            if not detach:
                return _follow(record, site, emit, signals)
    output.out(run)
    output.err("it continues in the background: `dtctl status`, `dtctl logs -f`, `dtctl stop`")
    return 0


def take_up_job(record: RunRecord) -> int:
    """Follow a job that no launcher follows to its end; the exit code."""
    from dtctl.launch.assemble import spec_of_run
    from dtctl.slurm.site import site_of

    with closing(site_of(spec_of_run(record))) as site, record.launcher_lock():
        emit = take_up(record)
        with caught_signals() as signals:
            return _follow(record, site, emit, signals)


def refresh(record: RunRecord) -> None:
    """Update the record of a job that no launcher follows."""
    if not _unfollowed(record):
        return
    with _follower(record) as follower:
        _catch_up(follower)
        _close(follower, None)


def stop_job(record: RunRecord, *, as_json: bool) -> int:
    """`dtctl stop` for a job of Slurm: cancel it, wait until it is over, and check for remaining processes."""
    from dtctl.launch import stop as stopping
    from dtctl.slurm.follow import nodes_of
    from dtctl.slurm.left import look

    if not stopping.by_launcher(record, wait_s=CANCEL_LIMIT_S) and _unfollowed(record):
        with _follower(record) as follower:
            _end(follower.site, follower.ref)
            _catch_up(follower)
            _close(follower, None)
    # Whatever has been written down: a launcher on another machine may follow it, or it was said to be over and is not.
    with _site(record) as (site, ref):
        state = _end(site, ref)
        processes_left = look(site, ref.python, ref.job, state, sorted({*nodes_of(record), *state.get("nodes", [])}))
    if as_json:
        nodes = {node: "nobody could look" if count is None else count for node, count in processes_left.counts.items()}
        output.emit_json({"run": record.run, "left_behind": processes_left.total, "nodes": nodes})
    else:
        output.out(processes_left.describe())
    return 0


def _end(site: Site, ref: JobRef) -> dict[str, Any]:
    """Cancel a job if it is not over, and wait until it is; what Slurm says of it then.

    Raises:
        LaunchError: it does not end.
    """
    from dtctl.slurm import login_client
    from dtctl.slurm.follow import cancel, is_on

    deadline, cancelled = time.monotonic() + CANCEL_LIMIT_S, False
    while is_on(state := login_client.ask(site, ref.python, {"op": "state", "job": ref.job})["job"]):
        if not cancelled:
            cancel(site, ref.job)
            cancelled = True
        elif time.monotonic() > deadline:
            raise LaunchError(
                f"job {ref.job} has not ended within {CANCEL_LIMIT_S:g} s",
                where=site.name,
                hint=f"scontrol show job {ref.job} says what it waits for",
            )
        time.sleep(POLL_S)
    return dict(state)


@contextmanager
def _site(record: RunRecord) -> Iterator[tuple[Site, JobRef]]:
    from dtctl.launch.assemble import spec_of_run
    from dtctl.slurm.follow import reference
    from dtctl.slurm.site import site_of

    with closing(site_of(spec_of_run(record))) as site:
        yield site, reference(record)


def _unfollowed(record: RunRecord) -> bool:
    """Whether the job was submitted, is not known to be over, and no launcher follows it."""
    from dtctl.launch.records.state import state_of

    return bool(state_of(record).job) and not state_of(record).over and not record.has_launcher()


@contextmanager
def _follower(record: RunRecord) -> Iterator[Follower]:
    from dtctl.slurm.follow import Follower

    with _site(record) as (site, ref), record.launcher_lock():
        yield Follower(record, ref, site, emitter(record))


def _catch_up(follower: Follower) -> bool:
    """Look until there is nothing new, and it is known whether the job is over: that is the answer."""
    while follower.look() or (follower.over and not follower.settled):
        time.sleep(FIRST_POLL_S)
    return follower.settled


def _close(follower: Follower, stopped_by: int | None) -> None:
    """Record the end, if there is one."""
    if follower.settled:
        note_end(follower.result(stopped_by=stopped_by), follower.emit)


def _follow(record: RunRecord, site: Site, emit: Emit, signals: list[int]) -> int:
    """Follow a job until it is over; a signal cancels it, a second one leaves it to Slurm."""
    from dtctl.slurm.follow import WAITING, Follower, cancel, reference
    from dtctl.slurm.site import LocalSite

    ref = reference(record)
    follower = Follower(record, ref, site, emit)
    poll_s = POLL_S if isinstance(site, LocalSite) else POLL_AWAY_S
    cancelled = lost = waited = False
    delay_s = FIRST_POLL_S
    while True:
        if signals and not cancelled:
            emit(Stopping(reason=f"signal {signals[-1]}"))
            cancel(site, ref.job)
            cancelled = True
        elif len(signals) > 1:
            raise Interrupted(f"job {ref.job} is left to Slurm, which was asked to end it", signal=signals[-1])
        try:
            news = follower.look()
            lost = False
        except ConnectError as exc:
            if not lost:
                emit(Note(node=site.name, text=f"{exc}; the job continues, and {site.name} is called again"))
            lost = True
            _wait(AGAIN_S, signals, cancelled=cancelled)
            continue
        waiting = follower.state["JobState"] in WAITING
        if waiting is not waited:
            waited, delay_s = waiting, FIRST_POLL_S
        if follower.settled and not news:
            break
        if not news:
            delay_s = min(delay_s * 1.2, QUEUE_POLL_S if waiting else poll_s)
            _wait(max(delay_s, poll_s / 2), signals, cancelled=cancelled)
    result = follower.result(stopped_by=signals[-1] if cancelled else None)
    return finish(result, emit, record)


def _wait(seconds: float, signals: list[int], *, cancelled: bool) -> None:
    """Wait unless a signal has to be handled; a handler that returns does not end `time.sleep`."""
    until = time.monotonic() + seconds
    while (remaining_s := until - time.monotonic()) > 0 and len(signals) <= int(cancelled):
        time.sleep(min(remaining_s, 0.1))
