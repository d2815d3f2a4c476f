"""Argument RUN of `status`, `logs`, `watch` and `stop`: a name, the number of a job, or none for the current run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dtctl import names
from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord

NUMBER: Final = re.compile(r"\d{1,18}(_\d{1,9})?\Z")


def name_run(run: str | None) -> str | None:
    """Return the name of the run that a command is about; None if the folder has no run.

    Args:
        run: name of a run or number of a job. None: the newest run that is running, else the newest.

    Raises:
        LaunchError: the folder has neither such a run nor such a job.
    """
    if run is None:
        return _name_current_run()
    if not NUMBER.match(run) or (Path.cwd() / names.STATE_DIR / names.RUNS_DIR / run).exists():
        return run
    from dtctl.slurm.job_number import find_run_of_job

    return find_run_of_job(Path.cwd(), run).run


def list_running() -> Iterator[RunRecord]:
    """Yield the runs of this folder that are running, the newest first."""
    from dtctl.errors import DtctlError
    from dtctl.launch.records.record import list_run_records
    from dtctl.launch.records.state import is_launcher_alive, read_run_state

    for record in reversed(list_run_records(Path.cwd())):
        info = record.info()
        # This check comes first: reading events takes longer, and a folder may have hundreds of runs.
        if not (info.slurm or is_launcher_alive(info)):
            continue
        if info.slurm and not read_run_state(record).over:
            from dtctl.cli.common.slurm_runs import update_job_record

            with contextlib.suppress(DtctlError):  # Slurm may not answer; the record is then the only source
                update_job_record(record)
        if not read_run_state(record).over:
            yield record


def _name_current_run() -> str | None:
    """Return the newest run if its end is not recorded, else the newest that is running, else the newest."""
    from dtctl.launch.records.record import list_run_records
    from dtctl.launch.records.state import read_run_state

    records = list_run_records(Path.cwd())
    if not records:
        return None
    newest = records[-1]
    # The launcher of a newest run without an end may be gone while the run continues on its nodes.
    if not newest.info().slurm and read_run_state(newest).done is None:
        return newest.run
    chosen = next(list_running(), newest)
    if chosen.run != newest.run:
        output.print_stderr(f"{chosen.run} is running; {newest.run}, the newest, has ended", "dim")
    return chosen.run
