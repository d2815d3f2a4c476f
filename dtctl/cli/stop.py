"""`dtctl stop`: end a run and prove that nothing of it is left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output
from dtctl.cli.common.completion import Run
from dtctl.cli.common.job_number import name_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtctl.errors import DtctlError
    from dtctl.launch.records.record import RunRecord


def stop(
    run: Run = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Stop a run on all its nodes, without RUN the newest that has not ended; works when its launcher is gone, too.

    The name of a job array stops all its tasks.
    """
    from dtctl.launch.records.record import find_run, tasks_of

    run = name_run(run)
    tasks = tasks_of(Path.cwd(), run) if run is not None else []
    if tasks:
        return max(_stop(record, json_=json_) for record in tasks)
    from dtctl.cli.common.elsewhere_view import find_elsewhere, stop_run

    elsewhere = find_elsewhere(run)
    if elsewhere is not None:
        return _tell(elsewhere[1].run, stop_run(*elsewhere), json_=json_)
    return _stop(find_run(Path.cwd(), run) if run is not None else _newest(), json_=json_)


def _newest() -> RunRecord:
    """The newest run, or if it has ended the newest that has not; said where that leaves anything open.

    Raises:
        LaunchError: no run was launched from this folder.
    """
    from dtctl.launch.records.record import find_run, list_runs
    from dtctl.launch.records.state import state_of

    newest = find_run(Path.cwd(), None)
    running = [record for record in list_runs(Path.cwd()) if not state_of(record).over]
    has_ended = state_of(newest).done is not None
    chosen = running[-1] if has_ended and running else newest
    others = [record.run for record in running if record.run != chosen.run]
    if others:
        output.err(f"stopping {chosen.run}; still running: {', '.join(others)}", "yellow")
    elif has_ended and chosen.run == newest.run:
        output.err(f"{chosen.run} has ended; looking for what is left of it")
    return chosen


def _stop(record: RunRecord, *, json_: bool) -> int:
    """Stop one run."""
    from dtctl.launch import stop as stopping
    from dtctl.launch.assemble import cluster_of_run

    if record.info().slurm:
        from dtctl.cli.common.slurm_runs import stop_job

        return stop_job(record, as_json=json_)
    grace_s = float(record.plan().get("grace_s", 10.0))
    launcher = stopping.by_launcher(record, wait_s=grace_s + 15)
    # Looked at on the nodes in any case: the launcher's word is good, a look is better.
    cluster = cluster_of_run(record)
    stopped = stopping.on_nodes(record, cluster.targets, cluster.make_transport(), note=not launcher)
    return _tell(record.run, stopped.left, json_=json_)


def _tell(run: str, left: Mapping[str, int | DtctlError], *, json_: bool) -> int:
    """Say how many processes are left on each node; the exit code."""
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
        nodes = "1 node" if len(counts) == 1 else f"{len(counts)} nodes"
        output.out(f"{sum(counts)} processes left on {nodes}")
    for error in silent.values():
        output.error(error)
    return 6 if silent else 0
