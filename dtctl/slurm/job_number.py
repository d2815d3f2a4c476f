"""Jobs whose batch file was submitted by hand: they are found by their number, and then become runs of the folder."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from dtctl import folders, names
from dtctl.errors import LaunchError
from dtctl.launch.cluster import build_first_plan, resolve_cluster
from dtctl.launch.records.events import JobSubmitted, RunPlanned
from dtctl.launch.records.record import RunInfo, RunRecord, check_no_link, list_run_records
from dtctl.launch.records.run_writer import RunWriter
from dtctl.launch.records.state import read_run_progress
from dtctl.slurm.job_control import CONTROL_FOLDER
from dtctl.slurm.site import choose_slurm_host
from dtctl.slurm.submit import choose_site_python
from dtctl.spec.load import parse_spec
from dtctl.spec.model import Spec

SLURM_FOLDER: Final = "slurm"
"""Folder below dtctl's state that has a folder for each batch file, with one for each of its jobs."""
SPEC_BYTES: Final = 4 << 20


def find_run_of_job(base_dir: Path, number: str) -> RunRecord:
    """Return the run of a Slurm job; a job that was submitted by hand becomes a run of the folder.

    Args:
        base_dir: folder where the job was launched, or its batch file was written.
        number: number of the job, or NUMBER_INDEX of a task of an array.

    Raises:
        LaunchError: no job of this number belongs to the folder.
    """
    for record in list_run_records(base_dir):
        submitted = read_run_progress(record).job if record.info().slurm else None
        if submitted is not None and submitted.job == number:
            return record
    check_no_link(base_dir, SLURM_FOLDER)
    files = sorted((base_dir / names.STATE_DIR / SLURM_FOLDER).glob(f"*/{names.RUN_SPEC_FILE}"))
    made = [path.parent for path in files if not path.parent.is_symlink()]
    if tasks := sorted(path.name for folder in made for path in folder.glob(f"{number}_*")):
        raise LaunchError(
            f"job {number} is an array, each task of which is a run: {', '.join(tasks)}",
            where=str(base_dir),
            hint=f"name a task; all of them end with: scancel {number}",
        )
    for folder in made:
        if (folder / number).is_dir():
            return _record_job_run(base_dir, folder, number)
    for folder in reversed(made):
        if _is_waiting(base_dir, folder, number):
            return _record_job_run(base_dir, folder, number)
    raise LaunchError(
        f"no job {number} was launched from this folder, nor is it of a batch file that `dtctl sbatch` wrote here",
        where=str(base_dir),
        hint="call it in the folder of the job's spec; `dtctl runs` lists its runs",
    )


def _read_job_spec(base_dir: Path, folder: Path) -> Spec:
    path = folder / names.RUN_SPEC_FILE
    try:
        text = folders.read_regular(str(path), SPEC_BYTES).decode(errors="replace")
    except OSError as exc:
        raise LaunchError(f"the copy of the job's spec cannot be read: {exc.strerror}", where=str(path)) from exc
    return parse_spec(text, source=str(path), base_dir=base_dir, is_of_run=True)


def _is_waiting(base_dir: Path, folder: Path, number: str) -> bool:
    """Return whether Slurm has a job that waits and was submitted from this batch file, by the path of its output."""
    with closing(choose_slurm_host(_read_job_spec(base_dir, folder))) as site:
        told = site.run(["scontrol", "show", "job", "-o", number]).out
    return f"/{folder.name}-" in told or f"/{folder.name}/" in told


def _record_job_run(base_dir: Path, folder: Path, number: str) -> RunRecord:
    """Record a job as a run, which users can then follow, read and stop like a run of `dtctl launch`."""
    spec, run = _read_job_spec(base_dir, folder), f"{folder.name}.{number}"
    plan = build_first_plan(spec, resolve_cluster(spec, start=False), run=run)
    started = _read_job_start(folder / number)
    info = RunInfo(
        run=run, token="", pid=os.getpid(), started=started, spec="", command=[], detached=True, slurm=True
    )  # fmt: skip
    with closing(choose_slurm_host(spec)) as site:
        submitted = JobSubmitted(
            job=number,
            site=site.name,
            folder=str(folder / number),
            python=choose_site_python(spec, site),
            workers_apart=plan.per_worker,
            slots=plan.head.slots,
            max_attempts=plan.max_restarts,
        )
    record = RunWriter.create(base_dir, info)
    record.write_spec((folder / names.RUN_SPEC_FILE).read_text())
    record.write_plan(plan)
    record.append_event(RunPlanned(time=info.started, run=run, kind=plan.kind, world_size=plan.world_size))
    record.append_event(submitted)
    return record


def _read_job_start(folder: Path) -> float:
    """Return the start of a job, by the first event of its launcher; the current time if it has none."""
    try:
        with (folder / CONTROL_FOLDER / names.EVENTS_FILE).open(encoding="utf-8") as file:
            return float(json.loads(file.readline())["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return time.time()
