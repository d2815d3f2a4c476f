"""Where a run's time went: each moment belongs to exactly one phase, so the phases add up to the wall time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from dtctl.launch.record import write_private

PHASES = ("connect", "push", "start", "run", "stop", "restart")


class Ledger:
    """A stop watch with one running phase."""

    def __init__(self, clock: Callable[[], float], *, begun: float | None = None, phase: str = "connect") -> None:
        """Begin with a phase, at `begun` on `clock` (default: now)."""
        self._clock = clock
        self.begun = clock() if begun is None else begun
        self.phase = phase
        self._since = self.begun
        self.spent: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def enter(self, phase: str) -> None:
        """From now on, time belongs to `phase`."""
        now = self._clock()
        self.spent[self.phase] += now - self._since
        self.phase, self._since = phase, now

    def total_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self.begun

    def write(self, path: Path, *, attempts: int) -> None:
        """Record what was spent so far."""
        self.enter(self.phase)
        rounded = {phase: round(spent, 3) for phase, spent in self.spent.items()}
        text = json.dumps({"wall_s": round(self._since - self.begun, 3), "attempts": attempts, "phases_s": rounded})
        write_private(path, text + "\n")
