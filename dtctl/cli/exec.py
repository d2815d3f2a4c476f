"""`dtctl exec`: run a command or a shell inside a run on one of its nodes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output
from dtctl.cli.common.completion import complete_node_names, run_names
from dtctl.errors import ConnectError, UsageError

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord
    from dtctl.transport.base import Connection


def exec_(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run.", autocompletion=run_names)],
    node: Annotated[str, typer.Argument(metavar="NODE", help="One of its nodes.", autocompletion=complete_node_names)],
) -> int:
    """Run a command inside a run: in its working folder on a node, with the variables of its workers.

    `dtctl exec RUN NODE -- CMD`; without a command, a shell. Ranks and the values of secrets are not there.
    """
    from dtctl.launch.exec_in_run import run_command
    from dtctl.launch.records.record import find_run

    record = find_run(Path.cwd(), run)
    interactive = not ctx.obj and sys.stdin.isatty()
    if not ctx.obj and not interactive:
        raise UsageError("there is no command", hint=f"dtctl exec {run} {node} -- nvidia-smi")
    size = shutil.get_terminal_size()
    window = (size.columns, size.lines) if interactive else None
    entered = _prepare_job_command if record.info().slurm else _prepare_node_command
    connection, text = entered(record, node, ctx.obj or ["bash", "-i"], window)
    stdin_fd = sys.stdin.fileno() if interactive or not sys.stdin.isatty() else None
    try:
        with _raw_terminal(interactive):
            status = run_command(
                connection,
                text,
                stdin_fd=stdin_fd,
                out=lambda data: output.pass_on(data, as_is=interactive),
                err=lambda data: output.pass_on(data, err=True),
            )
    finally:
        connection.close()
    if status is None:
        raise ConnectError(
            "the command has no exit code: the link was lost, or another process ended the shell in which it ran",
            node=node,
            hint="`pkill -f WORD` ends that shell, too, for WORD is in its command line; `[W]ORD` matches no such line",
        )
    return status


def _prepare_node_command(
    record: RunRecord, node: str, argv: list[str], window: tuple[int, int] | None
) -> tuple[Connection, str]:
    """Return a connection to a node of a run, and the command to run there."""
    from dtctl.cli.fetch import list_fetch_sources
    from dtctl.launch.cluster import build_run_cluster
    from dtctl.launch.exec_in_run import build_inside_command

    (place,) = list_fetch_sources(record, node, where="NODE")
    text = build_inside_command(
        argv,
        run_dir=place.run_dir,
        attempt=int(record.whole_plan()["attempt"]),
        window=window,
    )
    return build_run_cluster(record).make_transport().connect(place.target), text


def _prepare_job_command(
    record: RunRecord, node: str, argv: list[str], window: tuple[int, int] | None
) -> tuple[Connection, str]:
    """Return a connection to the machine with Slurm's commands, and the command to run there."""
    from dtctl.launch.run_spec import load_run_spec
    from dtctl.slurm.exec_in_job import build_job_command, check_node
    from dtctl.slurm.job_watcher import read_job_reference
    from dtctl.slurm.site import choose_slurm_host

    spec, ref = load_run_spec(record), read_job_reference(record)
    with closing(choose_slurm_host(spec)) as site:
        check_node(record, site, ref, node)
        secrets = spec.job.secrets
        text = build_job_command(argv, site=site, ref=ref, run=record.run, node=node, secrets=secrets, window=window)
        return site.transport.connect(site.target), text


@contextmanager
def _raw_terminal(interactive: bool) -> Iterator[None]:
    """Pass every key to the node during the context, including Ctrl-C."""
    if not interactive:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
