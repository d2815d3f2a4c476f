"""Output of the workers of an attempt, read where the job keeps it: in the run's folder that all nodes see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dtctl import folders, names
from dtctl.launch.control.failure import AGENT

JOB_LOG = "job.log"
"""Output of the batch file and of srun, in the run's folder."""
RANK_MARK = b"[dtctl:"
AGENT_LOG = "agent.log"
TAIL_BYTES = 1 << 18


def by_rank(file: str, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a task's file with the rank that has printed them; torchrun marks those of its workers."""
    if file != AGENT_LOG:
        yield int(file.removeprefix("rank-").removesuffix(".log")), data
        return
    for line in data.splitlines(keepends=True):
        mark, closed, text = line.partition(b"] ")
        marked = closed and mark.startswith(RANK_MARK) and mark[len(RANK_MARK) :].isdigit()
        yield (int(mark[len(RANK_MARK) :]), text) if marked else (AGENT, line)


class AttemptOutput:
    """See `culprit.Output`."""

    def __init__(self, folder: Path, attempt: int) -> None:
        """Read the output of an attempt of the run with this folder."""
        self._folder = folder / names.LOGS_DIR / f"attempt-{attempt}"

    def path(self, node: str, rank: int) -> Path:
        """Return the file that a rank's lines are in."""
        own = self._folder / node / f"rank-{rank}.log"
        return own if own.exists() else self._folder / node / AGENT_LOG

    def tail(self, node: str, rank: int) -> str:
        """Return the end of what a rank has printed."""
        path = self.path(node, rank)
        try:
            with os.fdopen(folders.open_regular(str(path)), "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                data = file.read()
        except OSError:
            return ""
        return b"".join(text for owner, text in by_rank(path.name, data) if owner == rank).decode(errors="replace")
