"""Common part of the commands that launch or follow a run: its signals, its events, and its last lines."""

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

if TYPE_CHECKING:
    from pathlib import Path

    from dtctl.cli.common.run_display import LaunchView
    from dtctl.launch.control.controller import Result
    from dtctl.launch.records.events import Emit, Event, Outputs, RunEnded
    from dtctl.launch.records.record import RunRecord
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.spec.model import Spec


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Signals that ask to stop are written down, for the launcher to act upon between two messages."""
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


def emitter(record: RunWriter, view: LaunchView | None = None, *, json_lines: bool = False) -> Emit:
    """Passes every event to the record, to JSON output and to the terminal, from any thread; the last is the end."""
    from dtctl.launch.records.events import Note, RunEnded

    lock = threading.Lock()
    over = False

    def emit(event: Event) -> None:
        nonlocal over
        with lock:
            if over:
                if isinstance(event, Note):
                    output.err(event.text, "dim")
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
def measured(spec: Spec, record: RunRecord, emit: Emit) -> Iterator[None]:
    """Send figures of the run to the receivers in section `metrics` of its spec, if it has one, while the body runs."""
    if spec.metrics is None:
        yield
        return
    from dtctl.launch.records.events import Note
    from dtctl.metrics.beside import Beside

    beside = None
    try:
        beside = Beside(record, emit)
    except OSError as exc:  # no process, no disk: the run is worth more
        emit(Note(text=f"metrics are not sent: {exc.strerror}"))
    try:
        yield
    finally:
        if beside is not None:
            beside.finish()


def create_run(
    spec: Spec,
    run: str,
    *,
    spec_name: str,
    detached: bool,
    token: str = "",
    snapshots: Mapping[str, str] | None = None,
    slurm: bool = False,
    started: float | None = None,
    sweep: Mapping[str, str] | None = None,
    environment: str = "",
) -> RunWriter:
    """Return the folder of a new run with this process as its launcher; see `RunInfo` for the arguments.

    It began when this process did, unless `started` is given.

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
        boot=node_facts.boot_id(),
        started=node_facts.launch_time() if started is None else started,
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


def take_up(record: RunWriter, *, attempt: int | None = None) -> Emit:
    """Become the launcher of a run of another process, with its lock held; return the receiver of its events."""
    from dtctl.launch.records.events import TakenUp

    pid = os.getpid()
    mine = replace(record.info(), pid=pid, pid_started=node_facts.start_ticks(pid), boot=node_facts.boot_id())
    with contextlib.suppress(OSError):
        record.reserve()
    record.write_info(mine)
    emit = emitter(record)
    emit(TakenUp(attempt=attempt, pid=pid))
    return emit


def finish(result: Result, emit: Emit, record: RunWriter) -> int:
    """Report how the run ended, with the cause if its logs show one; return the exit code."""
    emit(result.to_event())
    if result.status == "failed":  # the cause first, then what was printed, which may be long
        from dtctl.cli.common.doctor_view import show_cause

        show_cause(record.folder / names.LOGS_DIR, result.first_failure)
        _show_left_out(record, result)
    show_end(result)
    if record.lost_events:
        output.err(
            f"{record.lost_events} events of the run could not be written into {record.folder}: what `dtctl status`, "
            "`runs` and `report` say of it lacks them",
            "red",
        )
    if result.exit_code == names.REQUEUE_EXIT or (result.status == "stopped" and has_snapshot(record)):
        _show_continuation(record)
    return result.exit_code


def _show_left_out(record: RunRecord, result: Result) -> None:
    """Files that the program missed and that lie here, with the rule that kept them from being sent."""
    from dtctl.launch.assemble import spec_of_run
    from dtctl.launch.files.missing import left_out_here

    if result.first_failure is None or not (spec := spec_of_run(record)).pushes:
        return
    folders = {*record.code_folders().values(), f"/runs/{record.run}/work"}
    for file in left_out_here(result.first_failure.tail, spec, folders=folders):
        output.err(f"{file.path} was not sent to the nodes: {file.rule} leaves it out", "bold")
        output.err(f"  fix: job.files.include: [{file.path}]")


def has_snapshot(record: RunRecord) -> bool:
    """Return whether workers have reported a snapshot."""
    from dtctl.launch.records.events import SnapshotBegun

    return any(isinstance(event, SnapshotBegun) for event in record.events())


def _show_continuation(record: RunRecord) -> None:
    """Show the command that continues where a run was stopped, by what the run has saved."""
    from dtctl.launch.assemble import spec_of_run
    from dtctl.launch.continuation import command, shared_folder

    folder = shared_folder(record)
    if not has_snapshot(record):
        spec = spec_of_run(record)
        keeps = spec.train is None and bool(spec.job.outputs or spec.job.shared)
        again = f"`{command(record.run)}` starts in its outputs" if keeps else "the next launch starts over"
        output.err(f"it has reported no snapshot: {again}")
    elif folder is not None:
        output.err(f"the next `dtctl launch` continues from the newest good snapshot in {folder}, if there is one")
    else:
        output.err(
            f"to continue from its newest good snapshot: {command(record.run)}  (without --resume it starts over)"
        )


def outputs_line(run: str, outputs: Mapping[str, Outputs], *, is_local: bool, fetched: Path | None = None) -> str:
    """Place of a run's outputs, and the command that brings them here; empty when there are none.

    Args:
        run: its name.
        outputs: by node.
        is_local: whether they are on this machine already.
        fetched: folder that `dtctl fetch` puts them into by default.
    """
    there = {node: each for node, each in outputs.items() if each.files}
    if not there:
        return ""
    files, size = sum(each.files for each in there.values()), sum(each.bytes for each in there.values())
    amount = f"{files:,} {'file' if files == 1 else 'files'}, {output.size(size)}"
    if is_local:
        return f"outputs: {amount} in {next(iter(there.values())).folder}"
    if fetched is not None and all((fetched / node).is_dir() for node in there):
        return f"outputs: {amount} on {', '.join(there)}; fetched into {fetched}"
    return f"outputs: {amount} on {', '.join(there)}; `dtctl fetch {run}` brings them here"


def failure_lines(end: RunEnded) -> list[str]:
    """Return the lines with the cause of a run's failure; empty if it has not failed."""
    from dtctl.launch.records.events import subject_of

    failure = end.first_failure
    if failure is None:
        return [f"why: {end.error}"] if end.status == "failed" and end.error else []
    subject = subject_of(failure.node, failure.rank, failure.exit_code)
    code = None if failure.exit_code is None else f"exit code {failure.exit_code}"
    ended = code if failure.signal is None else f"signal {failure.signal}"
    log = [f"log: {failure.log}"] if failure.log else []
    return [f"first failure: {subject}{f' ({ended})' if ended else ''}: {failure.summary}", *log]


def show_end(result: Result) -> None:
    """Print the last lines for the user: how it ended, which worker caused it, and that nothing is left."""
    from dtctl.launch.control.failure import describe
    from dtctl.launch.records.events import subject_of

    failure = result.first_failure
    if failure is not None:
        subject = subject_of(failure.node, failure.rank, failure.exit_code)
        output.err(f"first failure: {subject} {describe(failure)}", "red", "bold")
        for line in failure.tail:
            output.err(f"  | {line}")
        if failure.summary and (failure.exit_code is None or not failure.tail):
            output.err(f"  | {failure.summary}")
        if failure.log:
            output.err(f"  log: {failure.log}")
    colour = {"succeeded": "green", "failed": "red"}.get(result.status, "yellow")
    attempts = f" in {result.attempts} attempts" if result.attempts > 1 else ""
    goodput = f", {result.goodput:.0%} of it spent on useful steps" if result.goodput is not None else ""
    output.err(f"{result.status} after {result.duration_s:.1f} s{attempts}{goodput}", colour, "bold")
    for node, lost in sorted(result.lost_output.items()):
        output.err(
            f"output lost: {lost:,} bytes from {node} could not be stored on this machine; "
            "what its own disk took is there",
            "red",
            "bold",
        )
    for node, cut in sorted(result.cut_output.items()):
        least = "at least " if node in result.lost_output or result.left_behind is None else ""
        limit = f"{result.log_mib} MiB a rank (job.log_mib)"
        output.err(f"output of {node} was cut to {limit}: {least}{cut:,} bytes are left out", "yellow")
    if line := outputs_line(result.run, result.outputs, is_local=result.is_local):
        output.err(line)
    if result.left_behind is None:
        output.err("a node could not be checked for remaining processes; `dtctl stop` checks again", "red")
    else:
        nodes = "1 node" if result.nodes == 1 else f"{result.nodes} nodes"
        output.err(f"{result.left_behind} processes left on {nodes}")
