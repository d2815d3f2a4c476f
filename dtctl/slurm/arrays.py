"""Job arrays: the indexes of their tasks, and the names of the tasks. Each task is a run of its own. Pure."""

from __future__ import annotations

import re
from typing import Final

from dtctl.errors import PlanError

MOST: Final = 10_000
"""Largest number of tasks of one array. dtctl keeps a record of each task."""
_PART: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?\Z")


def parse_array_indexes(text: str, *, where: str) -> list[int]:
    """Return the indexes of `0-9:3,12%2` in rising order. The number after `%` limits the tasks that run at once.

    Args:
        text: value of sbatch's `--array`.
        where: place of the text, for messages.

    Raises:
        PlanError: the text is not a list of task indexes, or has more than 10,000 tasks.
    """
    numbers: set[int] = set()
    for part in re.sub(r"%\d+\Z", "", text).split(","):
        match = _PART.match(part)
        if match is None:
            raise _build_array_error(text, where)
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step == 0:
            raise _build_array_error(text, where)
        if (last - first) // step >= MOST:
            raise _too_many(where)
        numbers.update(range(first, last + 1, step))
    if len(numbers) > MOST:
        raise _too_many(where)
    return sorted(numbers)


def _build_array_error(text: str, where: str) -> PlanError:
    return PlanError(f"{text!r} does not name the tasks of an array", where=where, hint="for example 0-9%2")


def _too_many(where: str) -> PlanError:
    return PlanError(f"an array of more than {MOST:,} tasks is more than dtctl follows", where=where)


def run_of_task(run: str, index: int) -> str:
    """Return the run id of a task."""
    return f"{run}.{index}"


def format_task_id(job: str, index: int) -> str:
    """Return the job id of a task in the form that Slurm's commands accept at any time."""
    return f"{job}_{index}"
