"""`dtctl report`: one page about a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from dtctl.cli import output
from dtctl.printable import format_count

MOST = 6
"""Largest number of runs on one page; more curves cannot be distinguished."""


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Runs; several are compared.  [default: the newest]", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE.html",
            help="The page; `-` is standard output.  [default: report.html in the run's folder]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write what runs did as one HTML page with plots, which needs no network and no other file."""
    from dtctl.cli.common.files import write_named
    from dtctl.errors import UsageError
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.run_writer import write_private
    from dtctl.report.page import render_report_page
    from dtctl.report.run import check_out, collect_run_facts

    names: list[str | None] = [*dict.fromkeys(runs or ())] or [None]
    if len(names) > MOST:
        raise UsageError(f"{len(names)} runs are too many for one page", hint=f"name at most {MOST}")
    if out is not None and str(out) != "-":
        check_out(out)
    records = [find_run(Path.cwd(), run) for run in names]
    histories = [collect_run_facts(record) for record in records]
    for run in histories:
        if run.metrics is None:
            output.print_stderr(f"note: run {run.state.run} has no metrics, so there is nothing to plot", "yellow")
        elif run.metrics.damaged:
            output.print_stderr(
                f"note: run {run.state.run}: "
                f"{format_count(run.metrics.damaged, 'damaged line of metrics is', 'damaged lines of metrics are')} "
                "left out",
                "yellow",
            )
    text = render_report_page(histories, now=time.time())
    if out is not None and str(out) == "-":
        output.print_raw_text(text)
        return
    path = out or records[0].folder / "report.html"
    if out is None:
        write_private(path, text)
    else:
        write_named(path, text, option="-o")
    output.print_stdout(str(path))
