"""Giving a batch file to Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from dtctl.errors import LaunchError
from dtctl.launch.tree import Tree
from dtctl.supervisor.receive import LINK_MODE

LIMIT_S = 60.0


def require() -> None:
    """See that Slurm's commands are here.

    Raises:
        LaunchError: they are not.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "there is no sbatch on this machine",
            hint="submit from a login node of the cluster; without --submit, the file is only written",
        )


def submit(file: Path) -> str:
    """Submit a batch file. Returns the id of the job.

    Raises:
        LaunchError: Slurm refuses it, in Slurm's words; or does not answer.
    """
    require()
    # First only to try: Slurm takes a job that can never start, for more nodes than there are, and lets it wait.
    _sbatch("--test-only", file)
    # Parsable: the id alone, and `;cluster` where several clusters are known.
    return _sbatch("--parsable", file).strip().partition(";")[0]


def _sbatch(option: str, file: Path) -> str:
    try:
        done = subprocess.run(
            ["sbatch", option, str(file)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"sbatch has not answered within {LIMIT_S:g} s", hint="is slurmctld up? try sinfo") from None
    if done.returncode:
        said = [re.sub(r"^(sbatch: |error: |allocation failure: )+", "", line) for line in done.stderr.splitlines()]
        words = "; ".join(line for line in said if line)
        raise LaunchError(f"Slurm refuses the job: {words or 'without a word'}", where=str(file))
    return done.stdout


def copy(tree: Tree, folder: Path) -> None:
    """Put a copy of a tree into a new folder, readable for its owner alone.

    Raises:
        OSError: it cannot be read or written.
    """
    folder.mkdir(mode=0o700, parents=True)
    for entry in tree.files:
        target = folder / os.fsdecode(entry.path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if entry.mode == LINK_MODE:
            target.symlink_to(os.fsdecode(entry.link))
        else:
            shutil.copyfile(tree.root / os.fsdecode(entry.path), target)
            target.chmod(entry.mode)
