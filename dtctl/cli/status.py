"""`dtctl status`: how a run is doing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dtctl.cli import output


def status(
    run: Annotated[str | None, typer.Argument(help="The run.  [default: the newest]", show_default=False)] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Show the state of a run and of its nodes."""
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.state import state_of, where_the_time_went

    record = find_run(Path.cwd(), run)
    if record.info().slurm:
        from dtctl.cli.common.launch_slurm import refresh

        refresh(record)
    state = state_of(record)
    if json_:
        output.emit_json({**asdict(state), "done": state.done and state.done.to_json()})
        return
    colour = {"succeeded": "green", "running": "green", "failed": "red"}.get(state.status, "yellow")
    output.out(
        f"run {state.run}: {state.status} after {state.duration_s:.0f} s, attempt {state.attempt}", colour, "bold"
    )
    if state.waits is not None:
        from dtctl.cli.common.launch_view import waits

        output.out(f"job {state.job} waits: {waits(state.waits)}")
    output.table([[node, condition] for node, condition in state.nodes.items()], header=["NODE", "STATE"])
    if state.ledger is not None:
        output.out(f"time: {where_the_time_went(state.ledger)}")
    for number, reason in enumerate(state.restarts, 1):
        output.out(f"restart {number}: {reason}", "yellow")
    failure = state.done and state.done.first_failure
    if failure:
        subject = f"rank {failure.rank} on {failure.node}" if failure.rank is not None else failure.node
        output.out(f"first failure: {subject}: {failure.summary}")
        if failure.log:
            output.out(f"log: {failure.log}")
    for node, lost in state.done.lost_output.items() if state.done is not None else ():
        output.out(f"output lost: {lost:,} bytes from {node} could not be stored", "red")
    if state.done is not None and state.done.left_behind is None:
        output.out("not every node could be checked for remaining processes; `dtctl stop` checks again", "yellow")
    if state.status == "abandoned":
        advice = "`dtctl watch` starts a new one, " if record.info().detached else ""
        output.out(f"its launcher ended unexpectedly; {advice}`dtctl stop` ends the remaining processes")
