"""The steps behind `dtctl launch` and related commands for a Slurm job: submit, follow, poll, cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from dtctl import node_facts
from dtctl.cli import output
from dtctl.cli.common.followed_run import (
    build_environment_push,
    catch_stop_signals,
    create_run,
    make_event_emitter,
    report_run_end,
    send_run_metrics,
    take_over_run,
)  # fmt: skip
from dtctl.cli.common.run_display import LaunchView, list_push_warnings, print_run_header
from dtctl.errors import ConnectError, DtctlError, LaunchError
from dtctl.launch.records.events import Emit, JobSubmitted, Note, RunEnded, RunPlanned
from dtctl.printable import format_count

if TYPE_CHECKING:
    from dtctl.launch.files.environment import EnvironmentPush
    from dtctl.launch.records.record import RunRecord
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.slurm.answers import JobFacts
    from dtctl.slurm.job_ref import JobRef
    from dtctl.slurm.job_watcher import JobWatcher
    from dtctl.slurm.site import CommandHost
    from dtctl.spec.model import Spec

POLL_S = 0.5
"""Seconds between two queries for the end of a job that was cancelled."""
SILENT_S = 5.0
"""Seconds without an answer from Slurm about a job to stop, in addition to the time limit of one request."""
CATCH_UP_S = 10.0
"""Longest time to read the records of a running job that prints faster than they can be copied, in seconds."""
CANCEL_LIMIT_S = 120.0
"""Longest wait for the end of a cancelled job, in seconds. Slurm waits for KillWait (30 s by default) between SIGTERM
and SIGKILL."""


def launch_job(
    spec: Spec, run: str, *, spec_name: str, detach: bool, json_lines: bool, resume: str | None = None
) -> int:
    """Submit the job, follow it to its end unless it is detached, and report; return the exit code.

    `resume` is the run whose outputs this one continues.
    """
    from dtctl.launch.cluster import build_first_plan, resolve_cluster
    from dtctl.launch.continuation import describe_fresh_start
    from dtctl.launch.job_builder import CodePush
    from dtctl.slurm.recover_submission import build_submission_intent
    from dtctl.slurm.site import choose_slurm_host
    from dtctl.slurm.submit import list_array_indexes, submit_job

    if tasks := list_array_indexes(spec):
        return launch_array(dict.fromkeys(tasks, spec), run, spec_name=spec_name, json_lines=json_lines, sweep={})
    plan = build_first_plan(spec, resolve_cluster(spec, start=False), run=run)
    environment = build_environment_push(spec)  # before the scan of the files, since the lock may be one of them
    code = CodePush(spec) if spec.pushes else None
    with closing(choose_slurm_host(spec)) as site:
        record = create_run(
            spec, run, spec_name=spec_name, detached=detach, slurm=True, environment=_digest_of(environment)
        )
        record.write_plan(plan)
        emit = make_event_emitter(record, LaunchView(json_lines=json_lines, record=record), json_lines=json_lines)
        emit(RunPlanned(run=run, kind=plan.kind, world_size=plan.world_size))
        for note in list_push_warnings(spec, code.tree) if code is not None else ():
            emit(note)
        print_run_header(run, plan.kind, "slurm", nodes=len(plan.nodes), workers=plan.world_size)
        if resume is not None and not _has_earlier_job_state(spec, site, resume):
            emit(Note(text=describe_fresh_start(spec, resume), warning=True))
        with record.launcher_lock(), catch_stop_signals() as signals:
            try:
                submission = submit_job(
                    spec, site, run, code, followed=True, earlier=_find_job_folder(spec, resume),
                    environment=environment,
                    before=lambda ref: emit(build_submission_intent(ref, site.name)),
                )  # fmt: skip
            except DtctlError as exc:
                # Slurm may have the job although the connection was lost.
                left = None if isinstance(exc, ConnectError) else 0
                emit(RunEnded(run=run, status="failed", exit_code=exc.exit_code, left_behind=left, error=str(exc)))
                raise
            emit(JobSubmitted(site=site.name, **asdict(submission.ref)))
            for text in submission.notes:
                emit(Note(node=site.name, text=text))
            if not detach:
                with send_run_metrics(spec, record, emit):
                    return _follow_job(record, site, emit, signals)
            if spec.metrics is not None:
                output.print_stderr("metrics are sent while `dtctl watch` follows the job", "dim")
    if not json_lines:  # the events contain the name
        output.print_stdout(run)
    output.print_stderr("it continues in the background: `dtctl status`, `dtctl logs -f`, `dtctl stop`")
    return 0


def _digest_of(environment: EnvironmentPush | None) -> str:
    return environment.locked.digest if environment is not None else ""


def _has_earlier_job_state(spec: Spec, site: CommandHost, earlier: str) -> bool:
    """Return False if the program keeps its own state, and an earlier job has left no file of it."""
    from dtctl.launch.continuation import keeps_own_state, list_state_paths
    from dtctl.launch.records.record import find_run
    from dtctl.slurm.job_watcher import read_job_reference
    from dtctl.slurm.outputs import count_outputs

    record = find_run(spec.base_dir, earlier)
    if not keeps_own_state(spec) or not record.info().slurm:
        return True
    counts = count_outputs(site, read_job_reference(record), list_state_paths(spec))
    return not counts or any(each.files for each in counts.values())


def _find_job_folder(spec: Spec, run: str | None) -> str:
    """Return an earlier run's folder on the machine with Slurm's commands; empty without such a run or job."""
    from dtctl.launch.records.record import find_run
    from dtctl.slurm.job_watcher import read_job_reference

    if run is None:
        return ""
    record = find_run(spec.base_dir, run)
    return read_job_reference(record).folder if record.info().slurm else ""


def launch_array(
    specs: Mapping[int, Spec],
    run: str,
    *,
    spec_name: str,
    json_lines: bool,
    sweep: Mapping[int, Mapping[str, str]],
) -> int:
    """Submit an array with a run for each task; no launcher follows them until the user runs a command on one.

    Args:
        specs: specs of the tasks by their index, which differ only in the settings of the sweep.
        run: name of the array, which is the prefix of the names of its runs.
        spec_name: path of the spec as it was given.
        json_lines: whether events go to standard output.
        sweep: settings of the tasks by their index; empty for no sweep.
    """
    from dtctl.launch.cluster import build_first_plan, resolve_cluster
    from dtctl.launch.job_builder import CodePush
    from dtctl.launch.records.record import check_run_name
    from dtctl.slurm.arrays import run_of_task
    from dtctl.slurm.recover_submission import build_submission_intent
    from dtctl.slurm.site import choose_slurm_host
    from dtctl.slurm.submit import require_equal_jobs, submit_job

    spec = next(iter(specs.values()))
    runs = {index: check_run_name(run_of_task(run, index)) for index in specs}
    plans = {  # refuses a job that cannot run, before anything is created
        index: build_first_plan(each, resolve_cluster(each, start=False), run=runs[index])
        for index, each in specs.items()
    }
    if sweep:
        require_equal_jobs(specs, plans)
    environment = build_environment_push(spec)
    code = CodePush(spec) if spec.pushes else None
    for note in list_push_warnings(spec, code.tree) if code is not None else ():
        output.print_stderr(note.text, "yellow")
    emits: dict[int, Emit] = {}
    with closing(choose_slurm_host(spec)) as site, ExitStack() as locks:

        def before(ref: JobRef) -> None:
            begun = node_facts.process_start()
            for position, (index, name) in enumerate(runs.items()):
                plan = plans[index]
                record = create_run(
                    specs[index], name, spec_name=spec_name, detached=True, slurm=True,
                    begun=begun + position / 1e6,  # lists of runs are sorted by this time
                    sweep=sweep.get(index), environment=_digest_of(environment),
                )  # fmt: skip
                locks.enter_context(record.launcher_lock())
                record.write_plan(plan)
                emits[index] = make_event_emitter(record, json_lines=json_lines)
                emits[index](RunPlanned(run=name, kind=plan.kind, world_size=plan.world_size))
                emits[index](build_submission_intent(ref, site.name, index=index))

        try:
            submission = submit_job(
                spec, site, run, code, followed=True, environment=environment, specs=specs if sweep else None,
                before=before,
            )  # fmt: skip
        except DtctlError as exc:
            left = None if isinstance(exc, ConnectError) else 0
            for index, name in runs.items():
                if index in emits:
                    end = RunEnded(run=name, status="failed", exit_code=exc.exit_code, left_behind=left, error=str(exc))
                    emits[index](end)
            raise
        for index, emit in emits.items():
            emit(JobSubmitted(site=site.name, **asdict(submission.get_array_task(index))))
    for text in submission.notes:
        output.print_stderr(text, "yellow")
    names = list(runs.values())
    if not json_lines:
        _print_array_runs(runs, sweep)
    output.print_stderr(
        f"job {submission.ref.job}, {format_count(len(names), 'task')}, a run each: `dtctl runs`, "
        f"`dtctl status {names[0]}`, `dtctl logs -f {names[0]}`; `dtctl stop {run}` stops all"
    )
    return 0


def _print_array_runs(runs: Mapping[int, str], sweep: Mapping[int, Mapping[str, str]]) -> None:
    """Print the runs of an array, with their settings if the array is a sweep."""
    if sweep:
        rows = [[name, *sweep[index].values()] for index, name in runs.items()]
        output.print_table(rows, header=["RUN", *next(iter(sweep.values()))])
        return
    for name in runs.values():
        output.print_stdout(name)


def resolve_open_submission(record: RunRecord) -> None:
    """Find the job of a run whose launcher ended before it got the job's number; end the run if there is none.

    Raises:
        LaunchError: Slurm does not report the outcome of the submission.
    """
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.launch.records.state import is_launcher_alive
    from dtctl.launch.run_spec import load_run_spec
    from dtctl.slurm.recover_submission import (
        build_unsubmitted_end,
        find_submission_outcome,
        is_before_submission,
        open_intent,
    )
    from dtctl.slurm.site import choose_slurm_host

    submitting, writer = open_intent(record), RunWriter(record.folder)
    if record.has_launcher():
        return
    if submitting is not None:
        with closing(choose_slurm_host(load_run_spec(record))) as site, writer.launcher_lock():
            make_event_emitter(writer)(find_submission_outcome(record.run, submitting, site))
    elif is_before_submission(record) and not is_launcher_alive(record.info()):
        with writer.launcher_lock():
            make_event_emitter(writer)(build_unsubmitted_end(record.run))


def take_up_job(record: RunWriter) -> int:
    """Follow a job without a follower to its end; return the exit code."""
    from dtctl.launch.run_spec import load_run_spec
    from dtctl.slurm.job_files import drop_unnoted
    from dtctl.slurm.site import choose_slurm_host

    resolve_open_submission(record)
    spec = load_run_spec(record)
    with closing(choose_slurm_host(spec)) as site, record.launcher_lock():
        drop_unnoted(record.folder)
        emit = take_over_run(record)
        with send_run_metrics(spec, record, emit), catch_stop_signals() as signals:
            return _follow_job(record, site, emit, signals)


def update_job_record(record: RunRecord) -> None:
    """Update the record of a job that no launcher follows."""
    resolve_open_submission(record)
    if not _is_job_unfollowed(record):
        return
    with _open_job_follower(record) as follower:
        _catch_up(follower)
        if follower.slurm.facts.state == "UNKNOWN":
            output.print_stderr(
                f"Slurm does not answer, so this is from the job's files: {follower.slurm.facts.reason}", "yellow"
            )
        _record_job_end(follower, None)


def stop_job(record: RunRecord, *, as_json: bool) -> int:
    """Stop a job of Slurm for `dtctl stop`: cancel it, wait for its end, and check for remaining processes."""
    from dtctl.launch import stop as stopping
    from dtctl.launch.records.state import read_run_state
    from dtctl.slurm.job_watcher import list_job_nodes
    from dtctl.slurm.leftover_processes import end_left_processes

    resolve_open_submission(record)
    if read_run_state(record).over and not read_run_state(record).job:
        if as_json:
            output.emit_json({"run": record.run, "left_behind": 0, "nodes": {}})
        else:
            output.print_stdout("0 processes left: Slurm never accepted the job")
        return 0
    if not stopping.request_launcher_stop(record, wait_s=CANCEL_LIMIT_S) and _is_job_unfollowed(record):
        with _open_job_follower(record) as follower:
            _cancel_and_wait(follower.site, follower.ref)
            follower.is_asked_to_stop = True
            _catch_up(follower)
            _record_job_end(follower, None)
    # This does not depend on the record: a launcher on another machine may follow the job, or the recorded end may be
    # wrong.
    with _open_job_site(record) as (site, ref):
        state = _cancel_and_wait(site, ref)
        processes_left = end_left_processes(
            site, ref.python, ref.job, state, sorted({*list_job_nodes(record), *state.nodes})
        )
    if as_json:
        if processes_left.total is None:  # the user needs the reason
            output.print_stderr(processes_left.describe())
        nodes = {node: "nobody could look" if count is None else count for node, count in processes_left.counts.items()}
        output.emit_json({"run": record.run, "left_behind": processes_left.total, "nodes": nodes})
    else:
        output.print_stdout(processes_left.describe())
    return 0


def _cancel_and_wait(site: CommandHost, ref: JobRef) -> JobFacts:
    """Cancel a job if it is not over, and wait for its end; return Slurm's facts about it afterwards.

    Raises:
        LaunchError: the job does not end, or Slurm does not answer.
    """
    from dtctl.slurm import remote_commands
    from dtctl.slurm.answers import JobStatus
    from dtctl.slurm.job_state import is_job_active
    from dtctl.slurm.job_watcher import cancel_job

    deadline, cancelled = time.monotonic() + CANCEL_LIMIT_S, False
    silent_until = time.monotonic() + SILENT_S
    while is_job_active(
        state := remote_commands.send_login_request(
            site, ref.python, JobStatus, job=ref.job, folder=ref.folder, urgent=True
        ).job
    ):
        if state.state == "UNKNOWN":
            if time.monotonic() > silent_until:
                raise LaunchError(
                    f"Slurm does not answer, and job {ref.job} may be running: {state.reason or 'no message'}",
                    where=site.name,
                    hint=f"is slurmctld up? try sinfo; then: scancel {ref.job}",
                )
        elif not cancelled:
            cancel_job(site, ref.job)
            cancelled = True
        elif time.monotonic() > deadline:
            raise LaunchError(
                f"job {ref.job} has not ended within {CANCEL_LIMIT_S:g} s",
                where=site.name,
                hint=f"scontrol show job {ref.job} shows what it waits for",
            )
        time.sleep(POLL_S)
    return state


@contextmanager
def _open_job_site(record: RunRecord) -> Iterator[tuple[CommandHost, JobRef]]:
    from dtctl.launch.run_spec import load_run_spec
    from dtctl.slurm.job_watcher import read_job_reference
    from dtctl.slurm.site import choose_slurm_host

    with closing(choose_slurm_host(load_run_spec(record))) as site:
        yield site, read_job_reference(record)


def _is_job_unfollowed(record: RunRecord) -> bool:
    """Return whether a job was submitted, has no recorded end, and has no launcher that follows it."""
    from dtctl.launch.records.state import read_run_state

    return bool(read_run_state(record).job) and not read_run_state(record).over and not record.has_launcher()


@contextmanager
def _open_job_follower(record: RunRecord) -> Iterator[JobWatcher]:
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.slurm.job_watcher import JobWatcher

    writer = RunWriter(record.folder)
    with _open_job_site(record) as (site, ref), writer.launcher_lock():
        yield JobWatcher(writer, ref, site, make_event_emitter(writer))


def _catch_up(follower: JobWatcher) -> bool:
    """Read what the job has written so far; return whether the job has ended for good."""
    from dtctl.slurm.job_backend import FIRST_POLL_S

    deadline = time.monotonic() + CATCH_UP_S
    follower.poll_job()
    while follower.slurm.is_over or (follower.has_more and time.monotonic() < deadline):
        if not follower.has_more:
            if follower.has_ended_finally:
                break
            time.sleep(FIRST_POLL_S)
        follower.poll_job()
    return follower.has_ended_finally


def _record_job_end(follower: JobWatcher, stopped_by: int | None) -> None:
    """Record the end of the job, if it has ended."""
    if follower.has_ended_finally:
        follower.emit(follower.result(stopped_by=stopped_by).to_event())


def _follow_job(record: RunWriter, site: CommandHost, emit: Emit, signals: list[int]) -> int:
    """Follow a job until its end; return the exit code."""
    from dtctl.launch.control.controller import run_backend_to_end
    from dtctl.slurm.job_backend import JobBackend

    return report_run_end(run_backend_to_end(JobBackend(record, site, emit, signals), signals), emit, record)
