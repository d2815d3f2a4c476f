"""Completion in the shell: names of runs, and of their nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtctl.errors import DtctlError


def run_names(incomplete: str) -> list[str]:
    """Return the runs of this folder whose names begin with the text, the newest first."""
    from dtctl.launch.records.record import list_run_records

    return [record.run for record in reversed(list_run_records(Path.cwd())) if record.run.startswith(incomplete)]


def complete_node_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the nodes, whose names begin with the text, of the run on the command line or of the newest run."""
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.state import read_run_state

    try:
        nodes = read_run_state(find_run(Path.cwd(), ctx.params.get("run"))).nodes
    except DtctlError:
        return []
    return [node for node in nodes if node.startswith(incomplete)]


Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="The run.  [default: the newest]", show_default=False, autocompletion=run_names),
]
"""Argument of commands about one run, which may have ended."""
CurrentRun = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The run, or the number of a Slurm job.  [default: the newest that is running, else the newest]",
        show_default=False,
        autocompletion=run_names,
    ),
]
"""Argument of commands about a run that is usually running; `run_argument.name_run` evaluates it."""
