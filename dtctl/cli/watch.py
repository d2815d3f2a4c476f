"""`dtctl watch`: look at a run that somebody, or an earlier you, has launched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtctl.cli import output


def watch(
    run: Annotated[str | None, typer.Argument(help="The run.  [default: the newest]", show_default=False)] = None,
) -> int:
    """Show what happens in a run, with its log, until it ends; leaving with Ctrl-C does not disturb it."""
    from dtctl.cli import logs
    from dtctl.launch.record import find_run
    from dtctl.launch.state import state_of

    record = find_run(Path.cwd(), run)
    output.err(f"run {record.run}: {state_of(record).status}", "bold")
    logs.logs(run=record.run, follow=True, node=None, rank=None)
    state = state_of(record)
    output.err(f"{state.status} after {state.duration_s:.1f} s", "bold")
    return int((state.done or {}).get("exit_code", 0))
