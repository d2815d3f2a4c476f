"""Output of the workers of a job in plain mode: files of tasks in the run's folder, which all nodes share."""

from __future__ import annotations

from collections.abc import Iterator

from dtctl.supervisor.frames import AGENT_FILE, parse_log_name
from dtctl.supervisor.worker_log import split_prefix

JOB_LOG = "job.log"
"""Output of the batch file and of srun, in the run's folder."""


def split_by_rank(file: str, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a task's file with their ranks; torchrun prefixes the lines of its workers."""
    if file != AGENT_FILE:
        yield parse_log_name(file), data
        return
    yield from map(split_prefix, data.splitlines(keepends=True))
