"""The folder of a run that a test writes as a launcher would, and its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dtctl.launch.records.events import (
    AlertChanged,
    AttemptRunning,
    AttemptStarting,
    Event,
    NodeChanged,
    RunPlanned,
    SnapshotBegun,
    WorkerExited,
)
from dtctl.launch.records.ledger import PHASES
from dtctl.launch.records.record import RunInfo
from dtctl.launch.records.run_writer import RunWriter
from dtctl.metrics.follow import FigureCollector, RunFigures

STARTED = 1_800_000_000.0


class WrittenRun:
    """A run, its launcher and its clock."""

    def __init__(self, base: Path, run: str = "try-1") -> None:
        info = RunInfo(
            run=run, token="0" * 32, pid=0, started=STARTED, spec="dtctl.yaml", command=["dtctl"], detached=False
        )  # fmt: skip
        self.record = RunWriter.create(base, info)
        self.now = STARTED
        self.follower = FigureCollector(self.record, clock=lambda: self.now)

    def happens(self, *events: Event) -> RunFigures:
        for event in events:
            self.record.append_event(event)
        self.follower.collect_new_events()
        return self.follower.figures

    def logs(self, *rows: dict[str, Any]) -> RunFigures:
        """Rows of metrics.jsonl, each a tenth of a second after the one before."""
        with (self.record.folder / "metrics.jsonl").open("a") as file:
            for row in rows:
                self.now += 0.1
                file.write(json.dumps({"time": self.now, **row}) + "\n")
        self.follower.collect_new_events()
        return self.follower.figures

    def spends(self, *, steps: int | None = None, phase: str = "useful", **spent: float) -> RunFigures:
        facts = {
            "wall_s": sum(spent.values()), "attempts": 1, "phases_s": dict.fromkeys(PHASES, 0.0) | spent,
            "goodput": None if steps is None else 0.5, "steps": steps, "steps_lost": 0, "phase": phase, "counted_s": {},
            "course": [["connect", 0.0], ["start", 1.0], [phase, 3.0]],
        }  # fmt: skip
        (self.record.folder / "ledger.json").write_text(json.dumps(facts))
        self.follower.collect_new_events()
        return self.follower.figures


def full_run(base: Path) -> WrittenRun:
    """A run of which everything is known that can be."""
    run = WrittenRun(base)
    run.happens(
        RunPlanned(run="try-1", nodes=("a", "b"), world_size=4, kind="direct"),
        AttemptStarting(attempt=0),
        AttemptRunning(attempt=0, launch_s=1.5),
        NodeChanged(node="a", state="running"),
        WorkerExited(node="b", rank=2, exit_code=1),
        SnapshotBegun(step=5),
        AlertChanged(alert="no-step", state="firing"),
    )
    run.spends(steps=7, connect=1.0, start=2.0, useful=4.0)
    run.logs({"step": 8, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "step_s": 0.1, "samples_per_s": 4.0,
              "tokens_per_s": 400.0, "val_loss": 2.0})  # fmt: skip
    return run
