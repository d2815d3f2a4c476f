"""Number and size of a job's outputs, counted on the machine that has the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtctl.errors import LaunchError, TransportError
from dtctl.launch.records.events import NodeOutputs
from dtctl.slurm import remote_commands
from dtctl.slurm.answers import OutputCount
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.site import CommandHost
from dtctl.supervisor import run_workdir


def count_outputs(site: CommandHost, ref: JobRef, paths: Sequence[str]) -> dict[str, NodeOutputs]:
    """Return the outputs of a job by the name of the machine that sees them; empty if they cannot be counted.

    Args:
        site: machine with Slurm's commands.
        ref: the job.
        paths: paths in the working folder that are worth keeping; empty: all files that the job has written.
    """
    try:
        there = remote_commands.send_login_request(site, ref.python, OutputCount, folder=ref.folder, paths=list(paths))
    except (LaunchError, TransportError):  # a missing count does not change the result of the run
        return {}
    folder = str(Path(ref.folder) / run_workdir.FOLDER)
    return {site.name: NodeOutputs(folder=folder, files=there.files, bytes=there.bytes)}
