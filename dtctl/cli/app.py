"""The commands and where they live. A command's file is imported when that command is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

import dtctl

HELP = """Check a cluster, launch PyTorch training on all its nodes, and leave nothing behind.

Start with `dtctl init my-project`, then `cd my-project` and `dtctl launch`.
"""

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Run": {
        "init": "Make a new project from a template.",
        "launch": "Run a job on all its nodes, or show what would be run.",
        "stop": "End a run on all its nodes, and prove that nothing is left.",
        "sbatch": "Write the job as an sbatch file, or submit it.",
        "render": "Write the job for Kubernetes, or hand it to kubectl.",
    },
    "Look": {
        "runs": "List runs: state, exit code, command or cause.",
        "status": "Show a run: step, nodes, restarts, first failure.",
        "logs": "Print what the workers have printed.",
        "watch": "Follow a run on one screen until it ends.",
        "report": "Write a page with plots of what runs did.",
        "fetch": "Bring what a run has written on its nodes.",
        "exec": "Run a command, or a shell, inside a run on a node.",
    },
    "Check": {
        "validate": "Check a spec without touching any node.",
        "doctor": "Find the faulty node or pair, the cause and the fix.",
        "lint": "Find mistakes in distributed training code.",
        "bench": "Measure collectives over the nodes of a spec.",
    },
    "Plan": {
        "advise": "Recommend how to parallelize a training.",
        "nccl": "Explain variables of NCCL, and choose those of a cluster.",
    },
    "Tools": {
        "clean": "Show old runs, trees and sandboxes, and remove them.",
        "sandbox": "Virtual hosts on this machine, with faults on demand.",
        "snapshot": "List, verify, export and prune snapshots.",
    },
}
"""The help: commands in groups, and what each is for. A command is the function of its name in dtctl/cli/NAME.py."""
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "init": ("dtctl init my-gpt --launcher sandbox", "dtctl init my-job --template script --launcher ssh"),
    "launch": (
        "dtctl launch --dry-run",
        "dtctl launch --set train.lr=1e-3 -- --flag-of-the-script",
        "dtctl launch --nodes gpu01,gpu02 --slots 8 -- train.py --lr 1e-3",
        "dtctl launch --detach --name first",
    ),
    "stop": ("dtctl stop", "dtctl stop gpt-1122-093012-k7"),
    "sbatch": ("dtctl sbatch --out job.sbatch", "dtctl sbatch --submit"),
    "render": ("dtctl render --out job.yaml", "dtctl render --apply"),
    "runs": ("dtctl runs", "dtctl runs --json"),
    "status": ("dtctl status", "dtctl status gpt-1122-093012-k7 --json"),
    "logs": (
        "dtctl logs -f",
        "dtctl logs --node gpu02 --rank 9 --tail 50",
        "dtctl logs --attempt -1 --grep 'loss|nan'",
    ),
    "watch": ("dtctl watch",),
    "report": ("dtctl report", "dtctl report run-a run-b -o compare.html"),
    "fetch": ("dtctl fetch", "dtctl fetch gpt-1122-093012-k7 out/checkpoint-40"),
    "exec": ("dtctl exec gpt-1122-093012-k7 gpu02 -- nvidia-smi", "dtctl exec gpt-1122-093012-k7 gpu02"),
    "validate": ("dtctl validate", "dtctl validate --schema > dtctl.schema.json"),
    "doctor": ("dtctl doctor", "dtctl doctor --quick", "dtctl doctor --log slurm-123.out logs/"),
    "lint": ("dtctl lint train.py", "dtctl lint . --format sarif", "dtctl lint --explain DT011"),
    "bench": ("dtctl bench --op all_reduce --sizes 1K:64M",),
    "clean": ("dtctl clean --older 30d", "dtctl clean --larger 1G --yes"),
    "advise": ("dtctl advise --params 7B --gpus 16 --gpu A100 --batch 64", "dtctl advise --write"),
}
"""Examples below the help of a command."""
GROUPS = ("sandbox", "snapshot", "nccl")
"""Commands with commands of their own: `app` in dtctl/cli/NAME.py."""
COMMANDS = tuple(name for section in SECTIONS.values() for name in section if name not in GROUPS)
"""The others, in the order of the help."""
HIDDEN = ("take-up",)
"""Commands like `COMMANDS` that dtctl itself calls."""


class _Commands(TyperGroup):
    """All commands, each imported when it is needed; help with the commands in groups."""

    def __init__(self, **options: Any) -> None:
        """Know the names of all commands; none is there yet."""
        super().__init__(**options)
        self.commands = dict.fromkeys((*COMMANDS, *HIDDEN, *GROUPS))  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a command, imported if need be; None if there is none of that name."""
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load_command(cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ARG002
        """Write each group with what its commands are for."""
        for title, helps in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(helps.items()))


def _load_command(name: str) -> Any:
    """Import the file of a command and return what typer makes of it."""
    python_name = name.replace("-", "_")
    module = import_module(f"dtctl.cli.{python_name}")
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_root)  # with one command alone, typer would make no group
    if name in GROUPS:
        app.add_typer(module.app, name=name)
    else:
        function = getattr(module, python_name, None) or getattr(module, f"{python_name}_")
        app.command(name, hidden=name in HIDDEN, epilog=_examples(name))(function)
    return get_group(app).commands[name]


def _examples(name: str) -> str | None:
    """Return the end of a command's help; the mark keeps its lines as they are."""
    lines = EXAMPLES.get(name)
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines) if lines else None


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
    """Return the arguments before the first `--` of `dtctl launch` or `exec`, and those after it (None without one).

    A parser cannot distinguish `launch -- train.py` from `launch train.py` afterwards: it drops the dashes.
    """
    if arguments[:1] in (["launch"], ["exec"]) and "--" in arguments:
        at = arguments.index("--")
        return arguments[:at], arguments[at + 1 :]
    return arguments, None


def make_app() -> typer.Typer:
    """Return the command line, without importing any command yet."""
    app = typer.Typer(
        name="dtctl",
        cls=_Commands,
        help=HELP,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,  # rich takes longer to import than the help takes to read
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    return app
