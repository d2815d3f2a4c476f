"""`dtctl stop`: end a run and verify that none of its processes is left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output
from dtctl.cli.common.completion import CurrentRun
from dtctl.cli.common.run_argument import list_running, name_run
from dtctl.printable import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtctl.errors import DtctlError
    from dtctl.launch.records.record import RunRecord


def stop(
    run: CurrentRun = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Stop a run on all its nodes; works when its launcher is gone, too.

    The name of a job array stops all its tasks.
    """
    from dtctl.launch.records.record import find_run, list_array_tasks

    is_named = run is not None
    run = name_run(run)
    if run is not None and not is_named:
        _tell_choice(run)
    tasks = list_array_tasks(Path.cwd(), run) if run is not None else []
    if tasks:
        return max(_stop_one_run(record, json_=json_) for record in tasks)
    from dtctl.cli.common.remote_runs_view import find_elsewhere, stop_run

    elsewhere = find_elsewhere(run)
    if elsewhere is not None:
        return _print_left_processes(elsewhere[1].run, stop_run(*elsewhere), json_=json_)
    return _stop_one_run(find_run(Path.cwd(), run), json_=json_)


def _tell_choice(run: str) -> None:
    """Print which run is stopped if the user has named none, if others are running or this one has ended."""
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.state import read_run_state

    others = [record.run for record in list_running() if record.run != run]
    if others:
        output.print_stderr(f"stopping {run}; still running: {', '.join(reversed(others))}", "yellow")
    elif read_run_state(find_run(Path.cwd(), run)).done is not None:
        output.print_stderr(f"{run} has ended; looking for remaining processes")


def _stop_one_run(record: RunRecord, *, json_: bool) -> int:
    """Stop a run, and print the number of its remaining processes; return the exit code."""
    from dtctl.launch import stop as stopping
    from dtctl.launch.cluster import build_run_cluster

    if record.info().slurm:
        from dtctl.cli.common.slurm_runs import stop_job

        code = stop_job(record, as_json=json_)
        if not json_:
            _print_stopped_step(record)
        return code
    grace_s = float(record.plan().get("grace_s", 10.0))
    launcher = stopping.request_launcher_stop(record, wait_s=grace_s + 15)
    cluster = build_run_cluster(record)
    stopped = stopping.stop_on_nodes(record, cluster.targets, cluster.make_transport, by_launcher=launcher)
    code = _print_left_processes(record.run, stopped.left, json_=json_)
    if not json_:
        _print_stopped_step(record)
    return code


def _print_stopped_step(record: RunRecord) -> None:
    """Print the step at which a run was stopped, and the command that continues it, as far as they are known."""
    from dtctl.cli.common.followed_run import has_snapshot, show_continuation
    from dtctl.cli.common.progress_line import PRINTED, read_newest_metrics, read_training_steps
    from dtctl.launch.continuation import keeps_own_state
    from dtctl.launch.records.state import read_run_state
    from dtctl.launch.run_spec import load_run_spec

    state = read_run_state(record)
    if state.done is None or state.done.status != "stopped":
        return
    rows, steps = read_newest_metrics(record), read_training_steps(record)
    total = f" of {steps:,}" if steps else ""
    if state.ledger is not None and state.ledger.steps is not None:
        output.print_stderr(f"stopped at step {state.ledger.steps:,}{total}")
    elif rows:
        where = "in its output" if rows[-1].get(PRINTED) else "in its metrics"
        output.print_stderr(f"the last step {where} is {int(rows[-1]['step']):,}{total}")
    if has_snapshot(record) or keeps_own_state(load_run_spec(record)):
        show_continuation(record)


def _print_left_processes(run: str, left: Mapping[str, int | DtctlError], *, json_: bool) -> int:
    """Print the number of processes that are left on each node; return the exit code."""
    counts = [answer for answer in left.values() if isinstance(answer, int)]
    silent = {node: answer for node, answer in left.items() if not isinstance(answer, int)}
    if json_:
        output.emit_json(
            {
                "run": run,
                "left_behind": None if silent else sum(counts),
                "nodes": {node: answer if isinstance(answer, int) else str(answer) for node, answer in left.items()},
            }
        )
    else:
        nodes = format_count(len(counts), "node")
        output.print_stdout(f"{format_count(sum(counts), 'process', 'processes')} left on {nodes}")
    for error in silent.values():
        output.print_error_with_hint(error)
    return 6 if silent else 0
