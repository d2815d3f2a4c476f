"""Completion in the shell: names of runs, and of their nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtctl.errors import DtctlError


def run_names(incomplete: str) -> list[str]:
    """Runs of this folder that begin so, the newest first."""
    from dtctl.launch.records.record import list_runs

    return [record.run for record in reversed(list_runs(Path.cwd())) if record.run.startswith(incomplete)]


def node_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Nodes of the run that the line names, or of the newest one, that begin so."""
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.state import state_of

    try:
        nodes = state_of(find_run(Path.cwd(), ctx.params.get("run"))).nodes
    except DtctlError:
        return []
    return [node for node in nodes if node.startswith(incomplete)]


Run = Annotated[
    str | None,
    typer.Argument(help="The run.  [default: the newest]", show_default=False, autocompletion=run_names),
]
"""The argument of commands about one run, ended or not."""
CurrentRun = Annotated[
    str | None,
    typer.Argument(
        help="The run, or the number of a Slurm job.  [default: the newest that is running, else the newest]",
        show_default=False,
        autocompletion=run_names,
    ),
]
"""The argument of commands about a run that is most often running; `run_argument.name_run` reads it."""
