"""`dtctl take-up`: be the launcher of a kept run whose own is gone. People call `dtctl watch`, which calls this."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord


def take_up(folder: Annotated[Path, typer.Argument(help="Folder of the run.")]) -> int:
    """Watch a run that continues by itself, and restart its workers when they fail, until it is over."""
    from dtctl.cli.common.launcher import caught_signals, emitter, finish
    from dtctl.launch.assemble import attempt_of_run, job_of_run
    from dtctl.launch.control.run import launch
    from dtctl.launch.records.events import TakenUp
    from dtctl.launch.records.ledger import Ledger
    from dtctl.launch.records.record import RunRecord
    from dtctl.launch.records.state import state_of
    from dtctl.node_facts import boot_id, start_ticks

    record = RunRecord(folder)
    if record.info().slurm:
        from dtctl.cli.common.launch_slurm import take_up_job

        return take_up_job(record)
    with record.launcher_lock():
        if state_of(record).done is not None:
            return 0  # somebody else was quicker, and it is over by now
        info = record.info()
        job = job_of_run(record)
        under_way = attempt_of_run(record, job)

        emit = emitter(record)
        record.write_info(replace(info, pid=os.getpid(), pid_started=start_ticks(os.getpid()), boot=boot_id()))
        emit(TakenUp(attempt=under_way.attempt, pid=os.getpid()))
        ledger = Ledger(time.monotonic, begun=time.monotonic() - (time.time() - info.started), phase="run")
        with caught_signals() as signals:
            result = launch(job, record, emit=emit, signals=signals, ledger=ledger, under_way=under_way)
        return finish(result, emit, record)


def take_up_if_alone(record: RunRecord) -> None:
    """Give a kept run a launcher if it has none.

    Raises:
        LaunchError: it has none and cannot be given one.
    """
    from dtctl.errors import LaunchError
    from dtctl.launch.background import OUTPUT_FILE, take_up_in_background
    from dtctl.launch.records.state import state_of

    if record.info().slurm:
        if state_of(record).over or record.has_launcher():
            return
    elif state_of(record).status != "abandoned" or not record.info().detached or not record.plan():
        return
    else:
        output.err(f"the launcher of run {record.run} has ended; starting a new one", "yellow")
    problem = take_up_in_background(record)
    if problem:
        raise LaunchError(
            f"the run could not be resumed: {problem.removeprefix('error: ')}",
            where=str(record.folder / OUTPUT_FILE),
            hint="`dtctl stop` ends the remaining processes",
        )
