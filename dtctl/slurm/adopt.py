"""Recovery of a job whose launcher ended around its submission, by a record that is written before."""

from __future__ import annotations

import time
from dataclasses import asdict, fields
from typing import Final

from dtctl import names
from dtctl.errors import LaunchError
from dtctl.launch.records.events import JobSubmitted, JobSubmitting, RunEnded
from dtctl.launch.records.record import RunRecord
from dtctl.slurm import login_client
from dtctl.slurm.answers import JobFound
from dtctl.slurm.arrays import job_of_task
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.site import Site

SUBMISSION_S: Final = 30.0
"""Seconds that a submission that was begun may take to be seen."""
POLL_S: Final = 0.5


def intent(ref: JobRef, site: str, *, index: int | None = None) -> JobSubmitting:
    """Return what is written down before Slurm is asked.

    Args:
        ref: the job, without a number.
        site: where Slurm's commands are.
        index: of the task, where the job is an array.
    """
    facts = {key: value for key, value in asdict(ref).items() if key not in ("job", "folder")}
    folder = ref.folder if index is None else f"{ref.folder}/{index}"
    return JobSubmitting(script=f"{ref.folder}/{names.BATCH_FILE}", index=index, site=site, folder=folder, **facts)


def open_intent(record: RunRecord) -> JobSubmitting | None:
    """Return the planned submission, if no event records its outcome."""
    intent: JobSubmitting | None = None
    for event in record.events():
        if isinstance(event, JobSubmitted | RunEnded):
            return None
        if isinstance(event, JobSubmitting):
            intent = event
    return intent


def begins(record: RunRecord) -> bool:
    """Return whether a run has neither been submitted nor ended, nor was about to be submitted."""
    return not any(isinstance(event, JobSubmitting | JobSubmitted | RunEnded) for event in record.events())


def never(run: str) -> RunEnded:
    """Return the end of a run that Slurm never had."""
    text = "its launcher ended before Slurm had the job"
    return RunEnded(run=run, status="failed", exit_code=LaunchError.exit_code, left_behind=0, error=text)


def outcome(run: str, submitting: JobSubmitting, site: Site) -> JobSubmitted | RunEnded:
    """Return the outcome of a submission: the job that Slurm has, or the end of a run that never became a job.

    Raises:
        LaunchError: Slurm does not report it.
    """
    index = submitting.index
    folders = [] if index is None else [str(index)]
    while True:
        jobs = login_client.ask(site, submitting.python, JobFound, script=submitting.script, folders=folders).jobs
        if jobs is None:
            raise LaunchError("Slurm does not say whether it has the job of this run", where=site.name)
        if jobs or time.time() - (submitting.time or 0.0) > SUBMISSION_S:
            break
        time.sleep(POLL_S)  # what the launcher had begun may still be under way
    if not jobs:
        return never(run)
    keys = [field.name for field in fields(JobSubmitted) if field.name not in ("job", "time")]
    job = jobs[-1] if index is None else job_of_task(jobs[-1], index)
    return JobSubmitted(job=job, **{name: getattr(submitting, name) for name in keys})
