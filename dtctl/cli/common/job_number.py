"""`status`, `logs`, `watch` and `stop` of a job of Slurm by its number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from dtctl import names

NUMBER: Final = re.compile(r"\d{1,18}(_\d{1,9})?\Z")


def name_run(run: str | None) -> str | None:
    """Return the name of the run that a command is about, where its user has given the number of a job.

    Raises:
        LaunchError: the folder has neither such a run nor such a job.
    """
    if run is None or not NUMBER.match(run) or (Path.cwd() / names.STATE_DIR / names.RUNS_DIR / run).exists():
        return run
    from dtctl.slurm.job_number import find_run_of_job

    return find_run_of_job(Path.cwd(), run).run
