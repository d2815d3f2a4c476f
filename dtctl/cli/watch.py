"""`dtctl watch`: follow a run that was launched earlier."""

from __future__ import annotations

import sys
from pathlib import Path

from dtctl.cli import output
from dtctl.cli.common.completion import CurrentRun
from dtctl.cli.common.run_argument import name_run


def watch(
    run: CurrentRun = None,
) -> int:
    """Show how a run is doing until it ends; leaving with Ctrl-C does not disturb it.

    A detached run whose launcher has ended, with the machine it ran on for example, is given a new launcher first.
    """
    from dtctl.cli.common.followed_run import format_failure_lines
    from dtctl.cli.common.remote_runs_view import find_elsewhere, watch_run
    from dtctl.cli.take_up import take_up_if_alone
    from dtctl.errors import LaunchError
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.state import read_run_state

    run = name_run(run)
    elsewhere = find_elsewhere(run)
    if elsewhere is not None:
        return watch_run(*elsewhere)
    record = find_run(Path.cwd(), run)
    take_up_if_alone(record)
    if output.is_terminal(sys.stdout):
        from dtctl.cli.common.progress_line import read_training_steps
        from dtctl.cli.common.watch_view import display_live_run

        state = display_live_run(record, steps=read_training_steps(record))
    else:
        from dtctl.cli.logs import logs

        output.print_stderr(f"run {record.run}: {read_run_state(record).status}", "bold")
        logs(run=record.run, follow=True, node=None, rank=None, tail=None, attempt=None, grep=None, since=None)
        state = read_run_state(record)
    for line in format_failure_lines(state.done) if state.done else ():
        output.print_stderr(line, "red")
    output.print_stderr(f"{state.status} after {state.duration_s:.1f} s", "bold")
    return state.done.exit_code if state.done else LaunchError.exit_code
