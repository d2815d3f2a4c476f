"""Output of the workers of a job in plain mode: files of tasks, in the run's folder that all nodes see."""

from __future__ import annotations

from collections.abc import Iterator

from dtctl.launch.control.failure import AGENT

JOB_LOG = "job.log"
"""Output of the batch file and of srun, in the run's folder."""
RANK_MARK = b"[dtctl:"
AGENT_LOG = "agent.log"


def by_rank(file: str, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a task's file with the rank that has printed them; torchrun marks those of its workers."""
    if file != AGENT_LOG:
        yield int(file.removeprefix("rank-").removesuffix(".log")), data
        return
    for line in data.splitlines(keepends=True):
        mark, closed, text = line.partition(b"] ")
        marked = closed and mark.startswith(RANK_MARK) and mark[len(RANK_MARK) :].isdigit()
        yield (int(mark[len(RANK_MARK) :]), text) if marked else (AGENT, line)
