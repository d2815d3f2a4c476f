"""The commands and where they live. A command's file is imported when that command, or the help, is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import typer

import dtctl

HELP = """Check a cluster, launch PyTorch training on all its nodes, and leave nothing behind.

Start with `dtctl init my-project`, then `cd my-project` and `dtctl launch`.
"""

COMMANDS = (
    "init", "validate", "launch", "runs", "status", "logs", "watch", "report", "stop", "sbatch", "render", "doctor",
    "advise", "lint", "bench",
)  # fmt: skip
"""In the order of the help; each is the function of that name in dtctl/cli/NAME.py."""
GROUPS = ("sandbox", "snapshot", "nccl")
"""Commands with commands of their own: `app` in dtctl/cli/NAME.py."""
HIDDEN = ("take-up",)
"""As `COMMANDS`; called by dtctl itself."""


def _version(show: bool) -> None:
    if show:
        typer.echo(f"dtctl {dtctl.__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", "-V", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def split_rest(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """The arguments before the first `--` of `dtctl launch`, and those after it (None without one).

    A parser cannot tell `launch -- train.py` from `launch train.py` afterwards: it drops the dashes.
    """
    if arguments[:1] == ["launch"] and "--" in arguments:
        at = arguments.index("--")
        return arguments[:at], arguments[at + 1 :]
    return arguments, None


def app_of(arguments: Sequence[str]) -> typer.Typer:
    """The command line for these arguments: with the command that they begin with, or with all if that is none."""
    app = typer.Typer(
        name="dtctl",
        help=HELP,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,  # rich takes longer to import than the help takes to read
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    names = (*COMMANDS, *HIDDEN, *GROUPS)
    for name in arguments[:1] if arguments and arguments[0] in names else names:
        python_name = name.replace("-", "_")
        module = import_module(f"dtctl.cli.{python_name}")
        if name in GROUPS:
            app.add_typer(module.app, name=name)
        else:
            app.command(name, hidden=name in HIDDEN)(getattr(module, python_name))
    return app
