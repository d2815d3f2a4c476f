"""The commands and where they live. Imports typer and the command files, which import nothing heavy at their top."""

from __future__ import annotations

import typer

import dtctl

HELP = """Check a cluster, launch PyTorch training on all its nodes, and leave nothing behind.

Start with `dtctl init my-project`, then `cd my-project` and `dtctl launch`.
"""

app = typer.Typer(
    name="dtctl",
    help=HELP,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,  # rich takes longer to import than the help takes to read
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dtctl {dtctl.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", "-V", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def split_rest(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """What stands before the first `--` of `dtctl launch`, and what stands behind it (None without one).

    A parser cannot tell `launch -- train.py` from `launch train.py` afterwards: it drops the dashes.
    """
    if arguments[:1] == ["launch"] and "--" in arguments:
        at = arguments.index("--")
        return arguments[:at], arguments[at + 1 :]
    return arguments, None


def _register() -> None:
    from dtctl.cli import (
        advise,
        bench,
        doctor,
        init,
        launch,
        lint,
        logs,
        nccl,
        render,
        report,
        runs,
        sandbox,
        sbatch,
        snapshot,
        status,
        stop,
        take_up,
        validate,
        watch,
    )

    app.command("init")(init.init)
    app.command("validate")(validate.validate)
    app.command("launch")(launch.launch)
    app.command("runs")(runs.runs)
    app.command("status")(status.status)
    app.command("logs")(logs.logs)
    app.command("watch")(watch.watch)
    app.command("report")(report.report)
    app.command("stop")(stop.stop)
    app.command("sbatch")(sbatch.sbatch)
    app.command("render")(render.render)
    app.command("doctor")(doctor.doctor)
    app.command("advise")(advise.advise)
    app.command("lint")(lint.lint)
    app.command("bench")(bench.bench)
    app.command("take-up", hidden=True)(take_up.take_up)
    app.add_typer(sandbox.app, name="sandbox")
    app.add_typer(snapshot.app, name="snapshot")
    app.add_typer(nccl.app, name="nccl")


_register()
