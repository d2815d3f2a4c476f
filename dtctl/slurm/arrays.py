"""Job arrays: which tasks one has, and what a task is called. Each is a run of its own. Pure."""

from __future__ import annotations

import re
from typing import Final

from dtctl.errors import PlanError

MOST: Final = 10_000
"""Tasks of one array that dtctl keeps a record of each of."""
_PART: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?\Z")


def indexes(text: str, *, where: str) -> list[int]:
    """Return the indexes of `0-9:3,12%2`, in rising order; behind `%` stands how many may run at once.

    Args:
        text: as sbatch takes it.
        where: place of the text, for messages.

    Raises:
        PlanError: it is not that, or more than 10,000.
    """
    numbers: set[int] = set()
    parts = [_PART.match(part) for part in re.sub(r"%\d+\Z", "", text).split(",")]
    for part in parts:
        first, last, step = (int(field or 0) for field in part.groups()) if part else (1, 0, 0)
        last = last if part and part[2] else first
        if part is None or last < first or (part[3] and not step):
            raise PlanError(f"{text!r} does not name the tasks of an array", where=where, hint="for example 0-9%2")
        if (last - first) // (step or 1) >= MOST:
            raise _too_many(where)
        numbers.update(range(first, last + 1, step or 1))
    if len(numbers) > MOST:
        raise _too_many(where)
    return sorted(numbers)


def _too_many(where: str) -> PlanError:
    return PlanError(f"an array of more than {MOST:,} tasks is more than dtctl follows", where=where)


def run_of_task(run: str, index: int) -> str:
    """Return the run that a task is."""
    return f"{run}.{index}"


def job_of_task(job: str, index: int) -> str:
    """Return the job of a task, by the name that Slurm's commands accept at any time."""
    return f"{job}_{index}"
