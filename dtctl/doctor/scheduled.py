"""What Slurm says of the job that this process is in."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from typing import Final

LIMIT_S: Final = 5.0
"""A controller that is busy answers late; nobody waits for it longer than this."""


def job_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The fields of `scontrol show job`, by Slurm's names; none outside a job, or if Slurm does not answer in time."""
    number = environ.get("SLURM_JOB_ID")
    if not number:
        return {}
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", "-o", number], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    first = done.stdout.splitlines()[:1]
    return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", first[0])) if first and done.returncode == 0 else {}
