"""Progress of the workers, as their nodes report it. Plain data.

Workers with dtctl.runtime write these numbers (runtime/telemetry/progress.py); other programs write none.
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
class Standing:
    """Newest progress of one worker."""

    node: str
    rank: int
    pid: int
    phase: int
    step: int
    """Optimizer steps done, of the whole run."""
    place: int
    """Place in the next step: 8 x micro batch + 0 data, 1 forward, 2 backward; 7: after all of them."""
    first: int
    """Step that this attempt began after."""
    saved: int
    """Step of the last snapshot that was begun."""
    until: int
    """The training's last step; 0 when it is not known."""
    begun_s: float
    """Age of this attempt's first step."""
    stale_s: float
    """Seconds since it noted anything."""
    slowest_s: float
    """The longest step but for the first ones; 0 when there was none yet."""
    stall_s: float
    """Spent on snapshots in this attempt, by the training thread."""
    evaluation_s: float
    state: str
    """The kernel's letter; T: stopped; empty, Z or X: the process has ended."""

    committed: int = 0
    """Step of the newest snapshot that it has committed in this attempt; 0: none, or others commit."""

    @property
    def exited(self) -> bool:
        """Return whether its process has ended."""
        return self.state in ("", "Z", "X")

    @property
    def finished(self) -> bool:
        """Return whether it takes no more steps."""
        return self.exited or self.phase == ReportedPhase.ENDING

    @property
    def left_early(self) -> bool:
        """Return whether it takes no more steps although its training has some left, or had not begun."""
        return self.finished and (self.step < self.until or self.phase == ReportedPhase.STARTING)

    @property
    def position(self) -> tuple[int, int]:
        """Return the position of the worker: of two workers, the one with the smaller position is behind."""
        return self.step, self.place

    @property
    def place_text(self) -> str:
        """Return the place in words: `in a forward pass`."""
        return PLACES.get(self.place % 8, "after its passes")


def standings(node: str, reports: Iterable[WorkerProgress]) -> list[Standing]:
    """Return a node's reports about its workers."""
    fields = [name for name in Standing.__dataclass_fields__ if name != "node"]
    return [Standing(node=node, **{name: getattr(report, name) for name in fields}) for report in reports]


def unheard(node: str, rank: int) -> Standing:
    """Return a worker that has reported no progress."""
    return Standing(
        node=node, rank=rank, pid=0, phase=ReportedPhase.STARTING, step=0, place=0,
        first=0, saved=0, until=0, begun_s=0.0, stale_s=0.0,
        slowest_s=0.0, stall_s=0.0, evaluation_s=0.0, state="",
    )  # fmt: skip
