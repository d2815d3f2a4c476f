"""Common part of the commands that launch or follow a run: signals, events, and the last lines."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from dtctl import names, node_facts
from dtctl.cli import output
from dtctl.printable import format_count

if TYPE_CHECKING:
    from pathlib import Path

    from dtctl.cli.common.run_display import LaunchView
    from dtctl.launch.control.controller import Result
    from dtctl.launch.files.environment import EnvironmentPush
    from dtctl.launch.records.events import Emit, Event, NodeOutputs, RunEnded
    from dtctl.launch.records.record import RunRecord
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.spec.model import Spec


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Collect signals that request a stop in a list, which the launcher reads between two messages."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_event_emitter(record: RunWriter, view: LaunchView | None = None, *, json_lines: bool = False) -> Emit:
    """Return a function that passes each event to the record, to JSON output and to the terminal.

    Any thread may call the function. Events after the end of the run are ignored, except for notes.
    """
    from dtctl.launch.records.events import Note, RunEnded

    lock = threading.Lock()
    over = False

    def emit(event: Event) -> None:
        nonlocal over
        with lock:
            if over:
                if isinstance(event, Note):
                    output.print_stderr(event.text, "dim")
                return
            over = isinstance(event, RunEnded)
            pass_on(event)

    def pass_on(event: Event) -> None:
        if event.recorded:
            record.append_event(event)
            if json_lines:
                output.emit_json(event.to_json())
        if view is not None:
            view.event(event)

    return emit


@contextmanager
def send_run_metrics(spec: Spec, record: RunRecord, emit: Emit) -> Iterator[None]:
    """Send figures of the run to the receivers in section `metrics` of its spec, if it has one, during the context."""
    if spec.metrics is None:
        yield
        return
    from dtctl.launch.records.events import Note
    from dtctl.metrics.metrics_process import MetricsProcess

    beside = None
    try:
        beside = MetricsProcess(record, emit)
    except OSError as exc:  # without a process or disk space for metrics, the run itself can continue
        emit(Note(text=f"metrics are not sent: {exc.strerror}"))
    try:
        yield
    finally:
        if beside is not None:
            beside.finish()


def build_environment_push(spec: Spec) -> EnvironmentPush | None:
    """Return the push of a job's environment, whose lock is made if it is missing; None without an environment."""
    if spec.job.environment is None:
        return None
    from dtctl.launch.files.environment import EnvironmentPush, lock_environment

    try:
        locked = lock_environment(spec, write=True, report=output.set_status_line)
    finally:
        output.set_status_line("")
    output.print_stderr(f"environment: {locked.short_summary}{'; its lock was made' if locked.is_new else ''}")
    if locked.doubt:
        output.print_stderr(f"warning: {locked.doubt}", "yellow")
    return EnvironmentPush(spec, locked)


def create_run(
    spec: Spec,
    run: str,
    *,
    spec_name: str,
    detached: bool,
    token: str = "",
    snapshots: Mapping[str, str] | None = None,
    slurm: bool = False,
    begun: float | None = None,
    sweep: Mapping[str, str] | None = None,
    environment: str = "",
) -> RunWriter:
    """Create the folder of a new run, with this process as its launcher; see `RunInfo` for the arguments.

    The run's start is that of this process, unless `begun` is given, a time on the monotonic clock.

    Raises:
        LaunchError: a run of this name exists, or the folder cannot be written to.
    """
    from dtctl.launch import trust
    from dtctl.launch.cluster import choose_client
    from dtctl.launch.records.record import RunInfo
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.spec.load import dump_spec

    info = RunInfo(
        run=run,
        token=token,
        pid=os.getpid(),
        pid_started=node_facts.start_ticks(os.getpid()),
        boot=node_facts.read_boot_id(),
        started=node_facts.launch_time() if begun is None else node_facts.convert_to_epoch_time(begun),
        spec=spec_name,
        command=sys.argv,
        detached=detached,
        slurm=slurm,
        snapshots=dict(snapshots or {}),
        sweep=dict(sweep or {}),
        environment=environment,
        ssh=choose_client(spec.cluster.ssh) if spec.cluster.transport == "ssh" else "",
    )
    record = RunWriter.create(spec.base_dir, info)
    trust.note_launch(token)
    record.write_spec(dump_spec(spec))
    return record


def take_over_run(record: RunWriter, *, attempt: int | None = None) -> Emit:
    """Make this process the launcher of another process's run, whose lock it holds; return the receiver of events."""
    from dtctl.launch.records.events import LauncherReattached

    pid = os.getpid()
    mine = replace(record.info(), pid=pid, pid_started=node_facts.start_ticks(pid), boot=node_facts.read_boot_id())
    with contextlib.suppress(OSError):
        record.reserve_disk_space()
    record.write_info(mine)
    emit = make_event_emitter(record)
    emit(LauncherReattached(attempt=attempt, pid=pid))
    return emit


def report_run_end(result: Result, emit: Emit, record: RunWriter) -> int:
    """Report the end of the run, with the cause if its logs show one; return the exit code."""
    emit(result.to_event())
    if result.status == "failed":  # the cause stands before the output, which may be long
        from dtctl.cli.common.doctor_view import show_cause

        known = ("missing-file", "hub-missing") if _show_left_out(record, result) else ()
        show_cause(record.folder / names.LOGS_DIR, result.first_failure, known=known)
    print_run_end(result)
    if record.lost_events:
        output.print_stderr(
            f"{record.lost_events} events of the run could not be written into {record.folder}: `dtctl status`, "
            "`runs` and `report` do not include them",
            "red",
        )
    if result.exit_code == names.REQUEUE_EXIT or (result.status == "stopped" and has_snapshot(record)):
        show_continuation(record)
    return result.exit_code


def _show_left_out(record: RunRecord, result: Result) -> bool:
    """Print the files that the program missed and that rules left out of the push; return whether there are any."""
    from dtctl.launch.files.missing import find_left_out_files
    from dtctl.launch.run_spec import load_run_spec

    if result.first_failure is None or not (spec := load_run_spec(record)).pushes:
        return False
    folders = {*record.read_code_folders().values(), f"/runs/{record.run}/work"}
    missing = find_left_out_files(result.first_failure.tail, spec, folders=folders)
    for file in missing:
        others = f", nor {'was 1 other file' if file.others == 1 else f'were {file.others} other files'} of its folder"
        output.print_stderr(
            f"cause: {file.path} was not sent to the nodes{others if file.others else ''}: {file.rule}", "bold"
        )
        output.print_stderr(
            f"  fix: job.files.include: [{file.include_pattern}], or job.data for data that seldom changes"
        )
    return bool(missing)


def has_snapshot(record: RunRecord) -> bool:
    """Return whether workers have reported a snapshot."""
    from dtctl.launch.records.events import SnapshotBegun

    return any(isinstance(event, SnapshotBegun) for event in record.events())


def show_continuation(record: RunRecord) -> None:
    """Print the command that continues a stopped run, depending on what the run has saved."""
    from dtctl.launch.continuation import (
        find_shared_snapshot_folder,
        format_resume_command,
        keeps_own_state,
        list_state_paths,
    )
    from dtctl.launch.run_spec import load_run_spec

    folder, spec = find_shared_snapshot_folder(record), load_run_spec(record)
    if not has_snapshot(record) and keeps_own_state(spec):
        paths = ", ".join(list_state_paths(spec))
        output.print_stderr(f"`{format_resume_command(record.run)}` starts with what its program has left in {paths}")
    elif not has_snapshot(record):
        output.print_stderr("it has reported no snapshot: the next launch starts over")
    elif folder is not None:
        output.print_stderr(
            f"the next `dtctl launch` continues from the newest good snapshot in {folder}, if there is one"
        )
    else:
        output.print_stderr(
            f"to continue from its newest good snapshot: {format_resume_command(record.run)}"
            "  (without --resume it starts over)"
        )


def format_outputs_line(
    run: str, outputs: Mapping[str, NodeOutputs], *, is_local: bool, fetched: Path | None = None
) -> str:
    """Return a line with the place of a run's outputs and the command to fetch them; empty if there are none.

    Args:
        run: name of the run.
        outputs: outputs by node.
        is_local: whether the outputs are on this machine already.
        fetched: default folder of `dtctl fetch` for them.
    """
    there = {node: each for node, each in outputs.items() if each.files}
    if not there:
        return ""
    files, size = sum(each.files for each in there.values()), sum(each.bytes for each in there.values())
    amount = f"{files:,} {'file' if files == 1 else 'files'}, {output.format_size(size)}"
    if is_local:
        return f"outputs: {amount} in {next(iter(there.values())).folder}"
    if fetched is not None and all((fetched / node).is_dir() for node in there):
        return f"outputs: {amount} on {', '.join(sorted(there))}; fetched into {fetched}"
    return f"outputs: {amount} on {', '.join(sorted(there))}; `dtctl fetch {run}` brings them here"


def format_failure_lines(end: RunEnded) -> list[str]:
    """Return the lines with the cause of a run's failure; empty if it has not failed."""
    from dtctl.launch.records.events import describe_failure_subject

    failure = end.first_failure
    if failure is None:
        return [f"why: {end.error}"] if end.status == "failed" and end.error else []
    subject = describe_failure_subject(failure.node, failure.rank, failure.exit_code, hang=failure.hang)
    code = None if failure.exit_code is None else f"exit code {failure.exit_code}"
    ended = code if failure.signal is None else f"signal {failure.signal}"
    log = [f"log: {failure.log}"] if failure.log else []
    return [f"first failure: {subject}{f' ({ended})' if ended else ''}: {failure.summary}", *log]


def print_run_end(result: Result) -> None:
    """Print the last lines of a run: its end, the worker that caused it, and the number of remaining processes."""
    from dtctl.launch.control.failure import describe_failure
    from dtctl.launch.records.events import describe_failure_subject

    failure = result.first_failure
    if failure is not None:
        subject = describe_failure_subject(failure.node, failure.rank, failure.exit_code, hang=failure.hang)
        output.print_stderr(f"first failure: {subject} {describe_failure(failure)}", "red", "bold")
        for line in failure.tail:
            output.print_stderr(f"  | {line}", fold=False)
        if failure.summary and (failure.exit_code is None or not failure.tail):
            output.print_stderr(f"  | {failure.summary}")
        if failure.log:
            output.print_stderr(f"  log: {failure.log}")
    colour = {"succeeded": "green", "failed": "red"}.get(result.status, "yellow")
    attempts = f" in {result.attempts} attempts" if result.attempts > 1 else ""
    goodput = f", {result.goodput:.0%} of it spent on useful steps" if result.goodput is not None else ""
    output.print_stderr(f"{result.status} after {result.duration_s:.1f} s{attempts}{goodput}", colour, "bold")
    for node, lost in sorted(result.lost_output.items()):
        output.print_stderr(
            f"output lost: {lost:,} bytes from {node} could not be stored on this machine; "
            "the node's own log has the part that its disk could store",
            "red",
            "bold",
        )
    for node, cut in sorted(result.cut_output.items()):
        least = "at least " if node in result.lost_output or result.left_behind is None else ""
        limit = f"{result.log_mib} MiB a rank (job.log_mib)"
        output.print_stderr(f"output of {node} was cut to {limit}: {least}{cut:,} bytes are left out", "yellow")
    if line := format_outputs_line(result.run, result.outputs, is_local=result.is_local):
        output.print_stderr(line)
    if result.left_behind is None:
        output.print_stderr("a node could not be checked for remaining processes; `dtctl stop` checks again", "red")
    else:
        nodes = format_count(result.nodes, "node")
        output.print_stderr(f"{format_count(result.left_behind, 'process', 'processes')} left on {nodes}")
