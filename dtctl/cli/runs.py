"""`dtctl runs`: the runs that were launched from this folder."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.launch.records.state import RunState


def runs(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC", help="With --nodes, the spec.  [default: dtctl.yaml]", show_default=False),
    ] = None,
    nodes: Annotated[
        bool,
        typer.Option("--nodes", help="List the runs that the nodes of the spec have, from all users and machines."),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """List the runs launched from this folder, the newest last."""
    if nodes:
        from dtctl.cli.common.remote_runs_view import show_runs

        return show_runs(spec, json_=json_)
    _of_this_folder(json_=json_)
    return 0


def _of_this_folder(*, json_: bool) -> None:
    from dtctl.launch.records.record import list_run_records
    from dtctl.launch.records.state import read_run_state

    records = list_run_records(Path.cwd())
    states = [read_run_state(record) for record in records]
    infos = [record.info() for record in records]
    if json_:
        told = [{"command": info.command_line, "sweep": info.sweep} for info in infos]
        output.emit_json({"runs": [asdict(state) | more for state, more in zip(states, told, strict=True)]})
        return
    swept = list(dict.fromkeys(key for info in infos for key in info.sweep))
    if not states:
        output.print_stderr("no run was launched from this folder")
        return
    rows = [
        [
            state.run,
            state.status if state.over or not state.job else f"{state.status} {_format_time_since(state.looked)}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started)),
            f"{state.duration_s:.0f} s",
            str(len(state.nodes)),
            "" if state.done is None else str(state.done.exit_code),
            *(info.sweep.get(key, "") for key in swept),
            _describe_run_failure(state) or info.command_line,
        ]
        for state, info in zip(states, infos, strict=True)
    ]
    output.print_table(
        rows,
        header=["RUN", "STATUS", "STARTED", "DURATION", "NODES", "CODE", *swept, "COMMAND, OR WHY IT FAILED"],
        cut=True,
        spare=["NODES", "CODE", "STARTED"],
    )


def _describe_run_failure(state: RunState) -> str:
    """Return the first failure of a run, or the reason why it was never started."""
    from dtctl.launch.records.events import describe_failure_subject

    end = state.done
    if end is None or end.status != "failed":
        return ""
    failure = end.first_failure
    if failure is None:
        return end.error or ""
    subject = describe_failure_subject(failure.node, failure.rank, failure.exit_code, hang=failure.hang)
    return f"{subject}: {failure.summary or 'failed'}"


def _format_time_since(looked: float) -> str:
    """Return the time since the last update of a Slurm job's record; `dtctl status` updates it."""
    seconds = time.time() - looked
    return "" if seconds < 60 else f"({seconds / 60:.0f} min ago)"
