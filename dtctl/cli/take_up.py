"""`dtctl take-up`: become the launcher of a kept run that has lost its own. `dtctl watch` calls this for the user."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord


def take_up(folder: Annotated[Path, typer.Argument(help="Folder of the run.")]) -> int:
    """Watch a run that continues by itself, and restart its workers when they fail, until it is over."""
    from dtctl.cli.common import followed_run
    from dtctl.launch.control.run import run_launch_job
    from dtctl.launch.job_builder import rebuild_run_attempt, rebuild_run_job
    from dtctl.launch.records.ledger import Ledger
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.launch.records.state import read_run_state
    from dtctl.launch.run_spec import load_run_spec

    record = RunWriter(folder)
    record.check_no_link()
    if record.info().slurm:
        from dtctl.cli.common.slurm_runs import take_up_job

        return take_up_job(record)
    with record.launcher_lock():
        if read_run_state(record).done is not None:
            return 0  # another launcher was faster, and the run has ended
        job = rebuild_run_job(record)
        under_way = rebuild_run_attempt(record, job)
        emit = followed_run.take_over_run(record, attempt=under_way.attempt)
        begun = time.monotonic() - (time.time() - record.info().started)
        ledger = Ledger(time.monotonic, begun=begun, phase="run")
        with followed_run.send_run_metrics(load_run_spec(record), record, emit):
            with followed_run.catch_stop_signals() as signals:
                result = run_launch_job(job, record, emit=emit, signals=signals, ledger=ledger, under_way=under_way)
            return followed_run.report_run_end(result, emit, record)


def take_up_if_alone(record: RunRecord) -> None:
    """Start a launcher for a kept run that has none.

    Raises:
        LaunchError: the run has no launcher, and none can be started.
    """
    from dtctl.errors import LaunchError
    from dtctl.launch.background import OUTPUT_FILE, take_up_in_background
    from dtctl.launch.records.state import read_run_state

    if record.info().slurm:
        if read_run_state(record).over or record.has_launcher():
            return
    elif read_run_state(record).status != "unattended" or not record.plan():
        return
    else:
        output.print_stderr(f"the launcher of run {record.run} has ended; starting a new one", "yellow")
    problem = take_up_in_background(record)
    if problem:
        raise LaunchError(
            f"the run could not be resumed: {problem.removeprefix('error: ')}",
            where=str(record.folder / OUTPUT_FILE),
            hint="`dtctl stop` ends the remaining processes",
        )
