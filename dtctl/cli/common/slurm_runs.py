"""The steps behind `dtctl launch` and related commands for a Slurm job: submit, follow, poll, cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from dtctl import node_facts
from dtctl.cli import output
from dtctl.cli.common.followed_run import (
    caught_signals,
    create_run,
    emitter,
    finish,
    measured,
    take_up,
)  # fmt: skip
from dtctl.cli.common.run_display import LaunchView, list_push_warnings
from dtctl.errors import ConnectError, DtctlError, LaunchError
from dtctl.launch.records.events import Emit, JobSubmitted, Note, RunEnded, RunPlanned

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.slurm.answers import JobFacts
    from dtctl.slurm.follow import Follower
    from dtctl.slurm.job_ref import JobRef
    from dtctl.slurm.site import Site
    from dtctl.spec.model import Spec

POLL_S = 0.5
"""Seconds between two questions whether a job that was cancelled has ended."""
SILENT_S = 5.0
"""Seconds without an answer from Slurm about a job that is to be stopped, in addition to the time of one request."""
CANCEL_LIMIT_S = 120.0
"""Slurm gives workers KillWait (30 s unless configured) between SIGTERM and SIGKILL."""


def launch_job(
    spec: Spec, run: str, *, spec_name: str, detach: bool, json_lines: bool, resume: str | None = None
) -> int:
    """Submit the job, follow it to its end unless it is detached, and report; return the exit code.

    `resume` is the run whose outputs it continues.
    """
    from dtctl.launch.assemble import CodePush
    from dtctl.launch.cluster import cluster_of, first_plan
    from dtctl.slurm.adopt import intent
    from dtctl.slurm.site import site_of
    from dtctl.slurm.submit import array_of, submit

    if array_of(spec):
        return _launch_array(spec, run, spec_name=spec_name, json_lines=json_lines)
    code = CodePush(spec) if spec.pushes else None
    plan = first_plan(spec, cluster_of(spec, start=False), run=run)
    with closing(site_of(spec)) as site:
        record = create_run(spec, run, spec_name=spec_name, detached=detach, slurm=True)
        record.write_plan(plan)
        emit = emitter(record, LaunchView(json_lines=json_lines, record=record), json_lines=json_lines)
        emit(RunPlanned(run=run, kind=plan.kind, world_size=plan.world_size))
        for note in list_push_warnings(spec, code.tree) if code is not None else ():
            emit(note)
        output.err(f"run {run}: {len(plan.nodes)} nodes, {plan.world_size} workers ({plan.kind} over slurm)", "bold")
        with record.launcher_lock(), caught_signals() as signals:
            try:
                submission = submit(
                    spec, site, run, code, followed=True, earlier=_folder_of(spec, resume),
                    before=lambda ref: emit(intent(ref, site.name)),
                )  # fmt: skip
            except DtctlError as exc:
                # Where the link was lost, Slurm may have the job all the same.
                left = None if isinstance(exc, ConnectError) else 0
                emit(RunEnded(run=run, status="failed", exit_code=exc.exit_code, left_behind=left, error=str(exc)))
                raise
            emit(JobSubmitted(site=site.name, **asdict(submission.ref)))
            for text in submission.notes:
                emit(Note(node=site.name, text=text))
            if not detach:
                with measured(spec, record, emit):
                    return _follow(record, site, emit, signals)
            if spec.metrics is not None:
                output.err("metrics are sent while `dtctl watch` follows the job", "dim")
    if not json_lines:  # its events have the name
        output.out(run)
    output.err("it continues in the background: `dtctl status`, `dtctl logs -f`, `dtctl stop`")
    return 0


def _folder_of(spec: Spec, run: str | None) -> str:
    """Folder of an earlier run, where Slurm's commands are; empty for none, and for one that was no job."""
    from dtctl.launch.records.record import find_run
    from dtctl.slurm.follow import reference

    if run is None:
        return ""
    record = find_run(spec.base_dir, run)
    return reference(record).folder if record.info().slurm else ""


def _launch_array(spec: Spec, run: str, *, spec_name: str, json_lines: bool) -> int:
    """Submit an array, with a run for each task; no launcher follows them until the user runs a command on one."""
    from dtctl.launch.assemble import CodePush
    from dtctl.launch.cluster import cluster_of, first_plan
    from dtctl.launch.records.record import check_run_name
    from dtctl.slurm.adopt import intent
    from dtctl.slurm.arrays import run_of_task
    from dtctl.slurm.site import site_of
    from dtctl.slurm.submit import array_of, submit

    runs = {index: check_run_name(run_of_task(run, index)) for index in array_of(spec)}
    code = CodePush(spec) if spec.pushes else None
    for note in list_push_warnings(spec, code.tree) if code is not None else ():
        output.err(note.text, "yellow")
    emits: dict[int, Emit] = {}
    with closing(site_of(spec)) as site, ExitStack() as locks:

        def before(ref: JobRef) -> None:
            begun = node_facts.launch_time()
            for position, (index, name) in enumerate(runs.items()):
                plan = first_plan(spec, cluster_of(spec, start=False), run=name)
                started = begun + position / 1e6  # runs are listed by that
                record = create_run(spec, name, spec_name=spec_name, detached=True, slurm=True, started=started)
                locks.enter_context(record.launcher_lock())
                record.write_plan(plan)
                emits[index] = emitter(record, json_lines=json_lines)
                emits[index](RunPlanned(run=name, kind=plan.kind, world_size=plan.world_size))
                emits[index](intent(ref, site.name, index=index))

        try:
            submission = submit(spec, site, run, code, followed=True, before=before)
        except DtctlError as exc:
            left = None if isinstance(exc, ConnectError) else 0
            for index, name in runs.items():
                if index in emits:
                    end = RunEnded(run=name, status="failed", exit_code=exc.exit_code, left_behind=left, error=str(exc))
                    emits[index](end)
            raise
        for index, emit in emits.items():
            emit(JobSubmitted(site=site.name, **asdict(submission.job_of(index))))
    for text in submission.notes:
        output.err(text, "yellow")
    names = list(runs.values())
    if not json_lines:
        for name in names:
            output.out(name)
    output.err(
        f"job {submission.ref.job}, {len(names)} tasks, a run each: `dtctl runs`, `dtctl status {names[0]}`, "
        f"`dtctl logs -f {names[0]}`; `dtctl stop {run}` stops all"
    )
    return 0


def adopt(record: RunRecord) -> None:
    """Find the job of a run whose launcher ended before it got the job's number; end the run if there is none.

    Raises:
        LaunchError: Slurm does not report it.
    """
    from dtctl.launch.assemble import spec_of_run
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.launch.records.state import alive
    from dtctl.slurm.adopt import begins, never, open_intent, outcome
    from dtctl.slurm.site import site_of

    submitting, writer = open_intent(record), RunWriter(record.folder)
    if record.has_launcher():
        return
    if submitting is not None:
        with closing(site_of(spec_of_run(record))) as site, writer.launcher_lock():
            emitter(writer)(outcome(record.run, submitting, site))
    elif begins(record) and not alive(record.info()):
        with writer.launcher_lock():
            emitter(writer)(never(record.run))


def take_up_job(record: RunWriter) -> int:
    """Follow a job that no launcher follows to its end; the exit code."""
    from dtctl.launch.assemble import spec_of_run
    from dtctl.slurm.job_files import drop_unnoted
    from dtctl.slurm.site import site_of

    adopt(record)
    spec = spec_of_run(record)
    with closing(site_of(spec)) as site, record.launcher_lock():
        drop_unnoted(record.folder)
        emit = take_up(record)
        with measured(spec, record, emit), caught_signals() as signals:
            return _follow(record, site, emit, signals)


def refresh(record: RunRecord) -> None:
    """Update the record of a job that no launcher follows."""
    adopt(record)
    if not _unfollowed(record):
        return
    with _follower(record) as follower:
        _catch_up(follower)
        if follower.slurm.facts.state == "UNKNOWN":
            output.err(
                f"Slurm does not answer, so this is what the job's files say: {follower.slurm.facts.reason}", "yellow"
            )
        _close(follower, None)


def stop_job(record: RunRecord, *, as_json: bool) -> int:
    """`dtctl stop` for a job of Slurm: cancel it, wait until it is over, and check for remaining processes."""
    from dtctl.launch import stop as stopping
    from dtctl.launch.records.state import state_of
    from dtctl.slurm.follow import nodes_of
    from dtctl.slurm.left import look

    adopt(record)
    if state_of(record).over and not state_of(record).job:
        if as_json:
            output.emit_json({"run": record.run, "left_behind": 0, "nodes": {}})
        else:
            output.out("0 processes left: Slurm never had the job")
        return 0
    if not stopping.by_launcher(record, wait_s=CANCEL_LIMIT_S) and _unfollowed(record):
        with _follower(record) as follower:
            _end(follower.site, follower.ref)
            follower.is_asked_to_stop = True
            _catch_up(follower)
            _close(follower, None)
    # Regardless of the record: a launcher on another machine may follow it, or the record of its end may be wrong.
    with _site(record) as (site, ref):
        state = _end(site, ref)
        processes_left = look(site, ref.python, ref.job, state, sorted({*nodes_of(record), *state.nodes}))
    if as_json:
        if processes_left.total is None:  # the reason, for the user
            output.err(processes_left.describe())
        nodes = {node: "nobody could look" if count is None else count for node, count in processes_left.counts.items()}
        output.emit_json({"run": record.run, "left_behind": processes_left.total, "nodes": nodes})
    else:
        output.out(processes_left.describe())
    return 0


def _end(site: Site, ref: JobRef) -> JobFacts:
    """Cancel a job if it is not over, and wait until it is; return Slurm's facts about it then.

    Raises:
        LaunchError: it does not end, or Slurm does not answer.
    """
    from dtctl.slurm import login_client
    from dtctl.slurm.answers import JobAsked
    from dtctl.slurm.follow import cancel
    from dtctl.slurm.job_state import is_on

    deadline, cancelled = time.monotonic() + CANCEL_LIMIT_S, False
    silent_until = time.monotonic() + SILENT_S
    while is_on(state := login_client.ask(site, ref.python, JobAsked, job=ref.job, folder=ref.folder, urgent=True).job):
        if state.state == "UNKNOWN":
            if time.monotonic() > silent_until:
                raise LaunchError(
                    f"Slurm does not answer, and job {ref.job} may run: {state.reason or 'no message'}",
                    where=site.name,
                    hint=f"is slurmctld up? try sinfo; then: scancel {ref.job}",
                )
        elif not cancelled:
            cancel(site, ref.job)
            cancelled = True
        elif time.monotonic() > deadline:
            raise LaunchError(
                f"job {ref.job} has not ended within {CANCEL_LIMIT_S:g} s",
                where=site.name,
                hint=f"scontrol show job {ref.job} says what it waits for",
            )
        time.sleep(POLL_S)
    return state


@contextmanager
def _site(record: RunRecord) -> Iterator[tuple[Site, JobRef]]:
    from dtctl.launch.assemble import spec_of_run
    from dtctl.slurm.follow import reference
    from dtctl.slurm.site import site_of

    with closing(site_of(spec_of_run(record))) as site:
        yield site, reference(record)


def _unfollowed(record: RunRecord) -> bool:
    """Return whether the job was submitted, is not known to be over, and no launcher follows it."""
    from dtctl.launch.records.state import state_of

    return bool(state_of(record).job) and not state_of(record).over and not record.has_launcher()


@contextmanager
def _follower(record: RunRecord) -> Iterator[Follower]:
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.slurm.follow import Follower

    writer = RunWriter(record.folder)
    with _site(record) as (site, ref), writer.launcher_lock():
        yield Follower(writer, ref, site, emitter(writer))


def _catch_up(follower: Follower) -> bool:
    """Look until there is nothing new, and it is known whether the job is over: that is the answer."""
    from dtctl.slurm.job_backend import FIRST_POLL_S

    while follower.look() or (follower.slurm.is_over and not follower.settled):
        time.sleep(FIRST_POLL_S)
    return follower.settled


def _close(follower: Follower, stopped_by: int | None) -> None:
    """Record the end, if there is one."""
    if follower.settled:
        follower.emit(follower.result(stopped_by=stopped_by).to_event())


def _follow(record: RunWriter, site: Site, emit: Emit, signals: list[int]) -> int:
    """Follow a job until it is over."""
    from dtctl.launch.control.controller import control
    from dtctl.slurm.job_backend import JobBackend

    return finish(control(JobBackend(record, site, emit, signals), signals), emit, record)
