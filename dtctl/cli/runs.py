"""`dtctl runs`: the runs that were launched from this folder."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dtctl.cli import output


def runs(json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False) -> None:
    """List the runs launched from this folder, the newest last."""
    from dtctl.launch.records.record import list_runs
    from dtctl.launch.records.state import state_of

    states = [state_of(record) for record in list_runs(Path.cwd())]
    if json_:
        output.emit_json({"runs": [asdict(state) for state in states]})
        return
    if not states:
        output.err("no run was launched from this folder")
        return
    rows = [
        [
            state.run,
            state.status if state.over or not state.job else f"{state.status} {_ago(state.looked)}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started)),
            f"{state.duration_s:.0f} s",
            str(len(state.nodes)),
        ]
        for state in states
    ]
    output.table(rows, header=["RUN", "STATUS", "STARTED", "DURATION", "NODES"])


def _ago(looked: float) -> str:
    """When somebody last looked at a job of Slurm; `dtctl status` looks again."""
    seconds = time.time() - looked
    return "" if seconds < 60 else f"({seconds / 60:.0f} min ago)"
