"""Recovery of a job whose launcher ended during its submission, by a record that is written before."""

from __future__ import annotations

import time
from dataclasses import asdict, fields
from typing import Final

from dtctl import names
from dtctl.errors import LaunchError
from dtctl.launch.records.events import JobSubmitted, JobSubmitting, RunEnded
from dtctl.launch.records.record import RunRecord
from dtctl.slurm import remote_commands
from dtctl.slurm.answers import FoundJobs
from dtctl.slurm.arrays import format_task_id
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.site import CommandHost

SUBMISSION_S: Final = 30.0
"""Longest time until a submission that was begun appears in Slurm, in seconds."""
POLL_S: Final = 0.5


def build_submission_intent(ref: JobRef, site: str, *, index: int | None = None) -> JobSubmitting:
    """Return the event that is recorded before the job is submitted.

    Args:
        ref: the job, without a number.
        site: machine with Slurm's commands.
        index: index of the task, if the job is an array.
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


def is_before_submission(record: RunRecord) -> bool:
    """Return whether a run has not been submitted, has not ended, and has no planned submission."""
    return not any(isinstance(event, JobSubmitting | JobSubmitted | RunEnded) for event in record.events())


def build_unsubmitted_end(run: str) -> RunEnded:
    """Return the end of a run that never became a job of Slurm."""
    text = "its launcher ended before Slurm accepted the job"
    return RunEnded(run=run, status="failed", exit_code=LaunchError.exit_code, left_behind=0, error=text)


def find_submission_outcome(run: str, submitting: JobSubmitting, site: CommandHost) -> JobSubmitted | RunEnded:
    """Return the outcome of a submission: the job in Slurm, or the end of a run that never became a job.

    Raises:
        LaunchError: Slurm does not report the outcome.
    """
    index = submitting.index
    folders = [] if index is None else [str(index)]
    while True:
        jobs = remote_commands.send_login_request(
            site, submitting.python, FoundJobs, script=submitting.script, folders=folders
        ).jobs
        if jobs is None:
            raise LaunchError("Slurm does not report whether it has the job of this run", where=site.name)
        if jobs or time.time() - (submitting.time or 0.0) > SUBMISSION_S:
            break
        time.sleep(POLL_S)  # the submission that the launcher had begun may still be under way
    if not jobs:
        return build_unsubmitted_end(run)
    keys = [field.name for field in fields(JobSubmitted) if field.name not in ("job", "time")]
    job = jobs[-1] if index is None else format_task_id(jobs[-1], index)
    return JobSubmitted(job=job, **{name: getattr(submitting, name) for name in keys})
