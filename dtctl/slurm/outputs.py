"""Outputs of a job, counted where its files are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtctl.errors import LaunchError, TransportError
from dtctl.launch.records.events import Outputs
from dtctl.slurm import login_client
from dtctl.slurm.answers import OutputsCounted
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.site import Site
from dtctl.supervisor import work


def count_outputs(site: Site, ref: JobRef, paths: Sequence[str]) -> dict[str, Outputs]:
    """Return the outputs of a job by the name of the machine that sees them; empty where they cannot be counted.

    Args:
        site: where Slurm's commands are.
        ref: the job.
        paths: of its working folder, which are worth keeping; nothing: all that it has written.
    """
    try:
        there = login_client.ask(site, ref.python, OutputsCounted, folder=ref.folder, paths=list(paths))
    except (LaunchError, TransportError):  # it changes nothing about how the run ended
        return {}
    folder = str(Path(ref.folder) / work.FOLDER)
    return {site.name: Outputs(folder=folder, files=there.files, bytes=there.bytes)}
