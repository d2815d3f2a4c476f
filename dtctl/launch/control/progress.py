"""Progress of the workers, as their nodes report it.

Workers with dtctl.runtime write these numbers (runtime/telemetry/progress.py); other programs report no progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from dtctl.supervisor.messages.attempt import WorkerProgress


class ReportedPhase(IntEnum):
    """Phase of a worker; the values are those of dtctl.runtime."""

    STARTING = 0
    STEPPING = 1
    EVALUATION = 2
    SNAPSHOT = 3
    COMPILING = 4
    ENDING = 5


PLACES = {0: "before its first micro batch or waiting for data", 1: "in a forward pass", 2: "in a backward pass"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """Newest progress of one worker."""

    node: str
    rank: int
    pid: int
    phase: int
    step: int
    """Optimizer steps done in the whole run."""
    place: int
    """Place in the next step: 8 x micro batch + 0 (data), 1 (forward), 2 (backward) or 7 (after all of them)."""
    first: int
    """Step after which this attempt began."""
    saved: int
    """Step of the last snapshot that was begun."""
    until: int
    """Last step of the whole training; 0 if it is not known."""
    begun_s: float
    """Seconds since the first step of this attempt began."""
    stale_s: float
    """Seconds since the worker last recorded progress."""
    slowest_s: float
    """Seconds of the longest step, without the first ones; 0 if there was none yet."""
    stall_s: float
    """Seconds that the training thread has spent on snapshots in this attempt."""
    evaluation_s: float
    state: str
    """State of the process as the kernel's letter; T: stopped; empty, Z or X: ended."""

    committed: int = 0
    """Step of the newest snapshot that this worker has committed in this attempt; 0: none, or other workers commit."""

    @property
    def exited(self) -> bool:
        """Return whether the worker's process has ended."""
        return self.state in ("", "Z", "X")

    @property
    def finished(self) -> bool:
        """Return whether the worker takes no more steps."""
        return self.exited or self.phase == ReportedPhase.ENDING

    @property
    def left_early(self) -> bool:
        """Return whether the worker takes no more steps although steps remain, or although it had not begun."""
        return self.finished and (self.step < self.until or self.phase == ReportedPhase.STARTING)

    @property
    def position(self) -> tuple[int, int]:
        """Return the position of the worker: of two workers, the one with the smaller position is behind."""
        return self.step, self.place

    @property
    def place_text(self) -> str:
        """Return the place in words: `in a forward pass`."""
        return PLACES.get(self.place % 8, "after its passes")


def build_worker_standings(node: str, reports: Iterable[WorkerProgress]) -> list[RankProgress]:
    """Return the progress of a node's workers from its reports."""
    fields = [name for name in RankProgress.__dataclass_fields__ if name != "node"]
    return [RankProgress(node=node, **{name: getattr(report, name) for name in fields}) for report in reports]


def build_unreported_standing(node: str, rank: int) -> RankProgress:
    """Return the progress of a worker that has reported none."""
    return RankProgress(
        node=node, rank=rank, pid=0, phase=ReportedPhase.STARTING, step=0, place=0,
        first=0, saved=0, until=0, begun_s=0.0, stale_s=0.0,
        slowest_s=0.0, stall_s=0.0, evaluation_s=0.0, state="",
    )  # fmt: skip
