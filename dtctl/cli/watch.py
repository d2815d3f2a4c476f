"""`dtctl watch`: follow a run that was launched earlier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord


def watch(
    run: Annotated[str | None, typer.Argument(help="The run.  [default: the newest]", show_default=False)] = None,
) -> int:
    """Show how a run is doing until it ends; leaving with Ctrl-C does not disturb it.

    A detached run whose launcher has ended, with the machine it ran on for example, is given a new launcher first.
    """
    from dtctl.cli.take_up import take_up_if_alone
    from dtctl.errors import LaunchError
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.state import state_of

    record = find_run(Path.cwd(), run)
    take_up_if_alone(record)
    if output.is_terminal(sys.stdout):
        from dtctl.cli.common.watch_view import show

        state = show(record, steps=_steps(record))
    else:
        from dtctl.cli import logs

        output.err(f"run {record.run}: {state_of(record).status}", "bold")
        logs.logs(run=record.run, follow=True, node=None, rank=None)
        state = state_of(record)
    output.err(f"{state.status} after {state.duration_s:.1f} s", "bold")
    return state.done.exit_code if state.done else LaunchError.exit_code


def _steps(record: RunRecord) -> int | None:
    """Length of the training, if the spec says it."""
    from dtctl.launch.assemble import spec_of_run

    return spec_of_run(record).settings.get("steps")
