"""`dtctl launch`: run a job on all its nodes, or show exactly what would be run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtctl import names
from dtctl.cli.common.agreement import Settings, Yes
from dtctl.errors import UsageError


def launch(
    ctx: typer.Context,
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC", help=f"The spec; - is standard input.  [default: {names.SPEC_FILE}]", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="NODES",
            help="Only these nodes of the spec: `a,b` or `gpu[01-04]`. Without a spec, the nodes of -- SCRIPT ARGS.",
        ),
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, metavar="N", help="Workers per node, with --nodes.")] = None,
    set_: Settings = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="One run after another, for each combination of these values."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, without sending it.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write what would be sent to files, without sending it.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Return once the job runs; it continues in the background.")
    ] = False,
    doctor: Annotated[
        bool | None,
        typer.Option(
            "--doctor/--no-doctor",
            help="Examine the nodes first, and start nothing on a faulty cluster.  [default: once an hour]",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="RUN", help="Name of the run.  [default: generated]")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Continue from the newest good snapshot of an earlier run.")
    ] = None,
    yes: Yes = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON Lines on standard output.")] = False,
) -> int:
    """Run a job on all its nodes.

    Everything after `--` is passed to the script, after the arguments of the spec.
    """
    from dtctl.cli.common.launch_steps import LaunchOptions, run_real_launch, show_dry_launch

    options = LaunchOptions(
        spec=spec,
        nodes=nodes,
        slots=slots,
        overrides=tuple(set_ or ()),
        rest=ctx.obj,
        name=name,
        detach=detach,
        doctor=doctor,
        resume=resume,
        json_lines=json_,
        yes=yes,
    )
    if sweep:
        from dtctl.cli.common.sweep import launch_sweep, parse_sweep

        if out is not None:
            raise UsageError("--out is for one run, and --sweep launches several")
        return launch_sweep(options, parse_sweep(sweep), dry=dry_run)
    if dry_run or out is not None:
        return show_dry_launch(options, out)
    return run_real_launch(options)
